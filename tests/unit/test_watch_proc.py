"""Reading real processes from /proc."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import each
from tests.conftest import wait_until
from tests.unit import targets
from training.host import process
from training.watchdog.probes import procfs, system_calls


def test_a_sleeping_process(tmp_path: Path) -> None:
    with targets.running(tmp_path, targets.LOCK) as (pid, script, _):
        targets.asleep(pid, "futex")
        first, second = procfs.read_process(pid), procfs.read_process(pid)
    assert first and second
    assert (first.pid, first.parent, first.state) == (pid, os.getpid(), "S")
    assert first.command == f"{sys.executable} {script}"
    assert second.cpu_s == first.cpu_s
    assert first.io_bytes and first.io_bytes > 0


def test_a_spinning_process_uses_its_cpu(tmp_path: Path) -> None:
    with targets.running(tmp_path, targets.SPIN) as (pid, _, _):
        before = procfs.read_process(pid)
        assert before
        wait_until(
            lambda: (now := procfs.read_process(pid)) and now.main_cpu_s >= before.main_cpu_s + 0.2,
            20,
            "it computes",
        )
        now = procfs.read_process(pid)
    assert now and now.state == "R" and now.cpu_s >= now.main_cpu_s and now.waits_in == ""


def test_cpu_time_of_other_threads_is_not_the_main_threads(tmp_path: Path) -> None:
    program = (
        targets.SPIN.rpartition("turns()")[0]
        + "import threading, time\nthreading.Thread(target=turns, "
        "daemon=True).start()\ntime.sleep(1000)\n"
    )
    with targets.running(tmp_path, program) as (pid, _, _):
        wait_until(lambda: (now := procfs.read_process(pid)) and now.cpu_s > 0.5, 20, "it computes")
        now = procfs.read_process(pid)
    assert now and now.main_cpu_s < now.cpu_s / 2


def test_a_stopped_process(tmp_path: Path) -> None:
    with targets.running(tmp_path, targets.SPIN) as (pid, _, _):
        targets.stopped(pid)
        now = procfs.read_process(pid)
    assert now and now.state == "T"


def test_dead_and_gone() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(
        lambda: (now := procfs.read_process(ended.pid)) and now.state == "Z",
        20,
        "it has exited and is not reaped",
    )
    zombie = procfs.read_process(ended.pid)
    assert zombie and zombie.command.startswith("[python")
    ended.wait()
    assert procfs.read_process(ended.pid) is None
    assert (
        procfs.environment(ended.pid) == {}
        and procfs.workers(ended.pid) == []
        and procfs.family(ended.pid) == []
    )


def test_io_is_counted(tmp_path: Path) -> None:
    program = (
        "import time\nprint('ready', flush=True)\nwhile True:\n    open(__file__).read(); "
        "time.sleep(0.01)\n"
    )
    with targets.running(tmp_path, program) as (pid, _, _):
        before = procfs.read_process(pid)
        assert before and before.io_bytes is not None
        wait_until(
            lambda: (
                (now := procfs.read_process(pid))
                and (now.io_bytes or 0) > (before.io_bytes or 0) + 1000
            ),
            20,
            "it reads",
        )


def test_family_and_workers(tmp_path: Path) -> None:
    program = """
import multiprocessing, subprocess, time
if __name__ == "__main__":
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    forked.start()
    spawned = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1000,))
    spawned.start()
    shell = subprocess.Popen(["sh", "-c", "sleep 1000; true"])
    print("ready", forked.pid, spawned.pid, shell.pid, flush=True)
    time.sleep(1000)
"""
    with targets.running(tmp_path, program) as (pid, _, logged):
        forked, spawned, shell = map(int, logged[1:])
        wait_until(lambda: procfs.family(shell), 20, "the shell's child")
        family, workers = procfs.family(pid), procfs.workers(pid)
        (sleep,) = procfs.family(shell)
    # The resource tracker of the spawned child is a descendant, but never works.
    assert {forked, spawned, shell, sleep} < set(family) and len(family) == 5
    assert family.index(shell) < family.index(sleep)
    assert workers == sorted([forked, spawned])


@pytest.mark.slow  # 5 s: a real pool imports torch twice
def test_the_compilers_of_a_rank_load_no_data(tmp_path: Path) -> None:
    program = """
import multiprocessing, os, time
from torch._inductor.compile_worker.subproc_pool import SubprocPool
if __name__ == "__main__":
    os.setsid()  # as a rank
    pool = SubprocPool(2)
    forked = {pool.submit(os.getpid).result() for _ in range(8)}
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    worker.start()
    print("ready", worker.pid, pool.process.pid, *forked, flush=True)
    time.sleep(1000)
"""
    token = process.new_token()
    mine = {process.TOKEN: token}
    with targets.running(tmp_path, program, env=mine) as (pid, _, logged):
        worker, *pool = map(int, logged[1:])
        assert set(pool) <= set(procfs.family(pid))
        assert procfs.workers(pid) == [worker]
        assert pool[0] in process.marked(token)
        os.kill(pid, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not {pid, worker} & process.marked(token).keys(), 20, "both have ended")
        assert process.sweep(token) == {}, "no warning about the pool"
        wait_until(lambda: not process.marked(token), 20, "the pool has been ended")


def test_a_polling_process_goes_to_sleep_repeatedly(tmp_path: Path) -> None:
    with targets.running(tmp_path, targets.LOCK) as (pid, _, _):
        targets.asleep(pid, "futex")
        before = procfs.turns(pid)
        assert before > 0 and procfs.turns(pid) == before
    with targets.running(
        tmp_path, "import time\nprint('ready', flush=True)\nwhile True:\n    time.sleep(0.01)\n"
    ) as (pid, _, _):
        before = procfs.turns(pid)
        wait_until(lambda: procfs.turns(pid) > before + 3, 20, "it polls")
    assert procfs.turns(pid) == 0


def test_who_holds_the_lock_of_a_file(tmp_path: Path) -> None:
    code = f"import fcntl\nfcntl.flock(open({str(tmp_path / 'lock')!r}, 'w'), fcntl.LOCK_EX)"
    with (tmp_path / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen([sys.executable, "-c", code]) as waits:
            wait_until(lambda: procfs.lock_holders().get(waits.pid) == os.getpid(), 20)
            assert procfs.locked_file(waits.pid) == str(tmp_path / "lock")
            assert procfs.locked_file(os.getpid()) == ""
            fcntl.flock(held, fcntl.LOCK_UN)
    assert waits.returncode == 0 and waits.pid not in procfs.lock_holders()


EVENT_LOOP = """
import asyncio, os, sys, threading
def prompt():
    loop = asyncio.new_event_loop()
    loop.add_reader(int(sys.argv[1]), print)
    loop.run_forever()
if sys.argv[2:]:
    threading.Thread(target=prompt).start()
    threading.Event().wait()
prompt()
"""
IN_A_THREAD = "import _thread, time\n_thread.start_new_thread(input, ())\ntime.sleep(1000)"


def polls_in(pid: int, calls: list[str]) -> bool:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return any((task / "syscall").read_text().split()[0] in calls for task in tasks)


@pytest.mark.parametrize(
    ("program", "words", "expected", "calls"),
    [
        ("input()", [], (True, False), "read select"),
        (IN_A_THREAD, [], (False, False), "read select"),
        (EVENT_LOOP, ["0"], (True, True), "epoll epoll_pwait2"),
        (EVENT_LOOP, ["3"], (False, False), "epoll epoll_pwait2"),
        # the prompt of ipdb
        (EVENT_LOOP, ["0", "in a thread"], (False, True), "epoll epoll_pwait2"),
    ],
)
def test_waiting_for_input(
    program: str, words: list[str], expected: tuple[bool, bool], calls: str
) -> None:
    """By the main thread, and by any thread with an event loop."""
    end, other = os.pipe()
    code = f"import os\nos.dup2({end}, 3)\nprint('ready', flush=True)\n{program}"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[end],
    ) as process:
        try:
            assert process.stdout and process.stdout.readline() == b"ready\n"
            known = system_calls._NAMES[os.uname().machine]
            numbers = [str(number) for number, name in known.items() if name in calls.split()]
            wait_until(lambda: polls_in(process.pid, numbers))
            found = system_calls.reads_input(process.pid), system_calls.prompts(process.pid)
            assert found == expected
        finally:
            process.kill()
            os.close(end)
            os.close(other)


def test_environment(tmp_path: Path) -> None:
    with targets.running(tmp_path, targets.SPIN, env={"RANK": "3", "ODD": "a=b\nc"}) as (pid, _, _):
        found = procfs.environment(pid)
    assert (found["RANK"], found["ODD"]) == ("3", "a=b\nc")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_another_users_process_is_unknown() -> None:
    init = procfs.read_process(1)
    assert init and init.io_bytes is None and procfs.environment(1) == {}


def test_tracing_is_allowed_with_and_without_yama() -> None:
    # Called twice, which must not matter; and in a forked child.
    code = (
        "import os; from training.host import process; process.allow_tracing(); "
        "process.allow_tracing();"
    )
    code += "pid = os.fork(); pid or os._exit(0); print(os.waitpid(pid, 0)[1])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(process.__file__).parents[2],
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_name_with_parentheses_and_spaces_is_read_right(tmp_path: Path) -> None:
    program = (
        "import ctypes, signal\nctypes.CDLL(None).prctl(15, b'a) R 1 (', 0, 0, "
        "0)\nprint('ready', flush=True)\nsignal.pause()\n"
    )
    with targets.running(tmp_path, program) as (pid, _, _):
        targets.asleep(pid)
        now = procfs.read_process(pid)
        assert now and now.parent == os.getpid()
        os.kill(pid, signal.SIGKILL)


@each(
    ("target", "gpu"),
    [
        ("/dev/nvidia0", True),
        ("/dev/nvidia12", True),
        ("/dev/dxg", True),
        ("/dev/nvidiactl", False),
    ],
)
def test_which_devices_are_gpus(target: str, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "open_files", lambda pid: {"socket:[1]", target})
    assert procfs.uses_gpu(os.getpid()) == gpu

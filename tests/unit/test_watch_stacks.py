"""Stacks of real processes, by py-spy and faulthandler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, wait_until
from tests.unit import targets
from tests.unit.conftest import clean_environment
from training.host import packages
from training.watchdog.probes import procfs, stacks, waits
from training.watchdog.probes.stacks import Frame, Stack, Thread


def taken(pid: int) -> Stack:
    answer = stacks.dump([pid])[pid]
    assert isinstance(answer, Stack), answer
    return answer


def at(thread: Thread | None) -> str:
    assert thread
    frame = stacks.own(thread.frames)
    assert frame
    return f"{Path(frame.file).name}:{frame.line} ({frame.function})"


def test_a_lock(tmp_path: Path) -> None:
    with targets.running(tmp_path, targets.LOCK) as (pid, script, _):
        targets.asleep(pid, "futex")
        stack = taken(pid)
    line = targets.line_of(script, "lock.acquire()")
    assert (stack.pid, stack.source) == (pid, "py-spy")
    main = stack.main
    assert main and main.name == "MainThread" and not main.active and not main.holds_gil
    assert str(main.frames[0]) == f"{script}:{line} (takes_it_twice)"
    helper = next(thread for thread in stack.threads if thread.name == "helper")
    assert not helper.main and Path(helper.frames[0].file).name == "threading.py"
    assert at(helper) == f"target.py:{targets.line_of(script, 'Event().wait')} (helper)"
    text = stack.text().splitlines()
    assert text[:3] == [
        f"pid {pid} (py-spy)",
        "Thread MainThread [main]",
        f"    {script}:{line} (takes_it_twice)",
    ]


def test_an_endless_loop(tmp_path: Path) -> None:
    with targets.running(tmp_path, targets.SPIN) as (pid, _, _):
        stack = taken(pid)
        wait_until(lambda: any(one.holds_gil for one in taken(pid).threads), 20, "seen on the CPU")
    assert stack.main and stack.main.frames[0].name == "turns"


def test_a_stopped_process_has_a_stack_and_stays_stopped(tmp_path: Path) -> None:
    with targets.running(tmp_path, targets.LOCK) as (pid, _, _):
        targets.asleep(pid, "futex")
        targets.stopped(pid)
        assert at(taken(pid).main).endswith("(takes_it_twice)")
        now = procfs.read_process(pid)
    assert now and now.state == "T"


def test_the_gil_held_in_c(tmp_path: Path) -> None:
    with targets.running(tmp_path, targets.GIL) as (pid, script, _):
        targets.asleep(pid, "nanosleep")
        stack = taken(pid)
    assert [one.main for one in stack.threads if one.holds_gil] == [True]
    assert at(stack.main) == f"target.py:{targets.line_of(script, 'sleep(1000)')} (holds)"


def test_a_forked_child_and_its_parent_at_once(tmp_path: Path) -> None:
    with targets.running(tmp_path, targets.FORK) as (pid, _, logged):
        child = int(logged[1])
        targets.asleep(pid)
        targets.asleep(child)
        found = stacks.dump([pid, child, pid])
    assert set(found) == {pid, child}
    parents, childs = found[pid], found[child]
    assert isinstance(parents, Stack) and isinstance(childs, Stack)
    assert parents.main and parents.main.frames[0].function == "<module>"
    assert childs.main and childs.main.frames[0].function == "child"


def test_a_process_is_not_disturbed(tmp_path: Path) -> None:
    # A signal, or a stop as by a debugger, would interrupt the sleep: it would return early and
    # report it.
    program = (
        "import select\nprint('ready', flush=True)\nselect.select([], [], [], "
        "1000)\nprint('woken')\n"
    )
    with targets.running(tmp_path, program) as (pid, _, _):
        targets.asleep(pid)
        before = Path(f"/proc/{pid}/status").read_text()
        for _ in range(20):
            taken(pid)
        after = Path(f"/proc/{pid}/status").read_text()
    switches = [
        next(line for line in text.splitlines() if line.startswith("voluntary"))
        for text in (before, after)
    ]
    assert switches[0] == switches[1]


def test_reasons_for_no_stack(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(
        lambda: (now := procfs.read_process(ended.pid)) and now.state == "Z", 20, "it has ended"
    )
    with subprocess.Popen(["sleep", "1000"]) as other:
        found = stacks.dump([ended.pid, other.pid])
        other.kill()
    ended.wait()
    assert found == {
        ended.pid: f"process {ended.pid} has ended",
        other.pid: f"process {other.pid} is not Python",
    }
    assert stacks.dump([ended.pid]) == {ended.pid: f"process {ended.pid} has ended"}
    assert stacks.dump([]) == {}


def test_no_permission(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    # py-spy as another user: passed as a descriptor, because that user cannot enter these folders.
    handle = os.open(packages.program("py-spy") or "", os.O_RDONLY)
    done = subprocess.run(
        [f"/proc/self/fd/{handle}", "dump", "--json", "--nonblocking", "--pid", str(os.getpid())],
        user=65534, pass_fds=[handle], cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    os.close(handle)
    assert done.returncode != 0
    assert stacks._reason(os.getpid(), done.stderr) == (
        f"process {os.getpid()} cannot be inspected: run this as its user or as root, and see "
        f"/proc/sys/kernel/yama/ptrace_scope"
        " (0: allowed; in a container: --cap-add=SYS_PTRACE)"
    )


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    program = folder / "py-spy"
    program.write_text(f"#!/bin/sh\n{shell}\n")
    program.chmod(0o755)
    monkeypatch.setattr(packages, "program", lambda name: str(program))


def test_without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "program", lambda name: None)
    assert stacks.dump([1]) == {
        1: f"py-spy is not installed, so there are no stacks: {packages.install(['py-spy'])}"
    }


def test_a_torn_read_is_retried_finally_with_the_process_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(
        tmp_path,
        monkeypatch,
        f'echo "$@" >>"{tmp_path}/calls"; echo "Error: Failed to copy memory" >&2; exit 1',
    )
    me = os.getpid()
    assert stacks.dump([me]) == {me: f"process {me}: py-spy reported: Error: Failed to copy memory"}
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"dump --json --nonblocking --pid {me}"] * 2 + [f"dump --json --pid {me}"]


def test_an_unresponsive_py_spy_is_killed_and_its_stop_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(
        tmp_path,
        monkeypatch,
        'case "$*" in *nonblocking*) exit 1;; esac; kill -STOP "${4}"; exec sleep 1000',
    )
    with targets.running(tmp_path, targets.LOCK) as (pid, _, _):
        targets.asleep(pid, "futex")
        begin = time.monotonic()
        assert stacks.dump([pid], 1.0) == {pid: f"process {pid}: py-spy did not answer in time"}
        assert time.monotonic() - begin < 5
        targets.asleep(pid, "futex")


def test_no_more_dumps_at_once_than_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first processes are read first; all together would share the cores until the limit."""
    monkeypatch.setattr(stacks.env_vars, "cpu_count", lambda: 2)
    running, most, order = set[int](), 0, list[int]()
    lock, together = threading.Lock(), threading.Barrier(stacks.AT_LEAST)

    def dump(program: str, pid: int, end: float) -> str:
        nonlocal most
        with lock:
            running.add(pid)
            order.append(pid)
            most = max(most, len(running))
        together.wait(60)
        with lock:
            running.discard(pid)
        return ""

    monkeypatch.setattr(stacks, "_dump", dump)
    assert list(stacks.dump(range(40, 80))) == list(range(40, 80))
    assert most <= stacks.AT_LEAST and set(order[:4]) == {40, 41, 42, 43}
    monkeypatch.setattr(stacks.env_vars, "cpu_count", lambda: 64)
    most, together = 0, threading.Barrier(stacks.AT_LEAST + 1)
    stacks.dump(range(40, 80))
    assert stacks.AT_LEAST < most <= stacks.AT_ONCE


def test_faulthandlers_last_dump(tmp_path: Path) -> None:
    file = tmp_path / "rank0.stacks"
    program = (
        f"import faulthandler, signal\nfaulthandler.register(signal.SIGUSR2, "
        f"file=open({str(file)!r}, 'w'), all_threads=True)\n"
    )
    program += targets.LOCK + "\n"
    program = program.replace("lock.acquire()\n    print", "lock.acquire()\n    other()\n    print")
    program = program.replace(
        "def takes", "def other():\n    signal.raise_signal(signal.SIGUSR2)\n\ndef takes"
    )
    with targets.running(tmp_path, program) as (pid, script, _):
        first = file.read_text()
        targets.asleep(pid, "futex")
        os.kill(pid, signal.SIGUSR2)
        wait_until(
            lambda: file.read_text() != first and file.read_text().endswith("<module>\n"),
            20,
            "the second dump",
        )
        stack = stacks.from_faulthandler(file)
        assert stack and stack.source == "faulthandler" and len(stack.threads) == 2
        assert (
            at(stack.main)
            == f"target.py:{targets.line_of(script, 'lock.acquire()')} (takes_it_twice)"
        )
        file.write_text(first)
        assert at((stacks.from_faulthandler(file) or stack).main).endswith("(other)")
    assert stacks.from_faulthandler(tmp_path / "none") is None
    file.write_text("")
    assert stacks.from_faulthandler(file) is None


def test_a_thread_between_two_dumps_belongs_to_the_second(tmp_path: Path) -> None:
    file = tmp_path / "rank0.stacks"
    dumps = 'Current thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n'
    dumps += 'Thread 0x2 [worker] (most recent call first):\n  File "b.py", line 2 in g\n\n'
    dumps += 'Current thread 0x1 [main] (most recent call first):\n  File "c.py", line 3 in h\n'
    file.write_text(dumps)
    stack = stacks.from_faulthandler(file)
    assert stack and [(t.name, t.main, [str(f) for f in t.frames]) for t in stack.threads] == [
        ("worker", False, ["b.py:2 (g)"]),
        ("MainThread", True, ["c.py:3 (h)"]),
    ]


def test_a_wait_without_a_frame_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "work.wait()\nos.wait()\nlock.acquire()\n\n"
        "store.get('a')\nc10d._get_default_store().get('a')\nself.tcp_store.wait(['a'])\nqueue.get()\n"
    )
    found = [
        waits.in_collective(Thread("", True, False, False, (Frame(str(script), line, "f"),)))
        for line in range(1, 9)
    ]
    assert found == ["wait", None, None, None, "store.get", "store.get", "wait", None]


def test_waits_in_other_parts_of_torch_distributed(tmp_path: Path) -> None:
    """ZeRO and pipelining wait for their handles; DTensor and compiled code in an operator."""
    torch = tmp_path / "site-packages/torch"
    lines = {
        "distributed/optim/zero_redundancy_optimizer.py": "_ = [x.wait() for x in handles]",
        "distributed/pipelining/schedules.py": "w.wait()",
        "distributed/checkpoint/state_dict_saver.py": "all_writes.wait()",
        "utils/data/reader.py": "event.wait()",
    }
    for name, line in lines.items():
        (torch / name).parent.mkdir(parents=True, exist_ok=True)
        (torch / name).write_text(f"{line}\n")
    compiled = tmp_path / "compiled.py"
    compiled.write_text("wait_tensor.default(buffer)\nmm.default(a, b)\n")
    operator = str(torch / "_ops.py")
    functional = str(torch / "distributed/_functional_collectives.py")
    found = [
        waits.in_collective(
            Thread("", True, False, False, tuple(Frame(file, line, "f") for file, line in frames))
        )
        for frames in (
            *([(str(torch / name), 1)] for name in lines),
            [(operator, 1279), (functional, 142)],
            [(operator, 1279), (str(compiled), 1)],
            [(operator, 1279), (str(compiled), 2)],
        )
    ]
    assert found == ["wait", "wait", None, None, "wait_tensor", "wait_tensor", None]


def test_frames_of_the_launcher_around_a_script_are_not_shown(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import time\ndef wait():\n    print('ready', flush=True)\n    time.sleep(1000)\nwait()\n"
    )
    command = [sys.executable, "-u", str(ROOT / "lib/run_script.py"), str(tmp_path), str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_environment()) as process:
        try:
            assert process.stdout and process.stdout.readline()
            targets.asleep(process.pid, "nanosleep")
            stack = taken(process.pid)
            process.send_signal(signal.SIGUSR2)
            wait_until(
                lambda: (
                    (own := stacks.from_faulthandler(tmp_path / "rank0.stacks"))
                    and own.main
                    and own.main.frames
                )
            )
        finally:
            process.kill()
    result = stacks.from_faulthandler(tmp_path / "rank0.stacks")
    for main in (stack.main, result and result.main):
        assert main and [(f.file, f.name) for f in main.frames] == [
            (str(script), "wait"),
            (str(script), "<module>"),
        ]


def test_a_process_that_exits_before_it_is_continued(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(pid: int, number: int) -> None:
        raise ProcessLookupError

    with targets.running(tmp_path, targets.LOCK) as (pid, _, _), monkeypatch.context() as patched:
        targets.stopped(pid)
        patched.setattr(stacks.os, "kill", gone)
        stacks._let_go(pid)

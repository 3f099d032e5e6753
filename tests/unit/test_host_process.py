"""Children die with their parent, however it ends; no process outlives a run."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.unit.conftest import ROOT, clean_environment, python
from training.host import proc_memory, process


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def parent_and_child(tie: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A parent and the PID of its child, which has executed `tie` and waits forever."""
    begin = "import os, signal; from training.host import process; parent = os.getppid()"
    child = f"{begin}; {tie}; print(os.getpid(), flush=True); signal.pause()"
    code = (
        f"import subprocess, sys, signal; subprocess.Popen([sys.executable, '-c', {child!r}]); "
        f"signal.pause()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=clean_environment()
    )
    assert parent.stdout
    pid = int(parent.stdout.readline())
    try:
        yield parent, pid
    finally:
        for one in (pid, parent.pid):
            if alive(one):
                os.kill(one, signal.SIGKILL)
        parent.communicate()


def as_first_process(*words: object, **variables: str) -> tuple[int, bytes, bytes]:
    """The result of this Python program as the first process of a container."""
    space = ("unshare", "--pid", "--fork")
    if subprocess.run([*space, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no private PID namespace here (unshare --pid)")
    line = [*space, sys.executable, *map(str, words)]
    env = clean_environment(**variables)
    done = subprocess.run(line, capture_output=True, env=env, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_signal_ends_the_first_process_of_a_container(number: int) -> None:
    code = (
        "import os; from training.host import process; assert os.getpid() == 1; "
        f"process.die_of_stop_signals(); os.kill(1, {number}); print('lives')"
    )
    assert as_first_process("-c", code) == (128 + number, b"", b"")


def test_a_stop_signal_ends_every_command_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(f"import os; os.kill(1, {int(signal.SIGTERM)}); print(1)")
    done = as_first_process(ROOT / "lib/run_module.py", "waits", PYTHONPATH=str(tmp_path))
    assert done == (128 + signal.SIGTERM, b"", b"")


@pytest.mark.parametrize("tie", ["process.die_with_parent()", "process.die_with_parent(parent)"])
def test_a_child_dies_with_its_killed_parent(tie: str) -> None:
    with parent_and_child(tie) as (parent, child):
        assert alive(child)
        parent.kill()
        parent.wait()
        wait_until(lambda: not alive(child), 20, "the child is gone")


def test_without_it_the_child_survives() -> None:
    # Otherwise the test above would prove nothing.
    with parent_and_child("pass") as (parent, child):
        parent.kill()
        parent.wait()
        assert alive(child)


@pytest.mark.parametrize(("variables", "number"), [({"DUET_SCRIPT": "x.sh"}, 15), ({}, 0)])
def test_only_a_plan_is_stopped_with_the_script_that_waits_for_it(
    variables: dict[str, str], number: int
) -> None:
    """The shell that has started train.py may end before it."""
    code = (
        "import ctypes; from training.host import process; number = ctypes.c_int()\n"
        "with process.stoppable(): process._libc.prctl(2, ctypes.byref(number))\n"
        "print(number.value)"
    )  # 2: PR_GET_PDEATHSIG
    assert python("-c", code, **variables).stdout == f"{number}\n"


def test_an_earlier_death_of_the_parent_is_detected() -> None:
    code = "from training.host import process; process.die_with_parent(1 << 22); print('survived')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def refuse(number: int) -> None:
    raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("missing", ["", "attribute", "ENOSYS", "EPERM"])
def test_the_exit_of_a_child_is_seen_also_without_pidfds(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """The Python of conda has no such function, a kernel before 5.3 no such call."""
    if missing == "attribute":
        monkeypatch.delattr(os, "pidfd_open")
    elif missing:
        monkeypatch.setattr(os, "pidfd_open", lambda pid: refuse(getattr(errno, missing)))
    for early in (False, True):  # waited for before the exit is seen
        child = subprocess.Popen(["sleep", "1000"])
        fd = process.exit_fd(child.pid)
        assert not select.select([fd], [], [], 0.05)[0]
        child.kill()
        if early:
            child.wait()
        assert select.select([fd], [], [], 20)[0] and child.wait() == -signal.SIGKILL
        os.close(fd)


def test_too_few_open_files_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", lambda pid: refuse(errno.EMFILE))
    with pytest.raises(OSError, match="Too many open files"):
        process.exit_fd(os.getpid())


LEAVES = """
import subprocess, sys
from multiprocessing import shared_memory
kept = shared_memory.SharedMemory(create=True, size=1000, name=sys.argv[1])
subprocess.Popen(["sleep", "3600"], start_new_session=True)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_sweep_leaves_neither_processes_nor_shared_memory() -> None:
    token = process.new_token()
    env = clean_environment() | {process.TOKEN: token}
    child = subprocess.Popen(
        [sys.executable, "-c", LEAVES, token],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout and child.stdout.readline() == "ready\n"
    assert Path("/dev/shm", token).exists()
    # On a full machine the environment of a process that just started may still be unreadable.
    wait_until(lambda: len(process.marked(token)) == 3, what="three processes")
    swept = process.sweep(token)
    child.communicate()
    assert not Path("/dev/shm", token).exists() and not process.marked(token)
    sleeper, python = sorted(swept.values(), key=len)
    assert sleeper.startswith("sleep ") and python.startswith(f"{sys.executable} "), swept


def test_helpers_get_limited_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "TIDYING_S", 0.1)
    token = process.new_token()
    code = "import time; print('multiprocessing.resource_tracker', flush=True); time.sleep(3600)"
    env = clean_environment() | {process.TOKEN: token}
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout and child.stdout.readline()
    assert process.sweep(token) == {} and child.wait() == -signal.SIGKILL
    child.communicate()


# the tracker of a busy machine, which takes a while to import and to unlink
TIDIES = """
import time
from pathlib import Path
print("multiprocessing.resource_tracker", flush=True)
while time.process_time() < 0.5:
    pass
Path({file!r}).unlink()
"""


def test_a_tracker_that_still_works_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "TIDYING_S", 0.1)
    token, file = process.new_token(), tmp_path / "shared"
    file.touch()
    env = clean_environment() | {process.TOKEN: token}
    code = TIDIES.format(file=str(file))
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout and child.stdout.readline()
    assert process.sweep(token) == {}
    assert child.wait() == 0 and not file.exists()
    child.communicate()


def test_stop_signals_are_handled_by_the_parent() -> None:
    code = (
        "import os; from training.host import process; process.ignore_stop_signals();"
        "[os.kill(os.getpid(), s) for s in process.STOP_SIGNALS]; print('survived')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "survived\n")
    assert set(process.STOP_SIGNALS) == {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


def test_an_exiting_process_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    token, read = process.new_token(), proc_memory.read
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, process.TOKEN: token})
    try:
        # Popen() may return before /proc shows what was executed
        wait_until(lambda: process.marked(token) == {child.pid: "sleep 60"}, 10)
        # as the kernel shows a process that has released its memory
        monkeypatch.setattr(
            proc_memory, "read", lambda pid, name: b"" if name == "cmdline" else read(pid, name)
        )
        assert process.marked(token) == {}
    finally:
        child.kill()
        child.wait()

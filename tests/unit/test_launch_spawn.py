"""Ranks that the operating system does not start."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from training.core.errors import UserError
from training.host import process
from training.launcher import spawn
from training.launcher.child import Child
from training.launcher.local_ranks import LocalRanks

ELF = b"\x7fELF for another processor"


def start(command: list[str], **more: Any) -> list[Child]:
    team = LocalRanks(range(2), 2, "127.0.0.1", 1)
    return spawn.start_ranks(
        team, command, process.new_token(), ours=False, more=lambda rank: {}, **more
    )


def descriptors() -> set[tuple[str, str]]:
    """Open files with what they are; one of an earlier test may be closed at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of this listing
            found.add((number, str(Path("/proc/self/fd", number).readlink())))
    return found


def test_a_program_for_another_processor(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(ELF)
    program.chmod(0o755)
    before = descriptors()
    with pytest.raises(UserError) as caught:
        start([str(program)])
    assert [problem.code for problem in caught.value.problems] == ["rank.not_started"]
    assert descriptors() <= before


def test_the_ranks_before_it_are_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real, started = spawn._start, list[Child]()

    def second_fails(command: list[str], *more: Any, ours: bool) -> Child:
        argv = [str(tmp_path / "missing")] if started else command
        started.append(real(argv, *more, ours=ours))
        return started[-1]

    monkeypatch.setattr(spawn, "_start", second_fails)
    with pytest.raises(UserError):
        start([sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"])
    assert [child.popen.returncode for child in started] == [-9]


def test_a_rank_gets_the_ctrl_c_that_its_launcher_ignores() -> None:
    """Another machine may have got it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = "import signal; raise SystemExit(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    for child in start([sys.executable, "-I", "-S", "-c", code]):
        assert child.popen.wait(30) == 0
        for fd in (child.pidfd, *child.outputs.values()):
            os.close(fd)


@pytest.mark.parametrize("watched", [False, True])
def test_a_rank_ignores_a_hang_up_and_another_launcher_does_not(watched: bool) -> None:
    """systemd ends a session by TERM and at once HUP to every process, before any has saved."""
    code = "import signal; raise SystemExit(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    command = [sys.executable, "-I", "-S", "-c", code]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    token = process.new_token()
    try:
        started = [spawn.start_watched(command, token)] if watched else start(command)
    finally:
        signal.signal(signal.SIGHUP, before)
    for child in started:
        assert child.popen.wait(30) == (not watched)
        for fd in (child.pidfd, *child.outputs.values()):
            os.close(fd)


@pytest.mark.parametrize("call", ["pipe", "pidfd_open"])
def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """For the output of the second rank, or to watch the first one."""
    real, done = getattr(os, call), []

    def fails(*args: int) -> Any:
        done.append(args)
        if len(done) > (3 if call == "pipe" else 0):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*args)

    before = descriptors()
    monkeypatch.setattr(spawn.os, call, fails)
    with pytest.raises(UserError) as caught:
        start([sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"])
    monkeypatch.undo()
    (problem,) = caught.value.problems
    assert problem.code == "rank.not_started" and problem.fixes == ["ulimit -n 1024"]
    assert "output of a rank cannot be read: Too many open files" in str(caught.value)
    assert descriptors() <= before


def test_a_pipe_where_the_system_has_no_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> tuple[int, int]:
        raise OSError("out of pty devices")

    monkeypatch.setattr(spawn.pty, "openpty", none_left)
    monkeypatch.setattr(spawn.os, "isatty", lambda fd: True)
    streams = spawn.Streams(ours=False, first=True)
    os.write(streams.writers[1], b"x")
    assert os.read(streams.readers[1], 8) == b"x"
    for fd in (*streams.writers.values(), *streams.readers.values()):
        os.close(fd)

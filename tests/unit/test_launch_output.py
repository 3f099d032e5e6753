"""Output of a rank: all of it in its file, in large chunks; the log as shown by a terminal."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import selectors
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training.core import log as console
from training.core.rundir import RunDir
from training.launcher import backlog, output
from training.launcher.backlog import Backlog
from training.launcher.child import Child
from training.launcher.output import RankOutput
from training.launcher.outputs import Outputs

TRACEBACK = (
    b"Exception in thread Thread-1 (work):\nTraceback (most recent call last):\n  File "
    b'"a.py", line 3, in work\nValueError: planted\n'
)


@pytest.fixture
def through(log: Path, tmp_path: Path) -> Callable[..., RankOutput]:
    """Each piece is read by itself; the output is closed, unless `still` open."""

    def make(*pieces: bytes, shown: bool = True, still: bool = False) -> RankOutput:
        read, write = os.pipe()
        made = RankOutput(read, tmp_path / "rank1.log", 2 if shown else None, backlog=Backlog())
        for piece in pieces:
            os.write(write, piece)
            assert made.drain()
        os.close(write)
        if not still:
            made.close()
        return made

    return make


def test_every_byte_goes_to_the_ranks_log_and_the_console(
    through: Callable[..., RankOutput],
    log: Path,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    pieces = [b"one\ntw", b"o\n\xff\xfe\n", b" 10 %\r 50 %", b"\r100 %\n", b"last"]
    through(*pieces)
    assert (tmp_path / "rank1.log").read_bytes() == capfdbinary.readouterr().err == b"".join(pieces)
    assert log.read_text() == "one\ntwo\n\ufffd\ufffd\n100 %\nlast\n"


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (b"plain\nwindows\r\n", "plain\nwindows\n"),
        (b" 10 %\r      \r\nnext\n", "next\n"),
        (b"\x1b[32mgreen\x1b[0m\n", "green\n"),
        (b"\n\n", "\n\n"),
        (b"\0\x1b[2J\n", "\0\x1b[2J\n"),
    ],
    ids=["line ends", "a bar that was wiped out", "colours", "empty lines", "binary data"],
)
def test_the_log_has_what_a_terminal_shows(
    through: Callable[..., RankOutput], log: Path, written: bytes, kept: str
) -> None:
    through(written)
    assert log.read_text() == kept


def test_bars_of_several_ranks_are_lines_with_their_state(
    log: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    read, write = os.pipe()
    shown = RankOutput(read, tmp_path / "rank1.log", 2, b"[rank1] ", backlog=Backlog())
    for piece in (b"one\r\n\r 0 %\r 40 %", b"\r 60 %"):
        os.write(write, piece)
        shown.drain()
        shown.show_unfinished()
    shown._heard_at -= output.PROMPT_S  # nothing more for a second: a prompt
    shown.show_unfinished()
    shown.show_unfinished()
    os.write(write, b"\r100 %\nnext")
    os.close(write)
    while shown.drain():
        pass
    shown.close()
    lines = [b"one", b" 40 %", b" 60 %", b"100 %", b"next"]
    assert capfdbinary.readouterr().err.splitlines() == [b"[rank1] " + line for line in lines]
    assert log.read_text().splitlines() == ["[rank1] one", "[rank1] 100 %", "[rank1] next"]


def test_a_line_in_two_pieces_is_shown_once(
    log: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    read, write = os.pipe()
    shown = RankOutput(read, tmp_path / "rank1.log", 2, b"[rank1] ", backlog=Backlog())
    for piece in (b"ready", b"\n"):  # as Python without buffering writes them
        os.write(write, piece)
        shown.drain()
        shown.show_unfinished()
    os.close(write)
    shown.close()
    assert capfdbinary.readouterr().err == b"[rank1] ready\n"
    assert log.read_text() == "[rank1] ready\n"


def test_many_lines_are_one_write(
    through: Callable[..., RankOutput], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    original = os.write
    monkeypatch.setattr(
        console.os, "write", lambda fd, data: (writes.append(fd), original(fd, data))[1]
    )
    through(b"a line of it\n" * 4000)
    assert log.stat().st_size == 52_000 and len(writes) == 3, "pipe, console, log"


def test_an_unterminated_line_takes_bounded_memory(through: Callable[..., RankOutput]) -> None:
    made = through(*[b"\r 50 %" * 10_000] * 4, still=True)
    assert len(made._line) <= output.OPEN_BYTES
    made.close()


def test_the_pipe_buffers_much_output(through: Callable[..., RankOutput]) -> None:
    made = through(still=True)
    assert fcntl.fcntl(made.fd, fcntl.F_GETPIPE_SZ) == output.PIPE_BYTES
    made.close()


class Much:
    """Two streams of a rank that print much, read through one backlog."""

    def __init__(self, folder: Path, stdout: int = 1) -> None:
        self.log, self.backlog = folder / "rank0.log", Backlog()
        self._writers: list[int] = []
        self.streams: list[RankOutput] = []
        for shown_on in (stdout, 2):
            read, write = os.pipe()
            self._writers.append(write)
            self.streams.append(RankOutput(read, self.log, shown_on, backlog=self.backlog))

    def prints(self, stream: int, text: bytes) -> None:
        os.write(self._writers[stream], text)
        assert self.streams[stream].drain()

    def end(self) -> None:
        for writer, stream in zip(self._writers, self.streams, strict=True):
            os.close(writer)
            assert not stream.drain()
            self.backlog.then(stream.close)


LINES = b"".join(b"line %05d\n" % number for number in range(40_000))


def test_much_output_is_in_the_log_at_once_and_shown_later(
    log: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    much = Much(tmp_path)
    much.prints(0, LINES + b"half a ")
    much.prints(1, b"a warning\n")
    much.prints(0, b"line\n" + TRACEBACK + b"last")
    much.end()
    everything = LINES + b"half a a warning\nline\n" + TRACEBACK + b"last"
    assert much.log.read_bytes() == everything
    assert capfdbinary.readouterr() == (b"", b"") and log.read_bytes() == b""
    much.backlog.catch_up()
    begun = capfdbinary.readouterr().out
    assert 0 < len(begun) <= backlog.SLICE_BYTES and begun.endswith(b"\n"), "whole lines, one slice"
    much.backlog.show_all()
    out, err = capfdbinary.readouterr()
    assert (begun + out, err) == (
        LINES + b"half a line\n" + TRACEBACK + b"last",
        b"a warning\n",
    )
    assert log.read_bytes() == (LINES + b"a warning\nhalf a line\n" + TRACEBACK + b"last\n"), (
        "in the order of arrival, in whole lines"
    )
    assert much.streams[0].thread().startswith("Exception in thread Thread-1 (work): ValueError")


def test_a_thread_of_a_rank_that_prints_much_before_its_end_is_reported(
    log: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    read, write = os.pipe()
    run, selector = RunDir(tmp_path), selectors.DefaultSelector()
    outputs = Outputs(run, selector, lambda: None, [0], 0, None)
    run.rank_log(0).parent.mkdir()
    with subprocess.Popen("true") as ended:
        outputs.add(Child(0, ended, {2: read}, -1))
    os.write(write, LINES + TRACEBACK)
    os.close(write)
    while outputs.patience_s(1.0) < 1.0 or selector.get_map():
        for key, _ in selector.select(outputs.patience_s(1.0)):
            key.data(key.fd)
        outputs.between()
    assert capfdbinary.readouterr().err == LINES + TRACEBACK
    assert outputs.in_threads[0].startswith("Exception in thread Thread-1 (work): ValueError")


def test_a_reader_of_a_pipe_holds_the_rank_back(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "MOST_BYTES", 600_000)
    for mode, left in ((os.O_RDWR, 600_000), (None, 1_200_000)):
        if mode is None:
            console = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
        else:
            os.mkfifo(tmp_path / "fifo")
            console = os.open(tmp_path / "fifo", mode)
            fcntl.fcntl(console, fcntl.F_SETPIPE_SZ, 1 << 20)
        much = Much(tmp_path, console)
        for _ in range(3):
            much.prints(0, LINES)
        waiting = much.backlog.waiting
        assert left - backlog.SLICE_BYTES <= waiting and (mode is None or waiting <= left)
        much.end()
        os.close(console)


def test_a_full_disk_loses_nothing_on_the_console(
    log: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    much = Much(tmp_path)
    much.prints(0, LINES)

    class FullDisk(io.FileIO):
        def write(self, data: Any, /) -> int:
            rest = len(LINES) + 1000 - os.fstat(self.fileno()).st_size
            if not rest:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[:rest])

    much.streams[0]._file = FullDisk(much.log, "a+b")
    much.prints(0, LINES)
    much.prints(0, b"after\n")
    assert much.log.stat().st_size == len(LINES) + 1000
    much.backlog.show_all()
    out, err = capfdbinary.readouterr()
    assert out == LINES + LINES + b"after\n" and err.count(b"No space left on device") == 1
    much.end()


def test_a_log_that_cannot_be_read_back_is_one_warning(
    log: Path,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    much = Much(tmp_path)
    much.prints(0, LINES)

    def stale(*_: object) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", stale)
        much.backlog.show_all()
    much.prints(0, b"after\n")
    much.end()
    out, err = capfdbinary.readouterr()
    assert out == b"after\n" and err.count(b"Stale file handle") == 1
    assert much.log.read_bytes() == LINES + b"after\n"


def test_the_end_of_one_stream_during_the_last_drain_loses_nothing_of_another(
    log: Path,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "MOST_BYTES", 0)
    run, selector = RunDir(tmp_path), selectors.DefaultSelector()
    outputs = Outputs(run, selector, lambda: None, [0], 0, None)
    run.rank_log(0).parent.mkdir()
    (first, one), (second, two) = os.pipe(), os.pipe()
    for rank, read in ((0, first), (1, second)):
        with subprocess.Popen("true") as ended:
            outputs.add(Child(rank, ended, {2: read}, -1))
    monkeypatch.setattr(backlog, "MOST_BYTES", 1 << 24)
    os.write(two, LINES)
    os.close(two)
    outputs._on_output(second)
    outputs._on_output(second)  # its end waits until its lines have been shown
    monkeypatch.setattr(backlog, "MOST_BYTES", 0)
    os.write(one, TRACEBACK)
    os.close(one)
    outputs.drain_rest()
    assert run.rank_log(0).read_bytes() == TRACEBACK == capfdbinary.readouterr().err
    assert run.rank_log(1).read_bytes() == LINES


def test_a_line_about_a_thread_is_not_its_exception(through: Callable[..., RankOutput]) -> None:
    made = through(
        b"INFO caught Exception in thread pool, retrying\nepoch 1 done\n", shown=False, still=True
    )
    assert made.thread() == made.thread(ended=True) == ""
    made.close()


@pytest.mark.parametrize("cut", [5, 40, 70, len(TRACEBACK) - 3])
def test_an_exception_in_a_thread_is_reported_once_and_whole(
    through: Callable[..., RankOutput], cut: int
) -> None:
    made = through(b"step 1\n", TRACEBACK[:cut], shown=False, still=True)
    assert made.thread() == ""
    made.close()
    made = through(
        b"step 1\n", TRACEBACK[:cut], TRACEBACK[cut:], TRACEBACK, shown=False, still=True
    )
    assert made.thread() == "Exception in thread Thread-1 (work): ValueError: planted; at a.py:3"
    assert made.thread() == made.thread(ended=True) == ""
    made.close()

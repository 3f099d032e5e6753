"""Output of one child: every byte to its own file, rank 0's also to the console and, as whole
lines, to the log. Read in large chunks, which are shown later: a rank that prints a lot must not
wait for the supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from training.core import console, log
from training.core.errors import unwritable
from training.core.messages import msg
from training.diagnose import traceback
from training.launcher.backlog import Backlog
from training.launcher.symptoms import Symptoms

PIPE_BYTES = 1 << 20  # the maximum for an unprivileged user (/proc/sys/fs/pipe-max-size)
READ_BYTES = 1 << 20
SMALL_BYTES = 1 << 15
OPEN_BYTES = 1 << 16  # of an unterminated line
IN_THREAD = b"Exception in thread "  # printed by Python; the process continues without the thread
THREAD_BYTES = 1 << 14  # of such a traceback
MOST_FRAMES = 100  # lines of it
# printed before the exception by lib/run_script.py and training.trainer.error_file
UNWRITTEN = b".error.json cannot be written: "
REPORT_BYTES = 1 << 12
_buffer = bytearray(READ_BYTES)  # of all outputs: a new one for each read costs more than the read
# An unfinished line of a labelled rank: a prompt, when nothing more comes; or a progress bar
PROMPT_S, BAR_S = 1.0, 10.0


class RankOutput:
    """Drains one descriptor. `console`: the launcher's descriptor that shows it (1 or 2); `label`:
    before each line there; `backlog`: what is shown later; `symptoms`: what is not shown. Raises
    UserError if the file cannot be opened."""

    def __init__(
        self,
        fd: int,
        path: Path,
        console: int | None,
        label: bytes = b"",
        *,
        backlog: Backlog,
        symptoms: Symptoms | None = None,
    ) -> None:
        self.fd, self.path, self._console, self._label = fd, path, console, label
        self._backlog, self.unlimited, self._symptoms = backlog, console is None, symptoms
        with contextlib.suppress(OSError):  # closed
            self.unlimited = console is None or stat.S_ISREG(os.fstat(console).st_mode)
        self.heard: Callable[[bytes], None] = lambda chunk: None
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise unwritable(path, error) from error
        # offset of this attempt: earlier ones have written before it
        self.begins = os.fstat(self._file.fileno()).st_size
        self._line = b""
        self._heard_at = self._shown_at = 0.0
        self._shown = b""  # the state of the unfinished line that is on the console
        self._seam = b""  # end of the last chunk, which may be the beginning of IN_THREAD
        self._thread_at: int | None = (
            None  # offset of an exception in a thread that has not been reported
        )
        self._thread_found = False  # one per rank
        self._report, self._end = b"", b""  # from UNWRITTEN on; end of the last chunk
        self._warned = False
        self._terminal = os.isatty(fd)  # a terminal holds 4 KiB: its reads must not be delayed
        self.trickles = False  # output comes in small pieces: after a short wait there is more
        with contextlib.suppress(OSError):  # a pseudo-terminal, or the user's limit of pipe memory
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def drain(self) -> bool:
        """Read what has arrived; False at the end of the stream."""
        try:
            size = os.readv(self.fd, [_buffer])
        except OSError:  # EIO: the other side of a pseudo-terminal is closed
            size = 0
        self.trickles = size < SMALL_BYTES and not self._terminal
        if size:
            self._keep(memoryview(_buffer)[:size])
        return bool(size)

    def _keep(self, chunk: memoryview) -> None:
        end, written = self._write(chunk)
        if not self._backlog.defers(len(chunk)):
            self.take(bytes(chunk), end - written)
            return
        if written:
            self._backlog.add(self, end - written, end)
        if written < len(chunk):  # the disk is full
            self._backlog.show_all()
            self.take(bytes(chunk[written:]), end)

    def _write(self, chunk: memoryview) -> tuple[int, int]:
        """The end of the log, and how many bytes of the chunk are in it."""
        written = 0
        try:
            while written < len(chunk):
                written += self._file.write(chunk[written:])
        except OSError as error:  # a full disk must not stop the training
            self._warn(msg("core.rundir.unwritable", file=self.path, strerror=error.strerror))
        return self._file.tell(), written

    def read_back(self, begin: int, count: int) -> bytes:
        try:
            return os.pread(self._file.fileno(), count, begin)
        except OSError as error:  # a file server was restarted: only the console lacks this part
            self._warn(msg("launcher.cannot_read", path=self.path, strerror=error.strerror))
            return b""

    def _warn(self, text: str) -> None:
        """Once: it may be so for hours."""
        if not self._warned:
            log.warning(text)
        self._warned = True

    def take(self, chunk: bytes, begin: int) -> None:
        """Search it, and show it: on the console, and as whole lines in the run's log. `begin`: its
        offset in the rank's log."""
        self.heard(chunk)
        self._look_for_report(chunk)
        if not self._thread_found and self._thread_at is None:
            self._look_for_thread(chunk, begin)
        if self._console is not None:
            self._take_shown(self._symptoms.without(chunk) if self._symptoms else chunk)

    def _take_shown(self, chunk: bytes) -> None:
        if not self._label:
            self._show(chunk)
        cut = chunk.rfind(b"\n") + 1
        if cut:  # whole lines at once: no cost per line
            whole = self._line + chunk[:cut]
            if self._label:
                whole = self._labelled(whole)
                self._show(whole)
            log.lines_to_log(whole)
            self._line, self._shown = chunk[cut:], b""
        else:
            self._line += chunk
        self._heard_at = time.monotonic()
        if len(self._line) > OPEN_BYTES:  # a progress bar, one unterminated line
            self._line = self._line.rpartition(b"\r")[2][-OPEN_BYTES:]
        if not self._label and (self._console == 2 or os.isatty(1)):
            log.left_open(self._line)

    def _labelled(self, lines: bytes) -> bytes:
        if b"\r" not in lines:
            return self._label + lines[:-1].replace(b"\n", b"\n" + self._label) + b"\n"
        return b"".join(self._label + _last_state(line) + b"\n" for line in lines[:-1].split(b"\n"))

    @property
    def on_console(self) -> bool:
        return self._console is not None

    def show_unfinished(self) -> None:
        """The unfinished line of a labelled rank, as a line: a prompt, or the state of a bar."""
        state, now = _last_state(self._line), time.monotonic()
        if not self._label or not state.strip() or state == self._shown:
            return
        bar = b"\r" in self._line
        if now - self._heard_at > PROMPT_S or (bar and now - self._shown_at > BAR_S):
            self._shown, self._shown_at = state, now
            self._show(self._label + state + b"\n")

    def _show(self, data: bytes) -> None:
        # the terminal or the reader of a pipe is gone; the files are still written
        with contextlib.suppress(OSError):
            console.of(self._console or 2).write(data)

    def _look_for_thread(self, chunk: bytes, begin: int) -> None:
        over = self._seam + chunk[: len(IN_THREAD)]
        if (at := over.find(IN_THREAD)) >= 0:
            self._thread_at = max(0, begin - len(self._seam) + at)
        elif (at := chunk.find(IN_THREAD)) >= 0:
            self._thread_at = begin + at
        self._seam = (self._seam + chunk[-len(IN_THREAD) :])[-len(IN_THREAD) :]

    def _look_for_report(self, chunk: bytes) -> None:
        if self._report:
            self._report += chunk[: max(0, REPORT_BYTES - len(self._report))]
            return
        size = len(UNWRITTEN)
        over = self._end + chunk[:size]
        if (at := over.find(UNWRITTEN)) >= 0:
            self._report = over[at:] + chunk[size : size + REPORT_BYTES]
        elif (at := chunk.find(UNWRITTEN)) >= 0:
            self._report = chunk[at : at + REPORT_BYTES]
        self._end = (self._end + chunk[-size:])[-size:]

    def unwritten(self) -> str:
        """`TYPE: MESSAGE at FILE:LINE` of an exception that the rank could not write to its file;
        '' without one."""
        line = self._report.partition(b"\n")[0].decode("utf-8", "replace")
        return line.partition("; ")[2].strip()

    def thread(self, ended: bool = False) -> str:
        """The first exception in a thread of the rank, once; '' while there is none or it is
        incomplete."""
        if self._thread_at is None:
            return ""
        found = in_thread(self.path, self._thread_at, ended)
        if found is None:
            self._thread_at = None
        elif found:
            self._thread_at, self._thread_found = None, True
        return found or ""

    def close(self) -> None:
        if self._symptoms and (left := self._symptoms.end()):
            self._take_shown(left)
        if self._line and self._console:
            if self._label:
                self._line = self._label + _last_state(self._line)
                self._show(self._line + b"\n")
            log.lines_to_log(self._line + b"\n")
        self._file.close()
        os.close(self.fd)


def _last_state(line: bytes) -> bytes:
    """What a terminal shows at the end of a line that was overwritten."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def in_thread(path: Path, at: int, ended: bool) -> str | None:
    """`Exception in thread NAME: TYPE: MESSAGE; at FILE:LINE`, found in a log after the byte `at`;
    '' while it is incomplete, None if the text is not that of Python's threading module."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            lines = file.read(THREAD_BYTES).decode("utf-8", "replace").splitlines(keepends=True)
    except OSError:
        return ""
    mark = IN_THREAD.decode()
    first = next((i for i, line in enumerate(lines) if mark in line), len(lines))
    head = "".join(lines[first : first + 1]).strip().rstrip(":")
    head = head[head.find(mark) :]
    after = "".join(lines[first + 1 : first + 2])
    if "\n" in after and not (
        lines[first].rstrip().endswith(":") and after.startswith("Traceback")
    ):
        return None
    for number, line in enumerate(lines[first + 1 :], first + 1):
        whole = line.endswith("\n") or ended
        if whole and line.strip() and not line.startswith((" ", "\t", "Traceback")):
            where = traceback.innermost(traceback.frames_of("".join(lines[first:number])))
            place = msg("launcher.failure.at", where=where) if where else ""
            return f"{head}: {line.strip()}{place}"
    return head if head and (ended or len(lines) > first + MOST_FRAMES) else ""

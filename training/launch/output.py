"""The output of one child: every byte into its own file, rank 0's to the console and, as whole lines, to the log. In whole chunks: a
program that prints much must not wait for us."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from pathlib import Path

from training import console

PIPE_BYTES = 1 << 20  # the most that the kernel allows any user (/proc/sys/fs/pipe-max-size)
READ_BYTES = 1 << 20
SMALL_BYTES = 1 << 15
OPEN_BYTES = 1 << 16  # of a line without an end
TAIL_BYTES = 1 << 16


class Output:
    """Drains one descriptor. `shown`: this child speaks on the console."""

    def __init__(self, fd: int, path: Path, shown: bool) -> None:
        self.fd, self.shown = fd, shown
        self._file = path.open("ab", buffering=0)
        self.begins = os.fstat(self._file.fileno()).st_size  # before it are the words of earlier starts
        self._line = b""
        self._warned = False
        self._terminal = os.isatty(fd)  # it holds 4 KiB: that must not wait
        self.trickles = False  # it comes in small pieces: a moment later there are more of them
        with contextlib.suppress(OSError):  # a pseudo-terminal, or this user has many pipes already
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def drain(self) -> bool:
        """Read what is there; False at the end of the stream."""
        try:
            chunk = os.read(self.fd, READ_BYTES)
        except OSError:  # a pseudo-terminal whose other side is closed says EIO
            chunk = b""
        self.trickles = len(chunk) < SMALL_BYTES and not self._terminal
        if chunk:
            self._keep(chunk)
        return bool(chunk)

    def _keep(self, chunk: bytes) -> None:
        try:
            self._file.write(chunk)
        except OSError as error:  # a full disk must not stop the training; said once
            if not self._warned:
                console.warning(f"{self._file.name} can not be written: {error.strerror}")
            self._warned = True
        if not self.shown:
            return
        try:
            sys.stderr.buffer.write(chunk)
            sys.stderr.buffer.flush()
        except OSError:  # the terminal is gone; the files go on
            pass
        cut = chunk.rfind(b"\n") + 1
        if cut:  # whole lines in one piece: nothing here costs per line
            console.lines_to_log(self._line + chunk[:cut])
            self._line = chunk[cut:]
        else:
            self._line += chunk
        if len(self._line) > OPEN_BYTES:  # a progress bar on one endless line
            self._line = self._line.rpartition(b"\r")[2][-OPEN_BYTES:]
        console.left_open(self._line)

    def close(self) -> None:
        if self._line and self.shown:
            console.lines_to_log(self._line + b"\n")
        self._file.close()
        os.close(self.fd)


def tail(path: Path, lines: int, since: int = 0) -> list[str]:
    """The last lines of a file, progress bars as a terminal would leave them; nothing from before the byte `since`."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.splitlines() if line.strip()][-lines:]

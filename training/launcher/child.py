"""One process that this launcher has started: a rank, or a launcher of ranks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import termios
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from training.core import log
from training.core.messages import msg
from training.host import process
from training.watchdog.probes import procfs


@dataclass
class Child:
    """One started process. `rank` is None for a `launcher`, which starts the ranks itself."""

    rank: int | None
    popen: subprocess.Popen[bytes]
    # 1: standard output, 2: standard error → descriptor that reads it; one of them: both are joined
    outputs: dict[int, int]
    pidfd: int  # readable when it has exited
    launcher: str = "torchrun"
    foreign: bool = False  # of another user (sudo): this process may not signal it

    @property
    def name(self) -> str:
        return self.launcher if self.rank is None else f"rank {self.rank}"

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process and its whole session; does nothing when all have exited. Resource
        trackers, which clean up after them, are not killed."""
        if number == signal.SIGKILL:
            if self.popen.returncode is None:
                self.signal(number)
            process.end_group(self.popen.pid)
            return
        with self._noting_refusal(), contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def signal(self, number: signal.Signals, processes: Collection[int] = ()) -> None:
        """Signal the process alone, which handles its children itself, or these of its family: it
        first, since a shell script that sees the end of its child without SIGINT continues."""
        for pid in sorted(processes or [self.popen.pid], key=lambda one: one != self.popen.pid):
            with self._noting_refusal(), contextlib.suppress(ProcessLookupError):
                if pid == self.popen.pid:
                    self.popen.send_signal(number)
                else:
                    os.kill(pid, number)

    def follow_terminal(self) -> None:
        """Its pseudo-terminal gets the size that the user's now has. By default the signal does
        nothing."""
        for number, fd in self.outputs.items():
            with contextlib.suppress(OSError):  # a pipe, or closed
                copy_size(number, fd)
                self.signal_group(signal.SIGWINCH)

    @contextlib.contextmanager
    def _noting_refusal(self) -> Iterator[None]:
        try:
            yield
        except PermissionError:
            if not self.foreign:
                self.foreign = True
                log.warning(self.unkillable)

    @property
    def unkillable(self) -> str:
        """Why it cannot be killed."""
        name, pid = self.name, self.popen.pid
        if self.foreign:
            return msg("launcher.limits.other_user", name=name, pid=pid)
        place = (read := procfs.read_process(pid)) and read.waits_in
        return (
            msg("launcher.limits.unkillable_in", name=name, pid=pid, place=place)
            if place
            else msg("launcher.limits.unkillable", name=name, pid=pid)
        )


def copy_size(terminal: int, to: int) -> None:
    """Raises OSError if one of them is not a terminal."""
    size = fcntl.ioctl(terminal, termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(to, termios.TIOCSWINSZ, size)

"""Life and death of processes: a child dies with its parent, whatever kills that."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int | None = None) -> None:
    """The kernel kills this process when its parent dies (Linux, prctl(2)). `parent`: its pid, checked against a race."""
    if _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def die_of_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

"""Life and death of processes: a child dies with its parent, whatever kills that, and nothing of a run outlives it.

Standard library only: lib/guardian.py uses it without the environment.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1).value
# In the environment of every process of a launch and of all that they start, whatever sessions and parents those give themselves.
TOKEN = "DUET_TOKEN"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int | None = None) -> None:
    """The kernel kills this process when its parent dies (Linux, prctl(2)). `parent`: its pid, checked against a race."""
    if _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def allow_tracing() -> None:
    """Let processes of the same user take this one's stacks, and those of its forked children (data-loader workers). Where Yama
    restricts tracing (Ubuntu's default), only ancestors may otherwise, and py-spy is a sibling. It survives exec."""

    def allow() -> None:
        # Kernels without Yama refuse the call, and need none. Wherever stacks can not be had, that is said when they are wanted.
        _libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(PR_SET_PTRACER_ANY), 0, 0, 0)

    allow()
    os.register_at_fork(after_in_child=allow)


def die_of_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def marked(token: str) -> dict[int, str]:
    """Living processes that were started, however indirectly, with this token: pid → command line. This process is left out."""
    mark, found = f"{TOKEN}={token}".encode(), {}
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                ours = mark in file.read().split(b"\0")
            if not ours:
                continue
            with open(f"/proc/{name}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] == b"Z":  # dead, its parent has not looked yet
                    continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                found[int(name)] = file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:  # of another user, or gone meanwhile
            continue
    return found


def sweep(token: str) -> dict[int, str]:
    """Kill everything with this token; what was there. Looks again until nothing is: a process may start another one meanwhile."""
    swept: dict[int, str] = {}
    while left := {pid: command for pid, command in marked(token).items() if pid not in swept}:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        swept |= left
    return swept

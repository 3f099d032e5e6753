"""Life and death of processes: a child dies with its parent, whatever kills that, and nothing of a
run outlives it.

Standard library only: lib/guardian.py uses it without the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1).value
# In the environment of every process of a launch and of all that they start, whatever sessions and
# parents those give themselves.
TOKEN = "DUET_TOKEN"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# They exit by themselves when the processes that they serve have exited: the first three unlink the
# shared memory that those left in /dev/shm, the service of W&B writes the rest of its run.
KEEPERS = (
    "multiprocessing.resource_tracker",
    "loky.backend.resource_tracker",
    "torch_shm_manager",
    "/wandb/bin/",
)
# that they outlive a rank for a moment needs no message
HELPERS = (
    *KEEPERS,
    "multiprocessing.forkserver",
)
TIDYING_S = 2.0
LOOK_S = 0.02
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int | None = None) -> None:
    """The kernel kills this process when its parent dies (Linux, prctl(2)). `parent`: its pid,
    checked against a race."""
    if _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def allow_tracing() -> None:
    """Let processes of the same user take this one's stacks, and those of its forked children
    (data-loader workers). Where Yama restricts tracing (Ubuntu's default), only ancestors may
    otherwise, and py-spy is a sibling. It survives exec."""

    def allow() -> None:
        # Kernels without Yama refuse the call, and need none. Wherever stacks can not be had, that
        # is said when they are wanted.
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
    """Living processes that were started, however indirectly, with this token: pid → command line.
    This process is left out."""
    mark = f"{TOKEN}={token}".encode()
    return _living(lambda pid: mark in _read(pid, "environ").split(b"\0"))


def group(number: int) -> dict[int, str]:
    """Living processes of a process group: pid → command line."""
    return _living(lambda pid: int(_stat(pid)[2]) == number)


def end_group(number: int) -> None:
    """Kill a process group, except what tidies up after it."""
    _kill(
        lambda: {
            pid: command for pid, command in group(number).items() if not _named(command, KEEPERS)
        }
    )


def sweep(token: str) -> dict[int, str]:
    """End everything with this token; what had to be killed and is no helper of Python's or
    torch's. What tidies up gets TIDYING_S."""
    killed = _kill(
        lambda: {
            pid: command for pid, command in marked(token).items() if not _named(command, KEEPERS)
        }
    )
    end = time.monotonic() + TIDYING_S
    while marked(token).keys() - killed.keys() and time.monotonic() < end:
        time.sleep(LOOK_S)
    killed |= _kill(
        lambda: {pid: command for pid, command in marked(token).items() if pid not in killed}
    )
    return {pid: command for pid, command in killed.items() if not _named(command, HELPERS)}


def _kill(find: Callable[[], dict[int, str]]) -> dict[int, str]:
    """Kill what is found, and look again until nothing new is: a process may start another one
    meanwhile."""
    killed: dict[int, str] = {}
    while left := {pid: command for pid, command in find().items() if pid not in killed}:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= left
    return killed


def _named(command: str, names: tuple[str, ...]) -> bool:
    return any(name in command for name in names)


def _living(wanted: Callable[[int], bool]) -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        pid = int(name)
        try:
            if wanted(pid) and _stat(pid)[0] != b"Z":  # Z: dead, its parent has not looked yet
                found[pid] = (
                    _read(pid, "cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
                )
        except OSError:  # of another user, or gone meanwhile
            continue
    return found


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def _stat(pid: int) -> list[bytes]:
    """State, parent, process group, session, …"""
    return _read(pid, "stat").rpartition(b")")[2].split()

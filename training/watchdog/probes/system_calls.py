"""The system call in which a thread waits, and what ends the wait. Linux reports it to processes
that may trace it (proc(5)); without permission, and on other machines than these, it is unknown."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from training.watchdog.probes import procfs

# What ends the wait of a thread; "": unknown, or another thread or rank.
TIMEOUT: Final = "timeout"
CHILD: Final = "child"
PEER: Final = "peer"  # a process at the other end of a pipe or socket

_NAMES = {
    "x86_64": {
        **{0: "read", 19: "read", 45: "read", 47: "read"},  # readv, recvfrom, recvmsg
        **{1: "write", 20: "write", 44: "write", 46: "write", 42: "write"},  # …, connect
        **{43: "accept", 288: "accept"},
        **{23: "select", 270: "select", 7: "poll", 271: "ppoll"},
        **{232: "epoll", 281: "epoll", 441: "epoll_pwait2"},
        **{202: "futex", 35: "sleep", 230: "sleep", 219: "restart"},
        **{61: "wait", 247: "wait"},
    },
    "aarch64": {
        **{63: "read", 65: "read", 207: "read", 212: "read"},
        **{64: "write", 66: "write", 206: "write", 211: "write", 203: "write"},
        **{202: "accept", 242: "accept"},
        **{72: "select", 73: "ppoll", 22: "epoll", 441: "epoll_pwait2"},
        **{98: "futex", 101: "sleep", 115: "sleep", 128: "restart"},
        **{260: "wait", 95: "wait"},
    },
}
# Position of the timeout among the arguments: a pointer, or milliseconds (negative: none).
_POINTERS = {"select": 4, "ppoll": 2, "futex": 3, "epoll_pwait2": 3}
_MILLISECONDS = {"poll": 2, "epoll": 3}
_NEGATIVE = 1 << 31  # of 32 bits
_INPUT = 0


def reads_input(pid: int) -> bool:
    """Whether its main thread waits for standard input: in input() and breakpoint(), where readline
    waits in select(), or in an event loop. Other threads that do are not waited for."""
    name, arguments = _call(pid, str(pid))
    first = arguments[0] if arguments else -1  # a descriptor, or the number of them
    if (name == "read" and first == _INPUT) or (name == "select" and first == 1):
        return True
    return _polls_input(pid, str(pid))


def prompts(pid: int) -> bool:
    """Whether one of its threads waits for standard input in an event loop, as in the prompt of
    ipdb, for which the main thread waits."""
    return any(_polls_input(pid, thread) for thread in procfs.threads_of(pid))


def _polls_input(pid: int, thread: str) -> bool:
    name, arguments = _call(pid, thread)
    return name.startswith("epoll") and bool(
        re.search(r"^tfd:\s+0 ", procfs.read_text(f"/proc/{pid}/fdinfo/{arguments[0]}"), re.M)
    )


def ends_by(pid: int, to_ranks: Collection[int] = (), thread: int = 0) -> str:
    """What ends the wait of this thread (0: the main one). `to_ranks`: inodes of connections to
    other ranks."""
    name, arguments = _call(pid, str(thread or pid))
    if name == "wait":
        return CHILD
    if name == "accept":
        return PEER
    if name in ("sleep", "restart"):  # restart: a wait with a timeout after a signal
        return TIMEOUT
    if name in _POINTERS:
        return TIMEOUT if arguments[_POINTERS[name]] else ""
    if name in _MILLISECONDS:
        return "" if arguments[_MILLISECONDS[name]] & _NEGATIVE else TIMEOUT
    if name in ("read", "write"):
        try:
            target = str(Path(f"/proc/{pid}/fd/{arguments[0]}").readlink())
        except OSError:
            return ""
        inode = int(target[8:-1]) if target.startswith("socket:[") else None
        read_pipe = name == "read" and target.startswith("pipe:[")
        return PEER if read_pipe or (inode is not None and inode not in to_ranks) else ""
    return ""


def polls(pid: int, thread: int = 0) -> bool:
    """Does this thread (0: the main one) wait for one of several descriptors, or for a socket with
    a timeout? Event loops, also those that sleep, use other calls."""
    name, arguments = _call(pid, str(thread or pid))
    # before Python 3.11 time.sleep is a select() without descriptors
    return name in ("poll", "ppoll") or (name == "select" and arguments[0] > 0)


def _call(pid: int, thread: str) -> tuple[str, list[int]]:
    """Its kind and its six arguments; ("", []) while the thread runs, and where it is unknown."""
    words = procfs.read_text(f"/proc/{pid}/task/{thread}/syscall").split()
    if len(words) < 7 or not words[0].isdecimal():
        return "", []
    name = _NAMES.get(os.uname().machine, {}).get(int(words[0]), "")
    return name, [int(word, 16) for word in words[1:7]]

"""Errors (Xid) that NVIDIA's driver reports through NVML, for where the kernel's log may not be
read, as in most containers. No rights are needed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.core.project import ROOT
from training.host import process

FOLLOW = """
import sys
sys.path.insert(0, sys.argv[1])
from training.host import xid_events
xid_events.follow(int(sys.argv[2]), sys.argv[3:])
"""
WAIT_MS = 60_000
PAUSE_S = 1.0  # after an error, which the driver may repeat at once
MOST_BYTES = 1 << 14  # of reported errors, the first ones
KILLED_S = 1.0


@dataclass(frozen=True)
class XidEvent:
    uuid: str  # of the GPU
    number: int
    time: float  # unix s


class XidEvents:
    """A process of its own waits for them: a driver with a dead GPU may block it for ever."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._text = b""
        self._follower: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-c", FOLLOW, str(ROOT), str(os.getpid()), *uuids],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the supervisor
        )

    def read(self) -> list[XidEvent]:
        """Those so far, without waiting."""
        if self._follower and self._follower.stdout:
            pipe = self._follower.stdout.fileno()
            os.set_blocking(pipe, False)
            try:
                while piece := os.read(pipe, MOST_BYTES):
                    self._text += piece
            except BlockingIOError:
                pass
        return [_event(line) for line in self._text.decode().splitlines()]

    def close(self) -> None:
        follower, self._follower = self._follower, None
        if follower is None or follower.stdout is None:
            return
        follower.stdout.close()
        follower.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # blocked in the driver: abandoned
            follower.wait(KILLED_S)


def _event(line: str) -> XidEvent:
    uuid, number, at = line.split()
    return XidEvent(uuid, int(number), float(at))


def follow(parent: int, uuids: Sequence[str]) -> None:
    """Print an XidEvent per line. `parent`: ends this process with its own end."""
    process.die_with_parent(parent)
    import pynvml

    pynvml.nvmlInit()
    events, names = pynvml.nvmlEventSetCreate(), dict[int | None, str]()
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            if uuid in uuids:
                kind = pynvml.nvmlEventTypeXidCriticalError
                pynvml.nvmlDeviceRegisterEvents(handle, kind, events)
                names[_address(handle)] = uuid
        except pynvml.NVMLError:  # lost already, or without events
            continue
    written = 0
    while names and written < MOST_BYTES:
        try:
            event = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
        except pynvml.NVMLError:  # a timeout, or a GPU that is lost: its Xid may follow
            time.sleep(PAUSE_S)
            continue
        # The driver no longer has the UUID of a lost GPU.
        line = f"{names.get(_address(event.device), '-')} {event.eventData} {time.time()}\n"
        written += os.write(1, line.encode())


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value

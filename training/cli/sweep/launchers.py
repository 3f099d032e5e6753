"""The running launchers of a sweep."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass

from training.core.rundir import RunDir
from training.plan import run_name

POLL_S = 0.1
STOP_S = 60.0  # after an error of the sweep itself


@dataclass
class Started:
    """A running launcher. `slot`: index of its GPUs; `at`: bytes of its console that are of earlier
    starts; `time`: of this start, as time.time()."""

    index: int
    slot: int
    popen: subprocess.Popen[bytes]
    at: int
    time: float


def remove_remains(run: RunDir) -> None:
    """A run without a folder is begun, not resumed. Raises OSError."""
    if run_name.is_remains(run):
        shutil.rmtree(run.path)


def signal_all(running: list[Started], sent: int) -> None:
    for one in running:
        if one.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.popen.pid, sent)


def end(running: list[Started]) -> None:
    """End what an error of this process has left."""
    for sent, seconds in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        signal_all(running, sent)
        until = time.monotonic() + seconds
        while any(one.popen.poll() is None for one in running) and time.monotonic() < until:
            time.sleep(POLL_S)

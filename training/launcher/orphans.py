"""Ended orphans, which the first process of a container has to reap."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess

from training.watchdog.probes import procfs


def reap() -> None:
    """The kernel gives orphans to process 1, and keeps them until it has waited for them."""
    if os.getpid() != 1:
        return
    ended = [pid for pid in procfs.tree().get(1, []) if procfs.exit_status(pid) is not None]
    if not ended:
        return
    # the guardian, copies of checkpoints, tests of GPUs: who has started them needs their status
    started = (one for one in gc.get_objects() if issubclass(type(one), subprocess.Popen))
    own = {getattr(one, "pid", None) for one in started}  # none where the program was not found
    for pid in {*ended} - own:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)

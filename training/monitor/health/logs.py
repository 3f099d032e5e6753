"""The log of a training that tells nothing of itself: its steps and its loss."""

from __future__ import annotations

import stat
from pathlib import Path

from training.core.errors import UserError
from training.core.jsonl import text
from training.monitor.health.target import Target
from training.monitor.host_stats import Shared
from training.monitor.log_watch import LogWatch


def watch(target: Target, shared: Shared) -> LogWatch | None:
    """Of the file that our launcher writes, else of the one to which a rank's output goes; None
    where that is none."""
    for path in [
        text(target.plan.get("log_file")),
        *(f"/proc/{pid}/fd/{fd}" for pid in target.pids.values() for fd in (1, 2)),
    ]:
        try:
            if path and stat.S_ISREG(Path(path).stat().st_mode):
                return LogWatch(Path(path).resolve(), shared)
        except (OSError, UserError):  # gone, another user's, or not to be read: then there is none
            continue
    return None

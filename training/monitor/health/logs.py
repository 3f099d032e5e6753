"""Log of a training without heartbeats: the source of its steps and loss."""

from __future__ import annotations

import stat
from pathlib import Path

from training.core.errors import UserError
from training.core.jsonl import text
from training.monitor.health.target import Target
from training.monitor.host_stats import Shared
from training.monitor.log_watch import LogWatch


def watch(target: Target, shared: Shared) -> LogWatch | None:
    """Reader of the log that Duet's launcher writes, else of the file that a rank prints to; None
    if there is no such file."""
    for path in [
        text(target.plan.get("log_file")),
        *(f"/proc/{pid}/fd/{fd}" for pid in target.pids.values() for fd in (1, 2)),
    ]:
        try:
            if path and stat.S_ISREG(Path(path).stat().st_mode):
                return LogWatch(Path(path).resolve(), shared)
        except (OSError, UserError):  # gone, another user's, or unreadable
            continue
    return None

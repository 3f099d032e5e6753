"""Writes the report of a run or a sweep in a process of its own: by the time of its end, the code
may be that of another version."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from training.core import log
from training.core.messages import msg
from training.core.project import ROOT, typed
from training.launcher import hook_runner, spawn
from training.launcher.stop_signals import StopSignals

NICE = 5


def write(page: Path, limit_s: float, signals: StopSignals) -> bool:
    """Write `page`, in the folder of the run or sweep. Whether it was written; a failure is a
    warning."""
    folder, before = page.parent, _version(page)
    command = [sys.executable, str(ROOT / "lib/run_module.py"), "training.cli.report", str(folder)]
    error, output = hook_runner.run(
        [*command, "--quiet"],
        spawn.clean_environment(ours=True),
        b"",
        limit_s,
        signals,
        nice=NICE,
    )
    written = not error or _version(page) not in (None, before)  # at the last moment
    if not written:
        reason = hook_runner.with_reason(error, output)
        again = typed(f"./duet report {shlex.quote(str(folder))}")
        log.warning(msg("launcher.report.failed", reason=reason, again=again))
    return written


def _version(page: Path) -> tuple[int, int] | None:
    """Of this file, which each report replaces; None: missing."""
    try:
        found = page.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns

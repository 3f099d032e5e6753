"""The files of a run to resume, which may be another user's in a shared folder."""

from __future__ import annotations

import os
import shlex

from training.core import rundir
from training.core.messages import msg
from training.plan.preflight.report import ERROR, Check


def closed(run: rundir.RunDir, copied: str) -> Check | None:
    """What is written further, but may not be by this user; other files are replaced. `copied`: the
    command that resumes a copy of the run."""
    files = [
        path for path in (run.metrics, run.events) if path.exists() and not os.access(path, os.W_OK)
    ]
    if not files:
        return None
    text = msg("plan.run.closed", files=", ".join(map(str, files)))
    opened = msg("plan.run.opened", files=shlex.join(map(str, files)))
    return Check("run folder", ERROR, text, [opened, copied])

"""The end of the SLURM job of a run, which leaves no record where SLURM kills the job at its time
limit or for its memory, or a node fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

from training.core import rundir
from training.core.jsonl import Record, dig, text
from training.core.messages import msg

QUIET_S = 60.0  # a job of a run that writes is not asked for
ASK_EVERY_S = 60.0
LIMIT_S = 3.0  # for an answer: the screen and the exporter wait for it

_answers: dict[Path, tuple[float, str]] = {}  # by run: when it was asked for, sentence


def end_of(run: rundir.RunDir, plan: Record | None) -> str:
    """Which job has ended, and how; "" if it may be running."""
    name = text(dig(plan, "submission"))
    if name is None:
        return ""
    asked_at, answer = _answers.get(run.path, (0.0, ""))
    if not asked_at or time.monotonic() - asked_at > ASK_EVERY_S:
        answer = _ask(run, rundir.read_json(run.path / f"{name}.json") or {})
        _answers[run.path] = time.monotonic(), answer
    return answer


def _ask(run: rundir.RunDir, record: Record) -> str:
    job, cluster = text(record.get("job")), text(record.get("cluster"))
    if job is None:
        return ""
    from training.launcher.slurm import job as slurm_job

    state = slurm_job.state_elsewhere(job, cluster or "", LIMIT_S)
    if state == slurm_job.FORGOTTEN:
        # Without the name it may be one of another cluster.
        sure = cluster and _is_shown(run)
        return msg("monitor.reason.job_forgotten", job=job) if sure else ""
    return msg("monitor.reason.job_over", job=job, state=state) if slurm_job.is_over(state) else ""


def _is_shown(run: rundir.RunDir) -> bool:
    """Does SLURM show the job to this user, also with PrivateData=jobs?"""
    try:
        return os.getuid() in (0, run.path.stat().st_uid)
    except OSError:
        return False

"""Whether a SLURM job will continue a run that has ended: the job waits, or has just begun."""

from __future__ import annotations

import time
from pathlib import Path

from training.core import rundir, standing
from training.core.jsonl import Record, mtime, number, text
from training.core.messages import msg
from training.core.read_backwards import backwards
from training.core.rundir import RunDir
from training.monitor.run_status import DIED, STOPPED
from training.monitor.runs.facts import RunFacts

QUEUED = ("submitted", "requeue")


def reason(run: RunFacts) -> str:
    """Why the run is left alone; "" if no job continues it."""
    created = number((rundir.read_json(run.run.plan) or {}).get("created")) or 0.0
    events = (event for event in backwards(run.run.events) if event.get("event") in QUEUED)
    newest = next(events, {})
    at, job = number(newest.get("time")) or 0.0, text(newest.get("job"))
    record = _last_record(run.run)
    if not (waits := job is not None and at > created):
        # after a preemption or the loss of a node, SLURM itself requeues: without an event
        job, newest = text(record.get("job")) if run.state in (STOPPED, DIED) else None, record
    if job is None:
        return ""

    from training.launcher.slurm import job as slurm_job

    cluster = text({**record, **newest}.get("cluster")) or ""
    state = slurm_job.state_elsewhere(job, cluster)
    if state not in (slurm_job.UNKNOWN, slurm_job.FORGOTTEN):
        return "" if slurm_job.is_over(state) else msg("cli.clean.queued", job=job, state=state)
    # this machine has no SLURM, for example
    return (
        msg("cli.clean.queued_unknown", job=job)
        if waits and time.time() - at < standing.ELSEWHERE_S
        else ""
    )


def _last_record(run: RunDir) -> Record:
    """The record of the newest submission; with job and cluster if it has started."""
    records: list[Path] = sorted(run.path.glob("code*.json"), key=lambda path: mtime(path) or 0.0)
    return (rundir.read_json(records[-1]) or {}) if records else {}

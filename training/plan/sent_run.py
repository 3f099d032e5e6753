"""The run that node 0 resumes, as another machine gets it for its own plan: that machine may have
no such run, or an older state of it on its own disk. The plan and the newest manifest suffice; the
tensors follow when the ranks load them (training.trainer.checkpoint_transfer)."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import manifest, rundir
from training.core.jsonl import Record
from training.core.rundir import RunDir

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

UNUSED = ("variables", "text", "headline", "notes", "gpus")  # keys of a plan; a resume has its own


def of(plan: Plan) -> Record:
    """The message of node 0; without keys if it does not resume a run."""
    if not plan["resume"]:
        return {}
    run = RunDir(plan["run_dir"])
    if (before := rundir.read_json(run.plan_before)) is None:
        # on another machine with its own disk, which may have to answer in place of node 0
        run = RunDir(RunDir(run.path, plan["place"]["node_rank"]).received)
        before = rundir.read_json(run.plan)
    if before is None:
        return {}
    kept = {name: value for name, value in before.items() if name not in UNUSED}
    return {"run": run.name, "plan": kept, "manifest": manifest.newest(run.checkpoints)}


def keep(sent: Record, experiments: Path, node: int) -> RunDir | None:
    """Write what node 0 has sent into this machine's part of the run; None if it is unusable: it
    comes from a network. Raises OSError and leaves nothing."""
    name, plan, facts = sent.get("run"), sent.get("plan"), sent.get("manifest")
    if not rundir.is_name(name) or not isinstance(plan, dict):
        return None
    run = RunDir(RunDir(experiments / name, node).received)
    shutil.rmtree(run.path, ignore_errors=True)
    try:
        run.checkpoints.mkdir(parents=True)
        rundir.write_json(run.plan, plan)
        if isinstance(facts, dict) and isinstance(facts.get("step"), int):
            folder = run.checkpoints / manifest.folder_name(facts["step"])
            folder.mkdir()
            manifest.rewrite(folder, facts)
    except OSError:
        remove(run)
        raise
    return run


def remove(run: RunDir) -> None:
    """Undo keep()."""
    shutil.rmtree(run.path, ignore_errors=True)
    for folder in (run.path.parent, run.path.parent.parent):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()

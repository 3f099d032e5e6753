"""What the stack of a rank that hangs reveals, for the sentences of advice."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from training.core.phases import BUILDING
from training.core.project import PACKAGE

if TYPE_CHECKING:
    from training.core.contracts.verdict import EndRecord, FailureRecord

LEAVES = "destroy_process_group"  # waits for all ranks with NCCL
NO_WORKERS = "no_workers_command"
RESUME_COMMAND = "resume_command"
CHECKPOINTED = "checkpointed"  # an empty value: the run has a checkpoint
SLOW_START = "slow_start"  # an empty value: code of the task that may only take long
_LOADER = re.compile(r"/torch/utils/data/dataloader\.py:\d+ .*\b(?:_try)?_get_data\b")
_WANDB = re.compile(r"/wandb/")


def some_left(end: EndRecord) -> bool:
    """Do ranks wait in destroy_process_group, for others that still train?"""
    waiting = cast("FailureRecord", end).get("waiting") or {}  # a summary has none
    frames = [line for line in end.get("evidence", []) if line.endswith(f"({LEAVES})")]
    return bool(frames) or any(f" {LEAVES}" in place for place in waiting.values())


def values(end: EndRecord, run_values: Mapping[str, str]) -> dict[str, str]:
    """`run_values`: of the run, to which these are added; without workers to blame, the command
    that trains without them is left out, and so is the one that resumes, without a checkpoint."""
    known = {name: value for name, value in run_values.items() if name != NO_WORKERS}
    if CHECKPOINTED not in known:
        known.pop(RESUME_COMMAND, None)
    # an older record may lack a field
    rank, where, stacks = end.get("rank"), end.get("where"), end.get("stacks")
    evidence = end.get("evidence", [])
    if rank is not None and where and stacks:
        known |= {"hung_at": where, "hung_file": shlex.quote(str(Path(stacks) / f"rank{rank}.txt"))}
    if _starts_in_task(cast("FailureRecord", end)):
        known[SLOW_START] = ""
    if any(map(_LOADER.search, evidence)):
        if NO_WORKERS in run_values:
            known[NO_WORKERS] = run_values[NO_WORKERS]
        else:
            known["loader"] = "DataLoader"
    if any(map(_WANDB.search, evidence)):
        known["wandb_mode"] = "WANDB_MODE"
    return known


def _starts_in_task(end: FailureRecord) -> bool:
    """Does the rank, or without a guilty one any rank, start with code of a user's task?"""
    rank, where, doing = end.get("rank"), end.get("where"), end.get("phases") or {}
    places = {str(rank): where or ""} if rank is not None else end.get("waiting") or {}
    return any(
        doing.get(one) == BUILDING and place and PACKAGE not in place
        for one, place in places.items()
    )

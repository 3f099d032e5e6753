"""Comparison of data and task file on several machines: each has its own copy, and an older file on
one of them would silently train another model."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from training.config.batch import Batch
from training.core import log
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.data import duration
from training.inspector.distributed import World, exchange_texts, from_main
from training.tasks.base import Task
from training.trainer.checkpoint import TrainProgress

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord


def same_order(
    position: TrainProgress,
    saved: ManifestRecord,
    now: ManifestRecord,
    task: Task,
    batch: Batch,
    world: World,
    *,
    reported: bool = False,
) -> TrainProgress:
    """The position in the current data. In other data the epoch begins again. Another number of
    samples, also of a task that does not compare its data, or another seed has another order: so it
    does there. `reported`: other data was, when it was prepared."""
    if not position.used:
        return position
    before, same = saved.get("samples", now["samples"]), task.same_data(saved)
    if before != now["samples"]:
        why = msg("trainer.data.other_count", before=before, now=now["samples"], unit=task.unit)
    elif not same:
        why = msg("trainer.data.other_data")
    elif not duration.same_seed(saved, task.config, batch, now["samples"]):
        why = msg("trainer.data.other_seed", before=saved["seed"], now=task.config.seed)
    else:
        return position
    if world.rank == 0 and (same or not reported):
        log.warning(why)
    return replace(position, used=0)


def check(task: Task, facts: ManifestRecord) -> None:
    """Compare data, tokenizer and the user's task file of this rank with rank 0's; all ranks must
    call it. Raises UserError on every rank, with the machines that differ."""
    first = cast("ManifestRecord", json.loads(from_main("data", json.dumps(facts))))
    same = (
        task.same_data(first)
        and _validation(first) == _validation(facts)
        and first["tokenizer"] == facts["tokenizer"]
    )
    problems = []
    if hosts := _others("data", same=same):
        what = msg("trainer.data.differs", hosts=hosts)
        problems.append(Problem("data.differs", what, msg("trainer.data.same_wanted")))
    if hosts := _others("task", same=first.get("task_sha256") == facts.get("task_sha256")):
        what = msg("trainer.task.differs", hosts=hosts)
        problems.append(Problem("task.differs", what, msg("trainer.data.same_wanted")))
    if problems:
        raise UserError(problems)


def _others(key: str, *, same: bool) -> str:
    """The machines that differ from rank 0's."""
    hosts = exchange_texts(key, "" if same else socket.gethostname(), everybody=True)
    # with its own same_data(), facts that JSON changes, such as tuples, may differ from themselves
    comparable = not hosts[0]
    return ", ".join(sorted({host for host in hosts if host})) if comparable else ""


def _validation(facts: ManifestRecord) -> Any:
    """Its digest, of a task that has one for each part."""
    data = facts["data"]
    return data.get("val") if isinstance(data, dict) else None

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
from training.data.batch_dataset import BatchDataset
from training.inspector.distributed import World, exchange_texts, from_main, is_main_process
from training.tasks.base import Task
from training.trainer.checkpoint import TrainProgress

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord

SHOWN = 4  # ranks in a message


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
    """The position in the current data. In other data an epoch begins again, unless it had ended.
    Another number of samples, also of a task that does not compare its data, or another seed has
    another order: so it does there. `reported`: other data was, when it was prepared."""
    if not position.used:
        return position
    before, same = saved.get("samples", now["samples"]), task.same_data(saved)
    if before != now["samples"]:
        why = msg("trainer.data.other_count", before=before, now=now["samples"], unit=task.unit)
    elif not same:
        why = msg("trainer.data.other_data")
    elif saved.get("seed", now["seed"]) != now["seed"]:
        why = msg("trainer.data.other_seed", before=saved["seed"], now=now["seed"])
    else:
        return position
    if duration.ended(saved, batch, now["samples"]):
        return replace(position, used=now["samples"])
    if world.rank == 0 and (same or not reported):
        log.warning(why)
    return replace(position, used=0)


def check(task: Task, facts: ManifestRecord) -> None:
    """Compare data, tokenizer and the user's task file of this rank with rank 0's; all ranks must
    call it. Raises UserError on every rank, with the machines that differ. Before counted(): other
    files are the reason of another number."""
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
        raise UserError(problems, said_by_another=not is_main_process())


def counted(task: Task, part: str, data: BatchDataset | None) -> BatchDataset | None:
    """The same data of "train" or "val", after a comparison of its number of samples: each rank
    computes from its own which samples the others take. All ranks must call it; raises UserError on
    every rank."""
    own = json.dumps([socket.gethostname(), None if data is None else len(data)])
    found = [json.loads(text) for text in exchange_texts(f"count/{part}", own, everybody=True)]
    others = [rank for rank, (_, count) in enumerate(found) if count != found[0][1]]
    if not others:
        return data
    counts = [
        msg("trainer.data.rank_has_none", rank=rank, host=host)
        if count is None
        else msg("trainer.data.rank_has", rank=rank, host=host, count=count)
        for rank in (0, *others[:SHOWN])
        for host, count in found[rank : rank + 1]
    ]
    text = ", ".join(counts) + (", …" if len(others) > SHOWN else "")
    what = msg("trainer.data.counts", part=part, unit=task.unit, counts=text)
    raise UserError(
        Problem("data.differs", what, msg("trainer.data.same_count")),
        said_by_another=not is_main_process(),
    )


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

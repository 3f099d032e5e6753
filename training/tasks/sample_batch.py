"""Batch of a task that counts samples: device_batch_size per rank, and the number of micro-batches
that total_batch_size requires."""

from __future__ import annotations

from collections.abc import Mapping

from training.config import batch
from training.config.schema import Config
from training.core import units
from training.core.errors import Problem
from training.core.messages import msg

SIZES = ("device_batch_size", "total_batch_size")


def split(config: Config, origins: Mapping[str, str], ranks: int) -> batch.Batch | None:
    """The batch; None if the total is not divisible or the batch size is not a number."""
    size = config.device_batch_size
    if isinstance(size, str):
        return None
    total = size * ranks if origins["total_batch_size"] == "default" else config.total_batch_size
    return batch.split(size, 1, ranks, total)


def divides(config: Config, origins: Mapping[str, str], ranks: int) -> list[Problem]:
    """A batch that is not divisible, with the nearest that are."""
    if split(config, origins, ranks):
        return []
    total = config.total_batch_size
    device = msg(
        "tasks.sample.batch.given",
        size=config.device_batch_size,
        origin=origins["device_batch_size"],
    )
    size = 1 if isinstance(config.device_batch_size, str) else config.device_batch_size
    if size != config.device_batch_size and (
        origins["total_batch_size"] == "default" or batch.device_choices(1, ranks, total)
    ):
        return []  # the plan finds one
    counted = units.plural(ranks, "rank")
    what = msg(
        "tasks.sample.batch.not_divisible",
        total=total,
        origin=origins["total_batch_size"],
        device=device,
        counted=counted,
        product=size * ranks,
    )
    fixes = [f"--{name}={value}" for name, value in batch.repairs(size, 1, ranks, total)]
    return [
        Problem(
            "batch.not_divisible",
            what,
            msg("tasks.sample.batch.multiple", product=size * ranks),
            fixes,
        )
    ]

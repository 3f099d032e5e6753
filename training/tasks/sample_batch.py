"""The batch of a task that counts samples: device_batch_size of each rank, and as many micro-batches as total_batch_size asks for."""

from __future__ import annotations

from collections.abc import Mapping

from training.config import batch
from training.config.schema import Config
from training.core import units
from training.core.errors import Problem

SIZES = ("device_batch_size", "total_batch_size")


def split(config: Config, origins: Mapping[str, str], ranks: int) -> batch.Batch | None:
    """None where the total does not divide, or the batch is not a number."""
    size = config.device_batch_size
    if isinstance(size, str):
        return None
    total = size * ranks if origins["total_batch_size"] == "default" else config.total_batch_size
    return batch.split(size, 1, ranks, total)


def divides(config: Config, origins: Mapping[str, str], ranks: int) -> list[Problem]:
    """The nearest batches that do."""
    if split(config, origins, ranks):
        return []
    size, total = config.device_batch_size, config.total_batch_size
    said = f"device_batch_size {size} ({origins['device_batch_size']})"
    if isinstance(size, str):
        fixes = [f"--device_batch_size={number}" for number in (1, 4)]
        return [Problem("batch.auto", f"{said}: what fits the memory is known of gpt alone", "a whole number of samples", fixes)]
    counted = units.plural(ranks, "rank")
    what = f"total_batch_size {total} ({origins['total_batch_size']}) does not divide by {said} × {counted} = {size * ranks}"
    fixes = [f"--{name}={value}" for name, value in batch.repairs(size, 1, ranks, total)]
    return [Problem("batch.not_divisible", what, f"a multiple of {size * ranks} samples", fixes)]

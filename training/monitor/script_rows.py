"""Columns of the rank table for a user script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.core import units
from training.core.cells import pad
from training.core.messages import msg

if TYPE_CHECKING:
    from training.core.contracts.state import RankState

WIDTHS = (7, 10, 12)


def titles() -> str:
    texts = (
        msg("monitor.column.cpu"),
        msg("monitor.column.memory"),
        msg("monitor.column.last_output"),
    )
    return "".join(
        f" {pad(text, width, right=True)}" for text, width in zip(texts, WIDTHS, strict=True)
    )


def cells(rank: RankState, *, ended: bool) -> str:
    """CPU use, memory (of the GPU if there is one) and the age of the last output."""
    cpu, age = rank.get("cpu_percent"), rank.get("output_age_s")
    used = rank.get("gpu_bytes") or rank.get("rss_bytes")
    texts = [
        "-" if cpu is None else f"{cpu:.0f} %",
        "-" if used is None else f"{units.gib(used)} GiB",
        "-" if age is None or ended else f"{age:.1f} s" if age < 100 else units.duration(age),
    ]
    return " ".join(pad(text, width, right=True) for text, width in zip(texts, WIDTHS, strict=True))

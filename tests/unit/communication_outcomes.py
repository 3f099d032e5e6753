"""Synthetic outcomes of the communication test."""

from __future__ import annotations

from typing import Any

from training.launcher.communication import analysis, stages
from training.launcher.communication.analysis import CommunicationFinding
from training.launcher.communication.runner import CommunicationOutcome

LARGE = stages.collective("all_reduce", 8 << 20)


def ended(
    *statuses: int, records: dict[int, dict[str, Any]] | None = None, at: str = LARGE, **facts: Any
) -> CommunicationOutcome:
    """All ranks have ended by themselves, one after the other."""
    order = dict(enumerate(statuses))
    reached = dict.fromkeys(order, at)
    records = {rank: {"wrong": []} if status == 0 else {} for rank, status in order.items()} | (
        records or {}
    )
    died = {rank: 100.0 + rank for rank in order}
    return CommunicationOutcome(
        len(statuses), 20.0, reached=reached, statuses=order, died_at=died, records=records, **facts
    )


def hung(*reached: str, **facts: Any) -> CommunicationOutcome:
    since = {"since_s": dict.fromkeys(range(len(reached)), 15.0)} | facts
    return CommunicationOutcome(
        len(reached), 20.0, reached=dict(enumerate(reached)), timed_out=True, **since
    )


def find(outcome: CommunicationOutcome) -> CommunicationFinding:
    return analysis.analyze(outcome, "cpu")

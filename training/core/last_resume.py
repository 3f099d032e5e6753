"""The last resume of a run, and what it discards: all earlier records of later steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from training.core.jsonl import Record, number, whole


@dataclass(frozen=True)
class LastResume:
    """`step`: of the loaded checkpoint; `time`: unix s."""

    step: int
    time: float

    def discards(self, record: Mapping[str, object]) -> bool:
        """Whether a record with `step` and `time` is of a discarded part, also while the resumed
        part has no step of its own yet."""
        return self._discards(whole(record.get("step")), number(record.get("time")))

    def discards_end(self, summary: Mapping[str, object]) -> bool:
        """Whether a summary.json is of a discarded part."""
        return self._discards(whole(summary.get("steps")), number(summary.get("time")))

    def _discards(self, step: int | None, at: float | None) -> bool:
        return step is not None and at is not None and step > self.step and at < self.time


def of_event(event: Record) -> LastResume | None:
    """None: an event of another kind."""
    step = whole(event.get("step"))
    if event.get("event") != "resume" or step is None:
        return None
    return LastResume(step, number(event.get("time")) or 0.0)

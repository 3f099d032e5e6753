"""The last resume of a run, and what it discards: all earlier records of later steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from training.core.jsonl import Record, number, whole


@dataclass(frozen=True)
class LastResume:
    """`step`: of the loaded checkpoint, 0 without one; `time`: unix s."""

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


def after(found: LastResume | None, event: Record) -> LastResume | None:
    """The last resume once `event` has followed; `found`: the one before. A start from step 0 is
    one too: the run was killed before its first checkpoint."""
    kind, step = event.get("event"), whole(event.get("step"))
    if kind not in ("resume", "start") or step is None:
        return found
    # nothing precedes the first start, also if the clock is set back later
    first = found is None and kind == "start"
    return LastResume(step, 0.0 if first else number(event.get("time")) or 0.0)

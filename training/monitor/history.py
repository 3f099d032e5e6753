"""metrics.jsonl as far as it was read: last values, speed of the last steps, evaluations, the loss curve."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

from training.monitor.records import Record, Tail, number, whole

SPEED_STEPS = 100  # step time and tokens/s are those of so many last steps
RATE_STEPS = 1000  # the time left follows from so many, evaluations and checkpoints among them
CURVE_POINTS = 4096


class History:
    """A resumed run repeats steps: what comes later in the file wins, and what it overtakes is forgotten."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path, keep=b'"val_bpb"')
        self._clear()

    def _clear(self) -> None:
        self.last: Record = {}
        self.evaluations: dict[int, Record] = {}
        self._window: deque[Record] = deque(maxlen=RATE_STEPS)
        self._curve: list[tuple[int, float]] = []

    def update(self) -> None:
        records, fresh = self._tail.read()
        if fresh:
            self._clear()
        for record in records:
            self._add(record)
        while len(self._curve) > CURVE_POINTS:
            del self._curve[1::2]

    def _add(self, record: Record) -> None:
        step = whole(record.get("step"))
        if step is None:
            return
        if "val_loss" in record or "val_bpb" in record:
            self.evaluations[step] = record
            return
        if self.last and step <= self.last["step"]:
            self.evaluations = {s: r for s, r in self.evaluations.items() if s < step}
            while self._curve and self._curve[-1][0] >= step:
                self._curve.pop()
            while self._window and self._window[-1]["step"] >= step:
                self._window.pop()
        self.last = record
        self._window.append(record)
        if (loss := number(record.get("loss"))) is not None:
            self._curve.append((step, loss))

    def best(self) -> tuple[int, float] | None:
        """(step, bits per byte) of the best evaluation."""
        scores = [(s, v) for s, r in self.evaluations.items() if (v := number(r.get("val_bpb"))) is not None and math.isfinite(v)]
        return min(scores, key=lambda pair: pair[1]) if scores else None

    def newest_evaluation(self) -> Record:
        return self.evaluations[max(self.evaluations)] if self.evaluations else {}

    def of_last_steps(self, key: str) -> list[float]:
        """Sorted values of the last SPEED_STEPS steps."""
        values = (number(r.get(key)) for r in list(self._window)[-SPEED_STEPS:])
        return sorted(v for v in values if v is not None and math.isfinite(v))

    def seconds_per_step(self, since: float) -> float | None:
        """By the clock, everything between the steps included; `since`: when this start of the run began."""
        seen = [(t, r["step"]) for r in self._window if (t := number(r.get("time"))) is not None and t >= since]
        if len(seen) < 2 or seen[-1][0] < seen[0][0]:
            return None
        return (seen[-1][0] - seen[0][0]) / (seen[-1][1] - seen[0][1])

    def curve(self, points: int) -> list[tuple[int, float]]:
        """At most `points` (last step, mean loss) over equal stretches of steps; NaN where any loss of a stretch is."""
        if len(self._curve) <= points:
            return list(self._curve)
        first, span = self._curve[0][0], self._curve[-1][0] - self._curve[0][0] + 1
        out: list[tuple[int, float]] = []
        group: list[float] = []
        for i, (step, loss) in enumerate(self._curve):
            group.append(loss)
            following = self._curve[i + 1][0] if i + 1 < len(self._curve) else first + span
            if (following - first) * points // span != (step - first) * points // span:
                mean = sum(group) / len(group)
                out.append((step, mean if math.isfinite(mean) else math.nan))
                group = []
        return out


def median(values: list[float]) -> float | None:
    """Of sorted values."""
    middle = len(values) // 2
    return None if not values else values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def percentile(values: list[float], percent: int) -> float | None:
    """Of sorted values: the smallest that `percent` of them do not exceed."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else None

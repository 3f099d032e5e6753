"""metrics.jsonl read so far: last values, speed of the last steps, evaluations, curves."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import metric_units
from training.core.course import CURVE_POINTS, RATE_STEPS, SPEED_STEPS, median, thin
from training.core.jsonl import Record, Tail, items, number, whole
from training.core.last_resume import LastResume
from training.core.read_backwards import backwards

if TYPE_CHECKING:
    from training.core.contracts.state import EvaluationState


class History:
    """Records of one metrics.jsonl. A resumed run repeats steps: later records replace earlier
    ones."""

    def __init__(self, path: Path) -> None:
        self._path, self._tail = path, Tail(path, keep=b'"val_')
        self._resumed: LastResume | None = None
        self._clear()

    def _clear(self) -> None:
        self.last: Record = {}
        self._first: int | None = None  # step
        self.evaluations: dict[int, Record] = {}
        self._window: deque[Record] = deque()  # of the last RATE_STEPS steps
        self._curve: list[tuple[int, float, float]] = []  # step, loss, tokens or samples per second

    def update(self) -> None:
        records, fresh = self._tail.read()
        if fresh:
            self._clear()
        for record in records:
            self._add(record)
        if not fresh:  # the first read is slow enough
            self._add_earlier()
        while len(self._curve) > CURVE_POINTS:
            del self._curve[1::2]

    def _add_earlier(self) -> None:
        for record in self._tail.earlier():
            step = whole(record.get("step"))
            if step is not None and not (self._resumed and self._resumed.discards(record)):
                self.evaluations.setdefault(step, record)

    def complete(self) -> None:
        """Finds every evaluation of a very long file, which may take long."""
        while not self._tail.searched:
            self._add_earlier()

    def _add(self, record: Record) -> None:
        step = whole(record.get("step"))
        if step is None:
            return
        if any(key.startswith(metric_units.EVALUATION) for key in record):
            self.evaluations[step] = record
            return
        if self.last and step <= self.last["step"]:
            self.evaluations = {s: r for s, r in self.evaluations.items() if s < step}
            while self._curve and self._curve[-1][0] >= step:
                self._curve.pop()
            while self._window and self._window[-1]["step"] >= step:
                self._window.pop()
        if self._first is None:
            self._first = step
        self.last = record
        self._window.append(record)
        while self._window[0]["step"] <= step - RATE_STEPS:  # of a long file only samples are read
            self._window.popleft()
        if (loss := number(record.get("loss"))) is not None:
            speed = metric_units.speed(record)
            self._curve.append((step, loss, math.nan if speed is None else speed))

    def discard(self, resumed: LastResume | None) -> None:
        """Forget what the last resume has discarded, before its own steps replace it."""
        self._resumed = resumed
        if not resumed or not resumed.discards(self.last):
            return
        self.evaluations = {s: r for s, r in self.evaluations.items() if not resumed.discards(r)}
        while self._curve and self._curve[-1][0] > resumed.step:
            self._curve.pop()
        while self._window and self._window[-1]["step"] > resumed.step:
            self._window.pop()
        self.last = self._window[-1] if self._window else self._newest_until(resumed.step)

    def _newest_until(self, step: int) -> Record:
        return next(
            (
                r
                for r in backwards(self._path)
                if "loss" in r and (whole(r.get("step")) or 0) <= step
            ),
            {},
        )

    def evaluation(self) -> EvaluationState:
        """The metric by which evaluations are compared: its name, newest and best value."""
        newest = self.evaluations[max(self.evaluations)] if self.evaluations else {}
        names = metric_units.scores(newest)
        if not names:
            return {
                "eval_name": None,
                "eval_unit": None,
                "eval_last": None,
                "eval_best": None,
                "eval_best_step": None,
                "eval_averaged": False,
            }
        name = names[0]
        scores = [
            (v, s)
            for s, r in self.evaluations.items()
            if (v := number(r.get(name))) is not None and math.isfinite(v)
        ]
        choose = max if metric_units.higher_is_better(name) else min
        best = choose(scores, key=lambda pair: pair[0]) if scores else (None, None)
        return {
            "eval_name": name,
            "eval_unit": metric_units.score_unit(name),
            "eval_last": number(newest.get(name)),
            "eval_best": best[0],
            "eval_best_step": best[1],
            "eval_averaged": metric_units.of_averaged(newest),
        }

    def of_last_steps(self, key: str) -> list[float]:
        """Sorted values of the last SPEED_STEPS steps, as _warm()."""
        values = (number(r.get(key)) for r in self._warm())
        return sorted(v for v in values if v is not None and math.isfinite(v))

    def _warm(self) -> list[Record]:
        """The last SPEED_STEPS steps. The first step of the run, which includes warm-up, is left
        out as in summary.json, unless it is the only one."""
        steps = list(self._window)[-SPEED_STEPS:]
        return [r for r in steps if r["step"] != self._first] or steps

    def measured(self, since: float) -> int:
        """How many of the last SPEED_STEPS belong to this start, i.e. ended at or after `since`
        (unix s)."""
        times = [number(r.get("time")) for r in list(self._window)[-SPEED_STEPS:]]
        return sum(t is not None and t >= since for t in times)

    def of_ranks(self, key: str) -> list[float | None]:
        """For each rank, the median over the last SPEED_STEPS of a list-valued metric, as
        _warm()."""
        columns: list[list[float]] = []
        for record in self._warm():
            for rank, value in enumerate(items(record.get(key))):
                if rank == len(columns):
                    columns.append([])
                if (known := number(value)) is not None and math.isfinite(known):
                    columns[rank].append(known)
        return [median(sorted(column)) for column in columns]

    def seconds_per_step(self, since: float) -> float | None:
        """Wall-clock time per step, including everything between steps. `since`: when this start
        began, unix s."""
        seen = [
            (t, r["step"])
            for r in self._window
            if (t := number(r.get("time"))) is not None and t >= since
        ]
        if len(seen) < 2 or seen[-1][0] < seen[0][0]:
            return None
        return (seen[-1][0] - seen[0][0]) / (seen[-1][1] - seen[0][1])

    def curve(self, points: int) -> list[tuple[int, float]]:
        """At most `points` pairs (last step, mean loss) over equal ranges of steps; NaN where any
        loss of a range is NaN."""
        return thin([(step, loss) for step, loss, _ in self._curve], points)

    def speed_curve(self, points: int) -> list[tuple[int, float]]:
        """Like `curve`, for tokens or samples per second."""
        return thin(
            [(step, speed) for step, _, speed in self._curve if math.isfinite(speed)], points
        )

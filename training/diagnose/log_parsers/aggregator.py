"""Many lines of a log → last values, speed, evaluations, the loss curve; the counterpart of
history.History for logs."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.core.course import CURVE_POINTS, RATE_STEPS, SPEED_STEPS, median, percentile, thin
from training.core.jsonl import Record
from training.core.metric_units import (
    BITS,
    EVALUATION,
    NATS,
    SPEEDS,
    TOKENS,
)
from training.diagnose.log_parsers import evaluations
from training.diagnose.log_parsers.log_record import LogRecord
from training.diagnose.log_parsers.metric_names import BAR, unit_of

if TYPE_CHECKING:
    from training.core.contracts.state import EvaluationState, LogTraining

LOGGED = ("time", "loss", "lr", "grad_norm", "step_ms", "mfu", *SPEEDS.values())
KEPT = ("lr", "grad_norm", "tokens", "mfu", "memory_bytes")  # the last value of any line
EVALUATIONS = 4096
PER_DEVICE = ("torchtitan",)  # frameworks that log tokens/s per GPU


@dataclass(frozen=True, slots=True)
class Point:
    offset: int  # place in the log
    epoch: int
    step: int | None
    loss: float
    fact: LogRecord


class LogAggregator:
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.facts = 0
        self.last: LogRecord | None = None  # the newest that has a step
        self.loss: float | None = None
        self._bits = False
        self.epoch: float | None = None
        self.epochs: int | None = None
        self._heading: float | None = None  # epoch of the last heading
        self.epoch_steps: int | None = None  # from a heading
        self.total: int | None = None
        self.within_epoch = False  # step counts restart in every epoch
        self.newest_offset = -1
        self._epoch_size = 1  # steps seen so far
        self._unnamed_epoch = 1  # counted where the log does not name it
        self._first_epoch = 1  # or 0, once an epoch 0 was seen
        self._kept: Record = {}  # the newest value of each metric
        self._sources: Counter[str] = Counter()
        self._rank, self._rank_has_loss = 0, False
        self._pending: LogRecord | None = None
        self._behind_bars = False  # metrics follow the bar of their step
        self._lines_with_step = False  # if so, a bar without a loss counts something else
        self._trained = False  # likewise, until the next training logs a loss
        self._curve: list[Point] = []
        self._evaluations: deque[tuple[int | None, dict[str, float]]] = deque(maxlen=EVALUATIONS)
        self._times: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS)
        self._first_time: float | None = None
        self._step_ms: deque[float] = deque(maxlen=SPEED_STEPS)
        self._speeds: dict[str, deque[float]] = {
            key: deque(maxlen=SPEED_STEPS) for key in SPEEDS.values()
        }
        self._intervals: deque[float] = deque(maxlen=SPEED_STEPS)
        # steps from one line of progress to the next
        self._strides: deque[int] = deque(maxlen=SPEED_STEPS)

    def restart(self, rank: int) -> None:
        """Forgets what other ranks have logged, except the length of the run."""
        total, epochs = self.total, self.epochs
        self.clear()
        self._rank, self.total, self.epochs = rank, total, epochs

    # -- reading

    def add(self, fact: LogRecord) -> None:
        if not self._counts(fact):
            return
        self.facts += fact.tells
        if fact.source:
            self._sources[fact.source] += 1
        self.newest_offset = fact.offset
        self._behind_bars |= fact.behind_bar
        if fact.heading:
            self._heading, self.epoch_steps = fact.epoch, fact.epoch_steps
        elif fact.epoch is None and fact.step is not None:
            fact.epoch = self._heading
        # Hugging Face's metrics have no step; the bar redrawn right after them has it.
        if fact.step is None and (fact.loss is not None or fact.scores) and fact.epoch is not None:
            self._settle()
            self._take(fact)
            behind = self._behind_bars or (self.last is not None and not self.last.bar)
            if behind and fact.loss is None:
                self._record(fact)  # their step was printed before them
            else:
                self._pending = fact
            return
        if self._pending and fact.bar and fact.step is not None:
            self._pending.step, self._pending.total = fact.step, fact.total
            self._settle()
        self._take(fact)
        self._record(fact)

    def gap(self) -> None:
        """Marks a gap in the log: the next lines do not follow the previous ones directly."""
        self._settle()

    def _settle(self) -> None:
        fact, self._pending = self._pending, None
        if fact:
            self._record(fact)

    def _counts(self, fact: LogRecord) -> bool:
        """Whether the record's rank is the one that counts: rank 0 if it logs a loss, else the
        first that does."""
        rank, has_loss = fact.rank or 0, fact.loss is not None
        if has_loss and rank != self._rank and (not self._rank_has_loss or rank == 0):
            self.restart(rank)
        if rank != self._rank:
            if fact.memory_bytes is not None and not fact.tells:
                self._kept["memory_bytes"] = max(
                    fact.memory_bytes, self._kept.get("memory_bytes", 0)
                )
            return False
        self._rank_has_loss |= has_loss
        foreign = fact.bar and not has_loss and (self._trained or self._lines_with_step)
        # one that logs no loss may be followed by others like it
        ended = fact.trained and self._rank_has_loss
        self._trained = ended or (self._trained and not has_loss)
        if foreign and not fact.scores:
            if self._trained:
                self.newest_offset = fact.offset  # work, though no step
            return False
        if foreign and self._trained:
            fact.step = fact.total = None  # of an evaluation with a bar like that of the training
        self._lines_with_step |= has_loss and fact.step is not None and not fact.bar
        return True

    def _take(self, fact: LogRecord) -> None:
        for name in KEPT if fact.bar or not fact.scores else ():
            if (value := getattr(fact, name)) is not None:
                self._kept[name] = value
        self.epochs = fact.epochs if fact.epochs is not None else self.epochs
        self.total = fact.total if fact.total is not None else self.total
        if fact.epoch is not None:
            self.epoch = fact.epoch
        if fact.loss is not None:
            self.loss, self._bits = fact.loss, fact.bits
        for key, speeds in self._speeds.items():
            if (rate := getattr(fact, key)) is not None and not fact.scores:
                speeds.append(rate)
        if fact.step_ms is not None and not fact.scores:
            self._step_ms.append(fact.step_ms)
        if fact.time is not None and fact.tells:
            self._first_time = fact.time if self._first_time is None else self._first_time
            if self._times and fact.time > self._times[-1][0]:
                self._intervals.append(fact.time - self._times[-1][0])

    def _record(self, fact: LogRecord) -> None:
        if fact.step is not None and (fact.bar or fact.loss is not None or not fact.scores):
            self._advance(fact)
        if fact.loss is not None:
            self._curve.append(Point(fact.offset, self._epoch_of(fact), fact.step, fact.loss, fact))
            if len(self._curve) > CURVE_POINTS:
                self._thin()
        # A bar keeps repeating the last evaluation, also on a separate line if it is broken in
        # two.
        again = (
            (fact.bar or fact.step is None)
            and self._evaluations
            and fact.scores == self._evaluations[-1][1]
        )
        if fact.scores and not again:
            at = fact if fact.step is not None or not self.last else self.last
            self._evaluations.append((self._place(self._epoch_of(at), at.step), fact.scores))

    def _thin(self) -> None:
        """Keeps the last point of each equal section of the file, and all points of a sampled
        part."""
        first, span = self._curve[0].offset, max(1, self._curve[-1].offset - self._curve[0].offset)
        self._curve = list(
            {
                (point.offset - first) * (CURVE_POINTS // 2) // span: point for point in self._curve
            }.values()
        )

    def _epoch_of(self, fact: LogRecord) -> int:
        epoch = fact.epoch if fact.epoch is not None else self.epoch
        return int(epoch or 0)

    def _advance(self, fact: LogRecord) -> None:
        """Moves to the record's step. A restarted run repeats steps: their old points are
        dropped."""
        step, last = fact.step or 0, self.last
        self.within_epoch |= fact.whole_epoch
        if fact.whole_epoch and fact.epoch is None:
            self._unnamed_epoch += bool(last and step < (last.step or 0))
            fact.epoch = self._unnamed_epoch
        if fact.epoch is not None:  # min: the log may start at a later epoch
            self._first_epoch = min(
                self._first_epoch, 0 if fact.source == "Lightning" else int(fact.epoch)
            )
        if self.total is not None and fact.total is None and step > self.total:
            self.total = None  # of a bar that counts something else
        self._epoch_size = max(self._epoch_size, step + 1 if fact.total is None else fact.total)
        if last and last.step is not None and step < last.step and not self.within_epoch:
            if fact.epoch is not None and last.epoch is not None and fact.epoch > last.epoch:
                self.within_epoch = True
            else:
                self._evaluations = deque(
                    (e for e in self._evaluations if e[0] is None or e[0] < step), EVALUATIONS
                )
                self._times.clear()
        here = (self._epoch_of(fact) if self.within_epoch else 0, step)
        while (
            fact.loss is not None and self._curve and (before := self._curve[-1].step) is not None
        ):
            if ((self._curve[-1].epoch if self.within_epoch else 0), before) < here:
                break
            self._curve.pop()
        if last and last.step is not None and step > last.step:
            self._strides.append(step - last.step)
        self.last = fact
        if fact.time is not None:
            self._times.append((fact.time, self._place(self._epoch_of(fact), step) or 0))

    # -- results

    @property
    def source(self) -> str | None:
        """The framework of most lines; BAR only without a better match."""
        named = [(count, name) for name, count in self._sources.items() if name != BAR]
        return max(named)[1] if named else BAR if self._sources else None

    def _place(self, epoch: int, step: int | None) -> int | None:
        """Step counted over all epochs."""
        return (
            step
            if step is None or not self.within_epoch
            else (epoch - self._first_epoch) * self._epoch_size + step
        )

    def curve(self, points: int) -> tuple[str, list[tuple[int, float]]]:
        """(name of the x-axis, points). Without any step in the log, x is the place in the
        file."""
        if all(point.step is None for point in self._curve):
            losses = [(point.offset, point.loss) for point in self._curve]
            if self._pending and self._pending.loss is not None:
                losses.append((self._pending.offset, self._pending.loss))
            return "place in the log", thin(losses, points)
        steps = ((self._place(point.epoch, point.step), point.loss) for point in self._curve)
        return "step", thin([(step, loss) for step, loss in steps if step is not None], points)

    def records(self) -> list[Record]:
        """Metrics of each step and each evaluation, as records of metrics.jsonl; `time` as
        logged."""
        out: list[Record] = []
        for point in self._curve:
            if (step := self._place(point.epoch, point.step)) is not None:
                known = {
                    name: value
                    for name in LOGGED
                    if (value := getattr(point.fact, name)) is not None
                }
                out.append({"step": step, **known})
        for place, scores in self._evaluations:
            if place is not None:
                out.append(
                    {
                        "step": place,
                        **{
                            EVALUATION + name.removeprefix(EVALUATION).removeprefix("eval_"): v
                            for name, v in scores.items()
                        },
                    }
                )
        return sorted(out, key=lambda record: (record["step"], "loss" not in record))

    def seconds_per_step(self) -> float | None:
        if (
            len(self._times) > 1
            and self._times[-1][1] > self._times[0][1]
            and self._times[-1][0] > self._times[0][0]
        ):
            return (self._times[-1][0] - self._times[0][0]) / (
                self._times[-1][1] - self._times[0][1]
            )
        usual = median(sorted(self._step_ms))
        return usual / 1000 if usual is not None else None

    def interval_s(self) -> float | None:
        """Median seconds between progress lines: from their timestamps, else from the step
        time."""
        if self._intervals or not self._strides:
            return median(sorted(self._intervals))
        pace, stride = self.seconds_per_step(), median(sorted(map(float, self._strides)))
        return None if pace is None or stride is None else pace * stride

    def elapsed_s(self) -> float | None:
        if self.last and self.last.elapsed_s is not None:
            return self.last.elapsed_s
        if self._first_time is None or not self._times:
            return None
        return max(0.0, self._times[-1][0] - self._first_time)

    def eta_s(self) -> float | None:
        if self.last is None:
            return None
        if self.last.eta_s is not None:
            return self.last.eta_s
        pace, total, step = self.seconds_per_step(), self.total, self.last.step
        return None if pace is None or not total or step is None else max(0, total - step) * pace

    def training(self) -> LogTraining:
        times, bar = sorted(self._step_ms), self.last is not None and self.last.bar
        if (
            not times
            and self.last is not None
            and len(self._times) > 1
            and (pace := self.seconds_per_step()) is not None
        ):
            times, bar = [1000 * pace], True
        return {
            "loss": self.loss,
            "loss_unit": self._loss_unit(),
            "bytes_per_token": None,
            "loss_is_finite": None if self.loss is None else math.isfinite(self.loss),
            **self._evaluation(),
            "lr": self._kept.get("lr"),
            "grad_norm": self._kept.get("grad_norm"),
            "tokens": self._kept.get("tokens"),
            "unit": next((unit for unit, key in SPEEDS.items() if self._speeds[key]), None)
            or (TOKENS if "tokens" in self._kept else None),
            "samples": None,
            "tokens_per_s": median(sorted(self._speeds["tokens_per_s"])),
            "samples_per_s": median(sorted(self._speeds["samples_per_s"])),
            "tokens_per_s_of": None
            if not self._has_tokens
            else "device"
            if self.source in PER_DEVICE
            else "run",
            "mfu": self._kept.get("mfu"),
            "joules_per_unit": None,
            "memory_bytes": self._kept.get("memory_bytes"),
            "step_ms_median": median(times),
            # Rates of a bar are already smoothed.
            "step_ms_p95": None if bar else percentile(times, 95),
            "steps_measured": 0,
            "told_every_s": self.interval_s(),
        }

    def _loss_unit(self) -> str | None:
        if self.loss is None:
            return None
        return (
            BITS
            if self._bits
            else unit_of(self.source)
            or (NATS if self.source == "Duet" and self._has_tokens else None)
        )

    @property
    def _has_tokens(self) -> bool:
        return bool(self._speeds[SPEEDS[TOKENS]])

    def _evaluation(self) -> EvaluationState:
        pending = [(None, self._pending.scores)] if self._pending else []
        return evaluations.best([*self._evaluations, *pending])

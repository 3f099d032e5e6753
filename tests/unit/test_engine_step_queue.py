"""Steps whose figures are read later than they end."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.core import heartbeat
from training.core.errors import Exit
from training.trainer import sanity_checks, step_stats
from training.trainer.checkpoint import TrainProgress
from training.trainer.progress import Stopwatch
from training.trainer.step_queue import QueuedStep, StepQueue
from training.trainer.step_stats import NO_CHECKSUM, OwnTime, RankStep, StepReport

STEP_S = 0.25


class Report:
    """Figures of step `number`, which arrived `STEP_S` after those of the step before."""

    def __init__(self, number: int, begun: float, stop: Exit) -> None:
        self.number, self.stop = number, stop
        self.arrived = begun + number * STEP_S

    def read(self) -> StepReport:
        return StepReport([RankStep(self.number, 4, 2.5, NO_CHECKSUM)], self.stop, 1.0)


class Recorded(list[tuple[int, float]]):
    """The step numbers and milliseconds that reach the display."""

    def step(self, position: TrainProgress, report: Any, rate: float, lap: tuple[Any, Any]) -> None:
        self.append((position.step, round(lap[0])))


def queue(device: str, *steps: int, stops: int = 0) -> StepQueue:
    """These steps queued on this device; step `stops` carries a stop request."""
    watch = Stopwatch(1, torch.device("cpu"))
    made = StepQueue(
        SimpleNamespace(
            world=SimpleNamespace(device=torch.device(device)), loss_scale=None, time_limit=None
        ),
        watch,
    )  # type: ignore[arg-type]
    for number in steps:
        stop = Exit.PREEMPTED if number == stops else Exit.DONE
        report: Any = Report(number, watch._last, stop)
        made.add(QueuedStep(TrainProgress(number - 1), TrainProgress(number), 0.1, report))
    return made


def test_steps_that_are_read_at_once_have_their_own_times() -> None:
    steps, seen = queue("cuda", 1, 2), Recorded()
    assert steps.read(seen, everything=True) == Exit.DONE  # type: ignore[arg-type]
    assert seen == [(1, 1000 * STEP_S), (2, 1000 * STEP_S)]


def test_a_gpu_is_read_one_step_later_and_a_stop_reads_everything() -> None:
    seen = Recorded()
    assert queue("cuda", 1).read(seen, everything=False) == Exit.DONE  # type: ignore[arg-type]
    assert not seen
    assert queue("cuda", 1, 2).read(seen, everything=False) == Exit.DONE  # type: ignore[arg-type]
    assert [step for step, _ in seen] == [1]
    seen.clear()
    stopped = queue("cuda", 1, 2, stops=1).read(seen, everything=False)  # type: ignore[arg-type]
    assert stopped == Exit.PREEMPTED and [step for step, _ in seen] == [1, 2]
    seen.clear()
    assert queue("cpu", 1).read(seen, everything=False) == Exit.DONE  # type: ignore[arg-type]
    assert [step for step, _ in seen] == [1]


def test_the_wait_for_the_newest_step_is_in_the_phase_of_such_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 'record', which usually takes a millisecond, a long step would count as silence."""
    phases, waited = ["optimizer"], list[str]()  # that of the loop
    monkeypatch.setattr(heartbeat, "current", SimpleNamespace(beat=phases.append))
    real = Report.read
    monkeypatch.setattr(Report, "read", lambda self: waited.append(phases[-1]) or real(self))
    queue("cuda", 1, 2, stops=1).read(Recorded(), everything=False)  # type: ignore[arg-type]
    assert waited == ["optimizer", "optimizer"]
    assert phases == ["optimizer", "record", "optimizer", "record"]


def test_a_step_that_fails_its_checks_is_the_one_of_the_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """failure.json and the card take the step from there; the loop is already in the next one."""
    beats = list[tuple[int, str]]()

    class Pulse:
        step = 3

        def beat(self, phase: str) -> None:
            beats.append((self.step, phase))

    monkeypatch.setattr(heartbeat, "current", Pulse())

    def check_step(session: Any, report: StepReport, begun: TrainProgress) -> None:
        if begun.step == 1:
            raise sanity_checks.NotFinite("loss is nan on rank 0 at step 2", 0)

    monkeypatch.setattr(sanity_checks, "check_step", check_step)
    with pytest.raises(sanity_checks.NotFinite):
        queue("cuda", 1, 2, 3).read(Recorded(), everything=False)  # type: ignore[arg-type]
    assert beats[-1] == (2, "record")


@dataclass
class Gpu:
    """Milliseconds of work: queued so far, and done."""

    queued: float = 0.0
    done: float = 0.0


@dataclass
class Event:
    gpu: Gpu
    at: float

    def query(self) -> bool:
        return self.at <= self.gpu.done

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "torch raises: the GPU has not come that far"
        return end.at - self.at


def test_the_own_time_of_a_rank_is_its_gpu_s(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    monkeypatch.setattr(step_stats, "moment", lambda device: Event(gpu, gpu.queued))
    own = OwnTime(torch.device("cuda"))

    def step(*micro_batches: float) -> float:
        for ms in micro_batches:
            own.begin()
            gpu.queued += ms
            own.end()
            gpu.queued += 100  # a backward pass
        return own.step_ms()

    assert step(3, 4) == step_stats.NO_TIME, "the GPU has not begun"
    gpu.done = gpu.queued
    assert step(10) == pytest.approx(7)
    gpu.done += 9
    assert step(20, 20) == pytest.approx(7), "the second step is not complete"
    gpu.done += 1
    assert step(5) == pytest.approx(10), "without its backward pass"
    gpu.done = gpu.queued
    assert step(6) == pytest.approx(5), "the newest of several"
    for ms in range(50, 60):  # a GPU far behind: the oldest are forgotten
        assert step(ms) == pytest.approx(5)
    gpu.done = gpu.queued
    assert step(1) == pytest.approx(59)

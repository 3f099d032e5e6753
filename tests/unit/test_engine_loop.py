"""The loop with a profiler: times of the steps, what is outside of the profile, and the order of
evaluation and checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from tests.cases import each
from training.config.batch import Batch
from training.config.schema import Config
from training.core import heartbeat, rundir
from training.core.errors import Exit
from training.data.duration import TrainingLength
from training.data.loader import Batches
from training.inspector import step_timer
from training.inspector.distributed import World
from training.tasks.base import Task
from training.trainer import gradients, loop, sanity_checks
from training.trainer.checkpoint import TrainProgress
from training.trainer.evaluate import Stopped
from training.trainer.loss_scale import LossScale
from training.trainer.step_queue import StepQueue
from training.trainer.step_stats import OwnTime, StopRequest
from training.trainer.train_state import TrainState

CPU = torch.device("cpu")
STEPS = 4
STEP_S, PROFILER_S = 0.25, 8.0  # by the clock of the test


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Line(Task):
    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(torch.arange(float(STEPS)).unsqueeze(1))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.options.clock.now += STEP_S
        return model(batch[0]).square().mean()


class Profiled:
    """At work before each step from the third on."""

    def __init__(self, clock: Clock, seen: list[str]) -> None:
        self._clock, self._seen = clock, seen

    def begin(self, step: int) -> bool:
        self._clock.now += PROFILER_S if step > 2 else 0.0
        return step > 2

    def close(self) -> None:
        if "profile" not in self._seen:
            self._seen.append("profile")


class Lagging(StepQueue):
    """Reads a step during the next one, as on a GPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lag = 1


def trained(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: Exit = Exit.DONE,
    *,
    every: int = STEPS,
    facts: dict[str, Any] | None = None,
    evaluate: Callable[..., None] | None = None,
    **state: Any,
) -> tuple[list[str], list[dict[str, Any]]]:
    """What happened in order, and the records of the steps. `every`: steps per evaluation; `facts`:
    receives those of the last checkpoint; `evaluate`: instead of a validation that is only noted;
    `state`: further fields of the train state."""
    clock, seen, records = Clock(), list[str](), list[dict[str, Any]]()
    monkeypatch.setattr(step_timer, "time", clock)
    monkeypatch.setattr(loop, "StepQueue", Lagging)
    monkeypatch.setattr(loop.gc, "freeze", lambda: None)  # objects of other tests
    monkeypatch.setattr(loop.profiler, "planned", lambda session: Profiled(clock, seen))
    monkeypatch.setattr(loop, "evaluate", evaluate or (lambda *_: seen.append("validation")))
    run = rundir.RunDir(folder)
    run.create()
    config = Config(eval_every=every, save_every=STEPS, num_workers=0)
    task, batch = Line(SimpleNamespace(clock=clock), config, CPU), Batch(1, 1, 1, 1)
    rows, raw, saver = task.rows("train"), task.model(), SimpleNamespace()

    def save(position: TrainProgress, state: Any, found: dict[str, Any], *, required: bool) -> None:
        seen.append("checkpoint")
        (facts if facts is not None else {}).update(found)

    saver.save = save
    assert rows
    session = TrainState(
        config=config,
        run=run,
        world=World(0, 0, 1, CPU, "none", "-"),
        batch=batch,
        task=task,
        raw=raw,
        weights=list(raw.parameters()),
        model=raw,
        optimizer=task.optimizers(raw),
        batches=Batches(rows, batch, rank=0, seed=1, workers=0, persistent=False),
        validation=rows,
        autocast=torch.autocast("cpu", torch.bfloat16, enabled=False),
        precision="fp32",
        compiled=False,
        loss_scale=None,
        saver=saver,
        facts={},  # type: ignore[typeddict-item]
        **({"position": TrainProgress(), "length": TrainingLength(STEPS, STEPS, 1)} | state),
    )
    request = StopRequest()
    request.code = stop
    recorder: Any = SimpleNamespace(
        power=None, forecast=None, write=records.append, checkpoint=lambda: None
    )
    loop.train(session, recorder, request)
    return seen, [record for record in records if "step_ms" in record]


def test_a_profiler_at_work_is_in_no_step_s_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, records = trained(tmp_path, monkeypatch)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["step_ms"] for record in records] == [1000 * STEP_S] * STEPS


def test_a_profile_ends_before_the_last_validation_and_a_stopped_run_s_after_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, _ = trained(tmp_path / "whole", monkeypatch)
    assert seen == ["profile", "validation", "checkpoint"]
    seen, _ = trained(tmp_path / "stopped", monkeypatch, Exit.PREEMPTED)
    assert seen == ["checkpoint", "profile"]


def test_a_micro_batch_is_released_before_the_next_one_is_read() -> None:
    class Micro: ...

    there: WeakSet[Micro] = WeakSet()
    counts = []

    def read() -> Micro:
        counts.append(len(there))
        there.add(one := Micro())
        return one

    weight = nn.Parameter(torch.ones(()))
    session: Any = SimpleNamespace(
        task=SimpleNamespace(
            random=False, count=lambda batch: 1, checked_loss=lambda model, batch: weight * 1.0
        ),
        batch=SimpleNamespace(accumulation=3),
        world=SimpleNamespace(rank=0),
        accumulate=lambda last: nullcontext(),
        autocast=nullcontext(),
        model=None,
        loss_scale=None,
    )
    work = loop.forward_backward(session, iter(read, None), TrainProgress(), OwnTime(CPU))
    assert (work.sequences, counts) == (3, [0, 0, 0])


class Rows(nn.Module):
    """Rows of a table, one of them twice."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 1)

    def forward(self) -> torch.Tensor:
        return self.head(self.table(torch.tensor([2, 5, 2]))).square().sum()


@each("scaled", [False, True])
@each("limit", [0.0, 0.01, 100.0])
def test_sparse_gradients_are_clipped_as_dense_ones(limit: float, scaled: bool) -> None:
    norms, found = [], []
    for sparse in (False, True):
        model, scale = Rows(sparse=sparse), LossScale(CPU)
        session: Any = SimpleNamespace(
            clipped=[list(model.parameters())], config=Config(grad_clip=limit)
        )
        (scale.scaled(model()) if scaled else model()).backward()
        assert not scaled or not scale.unscale(model.parameters())
        norms.append(loop.clip(session))
        grad = model.table.weight.grad
        assert grad is not None and grad.is_sparse == sparse
        found.append([grad.to_dense(), model.head.weight.grad])
    torch.testing.assert_close(norms[1], norms[0])
    torch.testing.assert_close(found[1], found[0])


def test_the_gradients_of_one_rank_alone_clip_no_weights_of_all_ranks() -> None:
    """Weights that a task excludes from DDP have other gradients on each rank."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    shared, own = model.parameters()
    model._ddp_params_and_buffers_to_ignore = ["1.weight"]  # type: ignore[assignment]
    session: Any = SimpleNamespace(config=Config(grad_clip=1.0))
    session.clipped = gradients.parts(model, [shared, own])
    shared.grad, own.grad = torch.full((1, 1), 4.0), torch.full((1, 1), 30.0)
    assert loop.clip(session) == 4
    assert [shared.grad.item(), own.grad.item()] == pytest.approx([1, 1])


def test_an_evaluation_that_a_stop_prevents_is_the_first_work_of_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: dict[str, Any] = {}
    seen, records = trained(tmp_path / "stopped", monkeypatch, Exit.PREEMPTED, every=1, facts=facts)
    assert (seen, len(records)) == (["checkpoint", "profile"], 1)
    assert facts == {"score": None, "unevaluated": True}
    facts.clear()
    seen, records = trained(
        tmp_path / "resumed",
        monkeypatch,
        every=2,
        facts=facts,
        position=TrainProgress(1, 0, 1, 1),
        unevaluated=True,
    )
    assert seen == ["validation", "validation", "profile", "validation", "checkpoint"]
    assert [record["step"] for record in records] == [2, 3, 4]
    assert facts == {"score": None}


def test_the_first_evaluation_of_a_process_is_a_phase_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles, also after a resume."""
    phases: list[str] = []
    pulse = SimpleNamespace(step=0, epoch=0, beat=phases.append)
    monkeypatch.setattr(heartbeat, "current", pulse)
    trained(tmp_path, monkeypatch, every=2, position=TrainProgress(1, 0, 1, 1), unevaluated=True)
    found = [phase for phase in phases if "evaluation" in phase]
    assert found == ["first evaluation", "evaluation", "evaluation"]


@each("unevaluated", [False, True])
def test_a_stop_during_an_evaluation_saves_and_leaves_it_to_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unevaluated: bool
) -> None:
    def stopped(session: TrainState, stop: StopRequest) -> None:
        raise Stopped(Exit.PREEMPTED)

    facts: dict[str, Any] = {}
    begun = TrainProgress(1, 0, 1, 1)
    seen, records = trained(
        *(tmp_path, monkeypatch),
        every=2,
        facts=facts,
        evaluate=stopped,
        position=begun,
        unevaluated=unevaluated,
    )
    assert seen == ["checkpoint", "profile"]
    assert facts == {"score": None, "unevaluated": True}
    assert [record["step"] for record in records] == ([] if unevaluated else [2])


def test_the_last_evaluation_is_repeated_after_a_stop_and_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time after a stop request may end before the evaluation does."""
    saved: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}

    def stopped(session: TrainState, stop: StopRequest | None) -> None:
        saved.append({**facts})
        facts.clear()
        if stop:
            raise Stopped(Exit.PREEMPTED)

    seen, records = trained(tmp_path, monkeypatch, facts=facts, evaluate=stopped)
    assert seen == ["profile", "checkpoint", "checkpoint"] and len(records) == STEPS
    assert saved == [{}, {"score": None, "unevaluated": True}] and facts == {"score": None}


@each("step", [STEPS, STEPS + 1])  # the latter: resumed with fewer steps
def test_the_resume_of_a_trained_run_makes_its_last_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    facts: dict[str, Any] = {}
    begun = TrainProgress(step, 0, STEPS, step)
    seen, records = trained(tmp_path, monkeypatch, facts=facts, position=begun, unevaluated=True)
    assert (seen, records) == (["validation", "checkpoint", "profile"], [])
    assert facts == {"score": None}


def test_a_resume_at_the_end_of_an_epoch_begins_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []
    prove = sanity_checks.prove_shards

    def proved(session: TrainState, position: TrainProgress) -> None:
        begun.append((position.epoch, position.used))
        prove(session, position)

    monkeypatch.setattr(sanity_checks, "prove_shards", proved)
    length, end = TrainingLength(2 * STEPS, STEPS, 2), TrainProgress(STEPS, 0, STEPS, STEPS)
    _, records = trained(tmp_path, monkeypatch, length=length, position=end, unevaluated=True)
    assert begun == [(1, 0)] and [record["epoch"] for record in records] == [2] * STEPS

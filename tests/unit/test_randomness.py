"""Random numbers of a task: from torch, numpy or Python, they depend on the seed alone."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.conftest import ROOT, clean_environment
from tests.unit.trained_runs import checkpoint
from training import tasks
from training.config.batch import Batch
from training.config.schema import Config
from training.core import rundir
from training.data.duration import TrainingLength
from training.inspector.distributed import World
from training.tasks import randomness
from training.trainer import loop, train_state
from training.trainer.checkpoint import TrainProgress
from training.trainer.step_stats import OwnTime

CPU = torch.device("cpu")
SPLIT = """
import random
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset
from training.tasks.base import Task

AT_IMPORT = random.random()

class Split(Task):
    def __init__(self, *args):
        super().__init__(*args)
        self.mine = [AT_IMPORT, np.random.rand()]

    def model(self):
        return nn.Linear(1, 1)

    def optimizer(self, model):
        np.random.rand()
        return super().optimizer(model)

    def train_data(self):
        return self.val_data()

    def val_data(self):
        self.first = ord(next(iter({chr(number) for number in range(97, 123)})))
        drawn = [*self.mine, random.random(), np.random.rand(), torch.rand(()).item()]
        return TensorDataset(torch.tensor([drawn]))

    def loss(self, model, batch):
        return (model(batch[0][:, :1]) * torch.rand(()) * random.random()).mean()

    def metrics(self, model, batch):
        found = {str(place): batch[0][:, place] for place in range(batch[0].shape[1])}
        return found | {"set": torch.full((1,), float(self.first))}
"""


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


@pytest.mark.parametrize("value", [0, 42, -1, (1 << 64) - 1])
def test_one_seed_for_all_generators(value: int) -> None:
    with randomness.apart():
        randomness.seed(value)
        first = draws()
        randomness.seed(value)
        assert draws() == first
        randomness.seed(value ^ 5)
        assert not set(draws()) & set(first)


def test_what_is_drawn_apart_leaves_the_caller_s_numbers() -> None:
    with randomness.apart():
        randomness.seed(3)
        wanted = draws()
        randomness.seed(3)
        with randomness.apart():
            randomness.seed(4)
            draws()
        assert draws() == wanted


def test_a_step_draws_by_seed_step_and_rank() -> None:
    def drawn(step: int, rank: int) -> list[float]:
        found: list[float] = []
        weight = torch.nn.Parameter(torch.ones(()))

        def loss(model: Any, batch: Any) -> torch.Tensor:
            found.extend(draws())
            return weight * 1.0

        session: Any = SimpleNamespace(
            task=SimpleNamespace(random=True, count=len, checked_loss=loss),
            batch=SimpleNamespace(accumulation=1),
            config=Config(),
            world=SimpleNamespace(rank=rank),
            accumulate=lambda last: torch.enable_grad(),
            autocast=torch.enable_grad(),
            model=None,
            loss_scale=None,
        )
        loop.forward_backward(session, iter([[1]]), TrainProgress(step), OwnTime(CPU))
        return found

    with randomness.apart():
        first = drawn(7, 0)
        draws()
        assert drawn(7, 0) == first
        assert not {*first} & {*drawn(8, 0), *drawn(7, 1)}


def test_an_optimizer_that_draws_keeps_the_ranks_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured after it differs by rank again, and depends on the step alone."""
    measured: list[tuple[float, float, float]] = []
    monkeypatch.setattr(loop, "evaluate", lambda *_: measured.append(draws()))

    def drawn(step: int, rank: int) -> list[float]:
        found: list[float] = []
        session: Any = SimpleNamespace(
            task=SimpleNamespace(random=True),
            config=Config(),
            world=SimpleNamespace(rank=rank),
            optimizer=SimpleNamespace(
                step=lambda overflow: found.extend(draws()), zero_grad=lambda: None
            ),
            loss_scale=None,
            average=None,
            averaged=torch.enable_grad,
            evaluated=False,
            time_limit=None,
            best=None,
        )
        randomness.seed(rank)  # as if the forward pass had drawn other numbers
        loop.update(session, SimpleNamespace(), step)  # type: ignore[arg-type]
        progress: Any = SimpleNamespace(evaluation=lambda *given: None)
        loop.validate(session, progress, TrainProgress(step + 1))
        return found

    with randomness.apart():
        assert drawn(7, 0) == drawn(7, 1) != drawn(8, 0)
        assert drawn(7, 1) and measured[-1] == measured[1] not in (measured[0], measured[2])


def in_training(
    run: rundir.RunDir, plan: Any, ranks: int, patch: pytest.MonkeyPatch
) -> list[list[float]]:
    """The only sample for training and the one for validation, in a rank."""
    decided: dict[str, Any] = {"precision": "fp32", "compile": False}
    plan = plan | {name: {"value": value} for name, value in decided.items()}
    plan |= {"batch": Batch(1, 1, ranks, 1).record(), "place": {"kind": "", "nnodes": 1}}
    patch.setattr(train_state.ddp_model, "wrap", lambda raw, *given: raw)
    patch.setattr(train_state.next_command, "next_command", lambda *given: "")
    patch.setattr(train_state, "plan_length", lambda *given, **more: TrainingLength(1, 1, 1))
    randomness.seed(plan["config"]["seed"])  # as training.trainer.worker does
    task = tasks.make(plan, CPU, None)
    session = train_state.begin(plan, run, World(0, 0, ranks, CPU, "none", "-"), task)
    assert session.validation
    return [data.rows([0])[0][0].tolist() for data in (session.batches.dataset, session.validation)]  # type: ignore[attr-defined]


def test_an_evaluation_draws_as_the_training_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in another process, for a task that draws when its file is run, and with the same sets
    as the ranks."""
    file = tmp_path / "split.py"
    file.write_text(SPLIT)
    run = rundir.RunDir(tmp_path / "run")
    run.create()
    config = {name: value for name, value in vars(Config(seed=5)).items() if value is not None}
    task = {"name": "split", "unit": "samples", "file": str(file), "options": {}}
    rundir.write_json(run.plan, {"schema_version": 1, "config": config, "task": task})
    with randomness.apart():
        model = torch.nn.Linear(1, 1)
        checkpoint(run, model.state_dict(), {}, 3)
        command = [sys.executable, "-m", "training.cli.evaluate", str(run.path), "--json"]
        found = [
            json.loads(
                subprocess.run(
                    command, cwd=ROOT, env=clean_environment(), capture_output=True, check=True
                ).stdout
            )["evaluations"][0]
            for _ in range(2)
        ]
        assert found[0] == found[1]
        show = "print(ord(next(iter({chr(number) for number in range(97, 123)}))))"
        shown = subprocess.run(
            [sys.executable, "-c", show],
            env=clean_environment(PYTHONHASHSEED="0"),
            capture_output=True,
            check=True,
        )
        assert found[0]["set"] == int(shown.stdout)
        again = rundir.RunDir(tmp_path / "again")
        again.create()
        plan = {"config": config, "task": task}
        alone, three = (in_training(again, plan, ranks, monkeypatch) for ranks in (1, 3))
    evaluated = [found[0][str(place)] for place in range(5)]
    for drawn in (*alone, *three):
        assert drawn == pytest.approx(evaluated)

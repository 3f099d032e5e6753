"""The model in DDP as the trainer wraps it."""

from __future__ import annotations

import copy
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from training.config.batch import Batch
from training.config.schema import Config
from training.core.errors import UserError
from training.inspector.distributed import World
from training.tasks.base import Task
from training.tasks.optim import Optimizers
from training.trainer import ddp_model

PLAN: Any = {
    "compile": {"value": False},
    "static_graph": {"value": False},
    "config": {"find_unused_parameters": False},
}
WORLD = World(0, 0, 2, torch.device("cpu"), "gloo", "-")
LOGGED = 10  # first steps, by torch


class Averaged(nn.Module):
    """`forward` changes state that no gradient does."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.teacher = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
        for name in ("passes", "center", "first"):
            self.register_buffer(name, None if name == "first" else torch.zeros(1))
        self.passes: torch.Tensor
        self.center: torch.Tensor
        self.first: torch.Tensor | None
        self.seen: list[int] = []

    def get_extra_state(self) -> dict[str, list[int]]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, list[int]]) -> None:
        self.seen = state["seen"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.line(x)
        with torch.no_grad():
            self.passes += 1
            self.center = 0.9 * self.center + 1
            self.first = found.mean() if self.first is None else self.first
            self.teacher.weight.mul_(0.9)
            assert self.teacher.bias is not None
            self.teacher.bias.data = self.teacher.bias * 0.9 + 1
        self.seen.append(len(x))
        return found


class Mean(Task):
    """Notes the batches of its loss."""

    def model(self) -> nn.Module:
        return Averaged()

    def train_data(self) -> Dataset[Any]:
        return Numbered()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.options.seen.append(batch)
        return model(batch[0]).mean()


class Numbered(Dataset[Any]):
    """The number of a sample, and the process that read it."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), float(index)), os.getpid()


def settled(model: nn.Module, *, size: int = 2, workers: int = 0) -> Any:
    """The batch of a first pass."""
    task = Mean(SimpleNamespace(seen=[]), Config(), torch.device("cpu"))
    rows, eager = task.rows("train"), torch.autocast("cpu", torch.bfloat16, enabled=False)
    assert rows
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = Optimizers([torch.optim.SGD(weights, lr=0.1)])
    batch = Batch(size, 1, 3, 1)
    ddp_model.settle_buckets(model, task, eager, optimizer, rows, batch, workers)
    assert all(weight.grad is None for weight in model.parameters())
    (seen,) = task.options.seen
    return seen


def test_the_first_pass_reads_no_sample_in_a_rank_with_workers() -> None:
    """Its workers would share a file that the data set opens at its first access."""
    assert settled(Averaged())[1].unique().tolist() == [os.getpid()]
    (reader,) = settled(Averaged(), workers=2)[1].unique().tolist()
    assert reader != os.getpid() and not multiprocessing.active_children()


def test_the_first_pass_leaves_the_model_as_it_was() -> None:
    model = Averaged()
    before, tensors = copy.deepcopy(model.state_dict()), {id(b) for b in model.buffers()}
    settled(model)
    after = model.state_dict()
    extra = [states.pop("_extra_state") for states in (before, after)]
    assert extra == [{"seen": []}] * 2 and before.keys() == after.keys()
    assert [name for name, was in before.items() if not torch.equal(was, after[name])] == []
    assert {id(b) for b in model.buffers()} == tensors, "those that DDP sends"


def test_the_first_pass_has_different_samples() -> None:
    """A contrastive loss has no value for copies of one."""
    assert settled(Averaged())[0].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert settled(Averaged(), size=4)[0][:, 0].tolist() == [0.0, 1.0, 2.0, 0.0]


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_sparse_gradients_are_refused_on_several_gpus() -> None:
    task: Any = None
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(3, 2, sparse=True),
            "bags": nn.EmbeddingBag(3, 2, sparse=True),
            "fixed": nn.Embedding(3, 2, sparse=True).requires_grad_(False),
            "dense": nn.Embedding(3, 2),
            "attention": nn.Linear(2, 2),
        }
    )
    model["attention"].sparse = True  # a name of the user's own
    with pytest.raises(UserError) as caught:
        ddp_model.wrap(model, task, PLAN, replace(WORLD, backend="nccl"))
    (problem,) = caught.value.problems
    assert problem.code == "task.sparse" and "in words, bags: NCCL" in problem.what
    assert isinstance(ddp_model.wrap(model, task, PLAN, WORLD), DistributedDataParallel), "gloo"
    with pytest.raises(UserError) as caught:
        ddp_model.wrap(model["words"], task, PLAN, replace(WORLD, backend="nccl"))
    assert "in Embedding: NCCL" in caught.value.problems[0].what


@pytest.mark.usefixtures("group")
def test_no_later_step_is_timed_by_the_logger_of_ddp() -> None:
    task: Any = None
    model = ddp_model.wrap(torch.nn.Linear(1, 1), task, PLAN, WORLD)
    assert isinstance(model, DistributedDataParallel)
    for _ in range(102):
        model(torch.ones(1, 1)).sum().backward()
    # of the newest step timed; on a GPU the host waits for each of them
    assert model._get_ddp_logging_data()["iteration"] == LOGGED

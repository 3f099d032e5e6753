"""The model in DDP as the trainer wraps it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from training.inspector.distributed import World
from training.trainer import ddp_model

PLAN: Any = {
    "compile": {"value": False},
    "static_graph": {"value": False},
    "config": {"find_unused_parameters": False},
}
WORLD = World(0, 0, 2, torch.device("cpu"), "gloo", "-")
LOGGED = 10  # first steps, by torch


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_no_later_step_is_timed_by_the_logger_of_ddp() -> None:
    task: Any = None
    model = ddp_model.wrap(torch.nn.Linear(1, 1), task, PLAN, WORLD)
    assert isinstance(model, DistributedDataParallel)
    for _ in range(102):
        model(torch.ones(1, 1)).sum().backward()
    # of the newest step timed; on a GPU the host waits for each of them
    assert model._get_ddp_logging_data()["iteration"] == LOGGED

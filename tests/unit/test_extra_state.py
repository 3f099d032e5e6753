"""Extra states of modules among the weights, and sparse tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from training.inspector.distributed import World
from training.tasks import trained
from training.trainer import host_copy, start_weights


def test_a_dictionary_of_other_things_is_not_weights() -> None:
    one = torch.ones(1)
    assert trained.named_tensors({"w": one, "a._extra_state": {"n": 1}}, False) is not None
    assert trained.named_tensors({"w": one, "extra_state": {"n": 1}}, False) is None


def test_the_size_of_a_sparse_tensor_is_an_upper_bound() -> None:
    assert host_copy.size({"a": torch.eye(4).to_sparse(), "b": [torch.ones(2)]}) == 72


class Seen(torch.nn.Linear):
    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_every_rank_starts_with_the_extra_states_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After --init_from, which only rank 0 reads."""
    sent: list[str] = []

    def from_main(key: str, value: str | None = None, waiting: Any = None) -> str:
        sent.extend([value] if value is not None else [])
        return sent[-1]

    monkeypatch.setattr(start_weights, "from_main", from_main)
    models = [torch.nn.Sequential(Seen(2, 2)) for _ in range(2)]
    models[0][0].seen = 7
    weight = models[1][0].weight.clone()
    for rank, model in enumerate(models):
        world = World(rank, rank, 2, torch.device("cpu"), "gloo", "-")
        start_weights._share_extra_states(model, world)
    assert [model[0].seen for model in models] == [7, 7]
    assert torch.equal(models[1][0].weight, weight) and len(sent) == 1
    world = World(1, 1, 2, torch.device("cpu"), "gloo", "-")
    start_weights._share_extra_states(torch.nn.Linear(2, 2), world)
    assert len(sent) == 1

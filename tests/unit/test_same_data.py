"""Comparison of the training data between machines."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.core.errors import UserError
from training.inspector.distributed import World
from training.trainer import same_data
from training.trainer.checkpoint import TrainProgress


class Task:
    def __init__(self, data: object) -> None:
        self.data = data

    def same_data(self, saved: dict[str, Any]) -> bool:
        return bool(saved["data"] == self.data)


@pytest.mark.parametrize(
    ("rank_0", "here", "others", "differs"),
    [
        ("a", "a", ["", "host", ""], False),
        ("a", "b", ["", "host", "host"], True),
        ((1, 2), (1, 2), ["host", "host", "host"], False),  # JSON changes it: not comparable
    ],
)
def test_machines_with_other_data_are_named(
    monkeypatch: pytest.MonkeyPatch, rank_0: object, here: object, others: list[str], differs: bool
) -> None:
    """A rank other than 0; `others`: what the ranks report if this one differs."""
    sent: list[str] = []

    def exchange(key: str, text: str, *, everybody: bool) -> list[str]:
        sent.append(text)
        return others if text else [""] * len(others)

    first = json.dumps({"data": rank_0, "tokenizer": "bytes"})
    monkeypatch.setattr(same_data, "from_main", lambda key, value: first)
    monkeypatch.setattr(same_data, "exchange_texts", exchange)
    facts: Any = {"data": here, "tokenizer": "bytes"}
    task: Any = Task(here)
    if differs:
        with pytest.raises(UserError) as raised:
            same_data.check(task, facts)
        assert [p.code for p in raised.value.problems] == ["data.differs"]
        assert "host" in str(raised.value)
    else:
        same_data.check(task, facts)
    assert bool(sent[0]) == (json.loads(first)["data"] != here)


@pytest.mark.parametrize(
    ("saved", "used", "left"),
    [({"samples": 100}, 60, 60), ({"samples": 150}, 60, 0), ({"samples": 150}, 0, 0), ({}, 60, 60)],
)
def test_another_number_of_samples_begins_the_epoch_again(
    saved: Any, used: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its order is another one: some samples would come twice and others not at all."""
    warned: list[str] = []
    monkeypatch.setattr(same_data.log, "warning", warned.append)
    position = TrainProgress(7, 1, used, 700)
    task: Any = SimpleNamespace(unit="samples")
    found = same_data.same_order(
        position, saved, {"samples": 100}, task, World(0, 0, 1, torch.device("cpu"), "none", "")
    )
    assert found == TrainProgress(7, 1, left, 700) and len(warned) == (left != used)

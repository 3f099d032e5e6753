"""Comparison of the training data between machines."""

from __future__ import annotations

import json
import socket
from typing import Any, cast

import pytest
import torch

from tests.cases import each
from training.config.batch import Batch
from training.core.errors import Exit, UserError
from training.inspector.distributed import World
from training.trainer import same_data
from training.trainer.checkpoint import TrainProgress


class Task:
    unit = "samples"

    def __init__(self, data: object) -> None:
        self.data = data

    def same_data(self, saved: dict[str, Any]) -> bool:
        return bool(train(saved["data"]) == train(self.data))


def train(data: Any) -> object:
    return data["train"] if isinstance(data, dict) else data


PARTS = {"train": "a", "val": "v"}


@pytest.mark.parametrize(
    ("rank_0", "here", "others", "differs"),
    [
        ("a", "a", ["", "host", ""], False),
        ("a", "b", ["", "host", "host"], True),
        (PARTS, PARTS | {"val": "w"}, ["", "host", "host"], True),
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


@each(
    "rank_0, here, data, codes",
    [
        ("a", "a", "same", []),
        ("a", "b", "same", ["task.differs"]),
        ("a", None, "same", ["task.differs"]),
        (None, None, "same", []),
        ("a", "b", "other", ["data.differs", "task.differs"]),
    ],
)
def test_machines_with_another_task_file_are_named(
    rank_0: str | None,
    here: str | None,
    data: str,
    codes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def facts(sha256: str | None, data: str) -> Any:
        return {"data": data, "tokenizer": None, **({"task_sha256": sha256} if sha256 else {})}

    first = json.dumps(facts(rank_0, "same"))
    monkeypatch.setattr(same_data, "from_main", lambda key, value: first)
    monkeypatch.setattr(same_data, "exchange_texts", lambda key, text, everybody: ["", text])
    task: Any = Task(data)
    found = []
    try:
        same_data.check(task, facts(here, data))
    except UserError as error:
        found = [p.code for p in error.problems]
        assert all(socket.gethostname() in p.what for p in error.problems)
    assert found == codes


@each(
    "others, named",
    [([10, 10], []), ([10, 7], [2]), ([None, 10], [1]), ([None, None], [1, 2]), ([0, 10], [1])],
)
def test_ranks_with_another_number_of_samples_are_named(
    others: list[int | None], named: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`others`: the samples of ranks 1 and 2; rank 0 has 10."""
    texts = [json.dumps([f"host{i}", n]) for i, n in enumerate(others, 1)]
    monkeypatch.setattr(same_data, "exchange_texts", lambda key, own, everybody: [own, *texts])
    data: Any = range(10)
    try:
        assert same_data.counted(cast("Any", Task("a")), "val", data) is data and not named
    except UserError as error:
        (problem,) = error.problems
        assert (problem.code, error.code) == ("data.differs", Exit.CONFIG)
        assert "val_data()" in problem.what and socket.gethostname() in problem.what
        assert [i for i in (1, 2) if f"rank {i} on host{i}" in problem.what] == named


@each(
    "saved, used, reported, left, warns",
    [
        ({}, 60, False, 60, False),
        ({"samples": 150}, 60, False, 0, True),
        ({"samples": 150}, 0, False, 0, False),
        ({"data": "b"}, 60, False, 0, True),
        ({"data": "b"}, 0, False, 0, False),
        ({"data": "b", "samples": 150}, 60, True, 0, False),  # reported when it was prepared
        ({"seed": 42}, 60, True, 60, False),
        ({"seed": 7}, 60, True, 0, True),
        # no whole step is left: the epoch has ended, and does not begin again
        ({"seed": 7}, 97, True, 100, False),
        ({"samples": 63}, 60, False, 100, False),
        ({"samples": 64}, 60, False, 0, True),
        ({"data": "b"}, 97, False, 100, False),
    ],
)
def test_another_order_begins_the_epoch_again(
    saved: Any, used: int, reported: bool, left: int, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some samples would come twice and others not at all."""
    warned: list[str] = []
    monkeypatch.setattr(same_data.log, "warning", warned.append)
    task: Any = Task("a")
    found = same_data.same_order(
        TrainProgress(7, 1, used, 700),
        {"data": "a", "used": used} | saved,
        {"samples": 100, "seed": 42},
        task,
        Batch(4, 1, 1, 1),
        World(0, 0, 1, torch.device("cpu"), "none", ""),
        reported=reported,
    )
    assert found == TrainProgress(7, 1, left, 700) and len(warned) == warns

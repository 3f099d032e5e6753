"""The bytes of a checkpoint between machines."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import each
from training.core.errors import Exit, UserError
from training.inspector.distributed import World
from training.trainer import checkpoint
from training.trainer import checkpoint_transfer as transfer
from training.trainer.checkpoint import LoadedCheckpoint, TrainProgress


def sample_state() -> dict[str, Any]:
    """Types, shapes and layouts of models and optimizers, more than a chunk in all."""
    torch.manual_seed(1)
    model = OrderedDict(
        weight=torch.randn(33, 17),
        turned=torch.randn(8, 5).t(),
        half=torch.randn(7, 3).bfloat16(),
        flags=torch.tensor([True, False, True]),
        none=torch.empty(0, 4),
    )
    model._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    moments = {i: {"step": torch.tensor(float(i)), "exp_avg": torch.randn(9)} for i in range(40)}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1], "name": None}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


def through(
    state: dict[str, Any], change: int | None = None
) -> tuple[dict[str, Any], bool, list[int]]:
    """(received state, equal checksums, sizes of the chunks). `change`: chunk with a flipped bit."""
    wire: list[torch.Tensor] = []
    sent = transfer.send(
        [transfer._flat(t) for t in transfer._tensors(state)],
        lambda chunk: wire.append(chunk.clone()),
    )
    if change is not None:
        wire[change][0] ^= 1
    chunks = iter(wire)

    def arrive(chunk: torch.Tensor) -> None:
        chunk.copy_(next(chunks))

    received = transfer._empty(transfer._form(state))
    found = transfer.receive(
        [transfer._flat(t) for t in transfer._tensors(received)],
        arrive,
    )
    return received, found == sent, [len(chunk) for chunk in wire]


def test_a_state_arrives_bit_for_bit_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 1000)
    state = sample_state()
    received, equal, sizes = through(state)
    assert equal
    assert set(sizes[:-1]) == {1000} and 0 < sizes[-1] <= 1000
    pairs = zip(transfer._tensors(state), transfer._tensors(received), strict=True)
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)
    assert received["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert list(received["model"]) == list(state["model"])
    assert received["model"]._metadata == state["model"]._metadata


def test_sparse_tensors_and_those_that_consist_of_others_arrive() -> None:
    small = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit.zeros((16, 16))
    small.codes.fill_(3)
    received, equal, _ = through({"s": torch.eye(3).to_sparse(), "m": small, "w": torch.ones(2)})
    assert equal and torch.equal(received["s"].to_dense(), torch.eye(3))
    assert type(received["m"]) is type(small) and (received["m"].codes == 3).all()
    assert received["w"].tolist() == [1, 1]


def test_a_flipped_bit_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 1000)
    assert not through(sample_state(), change=1)[1]


def test_a_state_without_tensors_needs_no_broadcast() -> None:
    assert through({"model": {}, "optimizer": []})[1:] == (True, [])


def read(step: int | None, *skipped: str) -> LoadedCheckpoint | None:
    if step is None:
        return None
    facts: Any = {}
    return LoadedCheckpoint(TrainProgress(step), {}, facts, Path(f"step_{step}"), [*skipped])


@each(
    "first, second",
    [
        (read(20), read(20)),
        (None, None),
        (read(20), read(10, "step_20: Input/output error")),
        (read(10, "step_20: Input/output error"), read(20)),
        (read(10), None),
        (None, read(10)),
    ],
)
def test_ranks_of_one_machine_use_the_same_checkpoint(
    first: LoadedCheckpoint | None,
    second: LoadedCheckpoint | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk may return an error to one of them."""
    store: list[str] = []

    def from_main(key: str, value: str | None = None, waiting: Any = None) -> str:
        store.extend([] if value is None else [value])
        return store[-1]

    def load(rank: int, found: LoadedCheckpoint | None) -> LoadedCheckpoint | None:
        monkeypatch.setattr(checkpoint, "latest", lambda *_: found)
        world = World(rank, rank, 2, torch.device("cpu"), "gloo", "-")
        return transfer.load(Path(), world, one_machine=True)

    monkeypatch.setattr(transfer, "from_main", from_main)
    assert load(0, first) is first
    if (first and first.path) == (second and second.path):
        assert load(1, second) is second
        return
    with pytest.raises(transfer.TransferError) as caught:
        load(1, second)
    skipped = [text for one in (first, second) if one for text in one.skipped]
    assert str(caught.value).split("; ")[1:] == skipped


def test_ranks_do_not_wait_for_a_first_one_without_an_intact_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = json.dumps({"failed": int(Exit.RESOURCES)})
    monkeypatch.setattr(transfer, "from_main", lambda *_, **__: failed)
    monkeypatch.setattr(checkpoint, "latest", lambda *_: read(10))
    world = World(1, 1, 2, torch.device("cpu"), "gloo", "-")
    with pytest.raises(UserError) as caught:
        transfer.load(Path(), world, one_machine=True)
    assert caught.value.said_by_another and caught.value.code == Exit.RESOURCES

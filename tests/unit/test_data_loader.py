"""Batches: every rank its own sequences, the same number for all, and the same again after a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from training.data.loader import EpochSampler, TokenDataset, train_loader

SEQ = 8


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """103 tokens that say where they stand: 12 sequences of 8, and a rest."""
    path = tmp_path / "train.bin"
    np.arange(103, dtype="<u2").tofile(path)
    return path


def sampled(size: int, world: int, rank: int, *, seed: int = 1, epoch: int = 0, start: int = 0) -> list[int]:
    dataset = range(size)
    sampler = EpochSampler(dataset, world, rank, shuffle=True, seed=seed, drop_last=True)  # type: ignore[arg-type]
    sampler.set_epoch(epoch, start)
    return list(sampler)


def batches(
    shard: Path, *, rank: int = 0, world: int = 1, batch: int = 2, epoch: int = 0, start: int = 0, workers: int = 0
) -> list[list[int]]:
    """The first token of each sequence, a list for each batch."""
    loader, sampler = train_loader(
        TokenDataset(shard, SEQ), rank=rank, world_size=world, batch=batch, seed=3, workers=workers, persistent=False, pin=False
    )
    sampler.set_epoch(epoch, start)
    return [inputs[:, 0].tolist() for inputs, _ in loader]


def test_a_sequence_and_its_targets(shard: Path) -> None:
    dataset = TokenDataset(shard, SEQ)
    assert len(dataset) == 12
    inputs, targets = dataset[1]
    assert inputs.tolist() == list(range(8, 16))
    assert targets.tolist() == list(range(9, 17))
    assert inputs.dtype == targets.dtype == torch.int64
    inputs, targets = dataset.batch([11, 0])
    assert inputs.shape == targets.shape == (2, SEQ)
    assert inputs[0].tolist() == list(range(88, 96))
    assert targets[0, -1] == 96
    again = dataset.__getitems__([11, 0])
    assert torch.equal(again[0], inputs) and torch.equal(again[1], targets)


@pytest.mark.parametrize(("tokens", "sequences"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_the_last_target_must_be_there_too(tokens: int, sequences: int, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    np.arange(tokens, dtype="<u2").tofile(path)
    dataset = TokenDataset(path, SEQ)
    assert len(dataset) == sequences
    for index in range(sequences):
        inputs, targets = dataset[index]
        assert len(inputs) == len(targets) == SEQ


def test_tokens_are_not_signed(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    np.full(9, 65535, dtype="<u2").tofile(path)
    assert TokenDataset(path, SEQ)[0][0].tolist() == [65535] * 8


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8, 13])
@pytest.mark.parametrize("size", [0, 1, 5, 8, 100, 101])
def test_ranks_are_disjoint_and_equal_in_number(world: int, size: int) -> None:
    parts = [sampled(size, world, rank) for rank in range(world)]
    assert {len(p) for p in parts} == {size // world}
    everything = [i for p in parts for i in p]
    assert len(set(everything)) == len(everything), "no sequence twice"
    assert set(everything) <= set(range(size))
    assert size - len(everything) < world, "no more than the rest is left out"


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    first = sampled(100, 2, 0, seed=1, epoch=0)
    assert sampled(100, 2, 0, seed=1, epoch=0) == first
    assert sampled(100, 2, 0, seed=1, epoch=1) != first
    assert sampled(100, 2, 0, seed=2, epoch=0) != first
    assert sampled(100, 2, 1, seed=1, epoch=0) != first
    assert first != sorted(first)
    torch.manual_seed(5)
    torch.rand(3)
    assert sampled(100, 2, 0, seed=1, epoch=0) == first


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("start", [0, 1, 7, 20, 99, 1000])
def test_a_resumed_epoch_goes_on_exactly_where_it_stopped(world: int, start: int) -> None:
    for rank in range(world):
        whole = sampled(100, world, rank, epoch=4)
        assert sampled(100, world, rank, epoch=4, start=start) == whole[start:]


def test_the_next_epoch_starts_at_its_beginning() -> None:
    sampler = EpochSampler(range(10), 1, 0, shuffle=True, seed=1, drop_last=True)  # type: ignore[arg-type]
    sampler.set_epoch(0, 4)
    assert len(list(sampler)) == 6
    sampler.set_epoch(1)
    assert len(list(sampler)) == 10


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch", [1, 2])
def test_batches_of_all_ranks(world: int, batch: int, shard: Path) -> None:
    parts = [batches(shard, rank=rank, world=world, batch=batch) for rank in range(world)]
    assert {len(p) for p in parts} == {12 // world // batch}
    firsts = [token for p in parts for b in p for token in b]
    assert len(set(firsts)) == len(firsts)
    assert all(token % SEQ == 0 for token in firsts)


def test_a_short_last_batch_is_left_out(shard: Path) -> None:
    assert [len(b) for b in batches(shard, batch=5)] == [5, 5]


def test_batches_after_a_resume(shard: Path) -> None:
    whole = batches(shard, epoch=1)
    assert batches(shard, epoch=1, start=4) == whole[2:]
    assert batches(shard, epoch=2) != whole


def test_workers_change_nothing(shard: Path) -> None:
    assert batches(shard, epoch=1, workers=2) == batches(shard, epoch=1)


def test_persistent_workers_see_each_epoch_s_order(shard: Path) -> None:
    loader, sampler = train_loader(TokenDataset(shard, SEQ), rank=0, world_size=1, batch=2, seed=3, workers=1, persistent=True, pin=False)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert [inputs[:, 0].tolist() for inputs, _ in loader] == batches(shard, epoch=epoch)


def test_an_iterator_does_not_shift_the_global_random_state(shard: Path) -> None:
    before = torch.get_rng_state()
    batches(shard)
    batches(shard, workers=1)
    assert torch.equal(torch.get_rng_state(), before)

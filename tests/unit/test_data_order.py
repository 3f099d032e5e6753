"""Order of an epoch: every sequence once, well mixed, available at once for any length."""

from __future__ import annotations

import math
import time
from collections import Counter

import numpy as np
import pytest

from tests.cases import each
from training.data.permutation import EpochPermutation, digest


def whole(count: int, seed: int = 1, epoch: int = 0) -> list[int]:
    return EpochPermutation(count, seed, epoch).indices(0, count).tolist()


@each("count", [*range(1, 70), 127, 128, 129, 1000, 4096, 65_537])
def test_every_sequence_once(count: int) -> None:
    for seed, epoch in ((0, 0), (1337, 3), ((1 << 63) - 1, 10**6)):
        assert sorted(whole(count, seed, epoch)) == list(range(count))


def test_an_empty_epoch() -> None:
    assert whole(0) == []


@pytest.mark.parametrize("count", [(1 << 33) + 12_345, 1 << 34, (1 << 40) - 1])
def test_more_sequences_than_fit_32_bits(count: int) -> None:
    found = EpochPermutation(count, 7, 3).indices(count - 50_000, count)
    assert found.dtype == np.int64
    assert len(set(found.tolist())) == 50_000
    assert found.min() >= 0 and found.max() < count
    assert found.max() > count * 0.99, "the whole range is used"


def test_any_range_matches_the_whole_order() -> None:
    order = EpochPermutation(1000, 5, 2)
    everything = order.indices(0, 1000)
    assert order.indices(17, 423).tolist() == everything[17:423].tolist()
    assert order.indices(990, 2000).tolist() == everything[990:].tolist()
    assert order.indices(1000, 1010).tolist() == order.indices(5, 5).tolist() == []
    positions = np.array([[999, 0], [3, 3]])
    assert order.at(positions).tolist() == everything[positions].tolist()


def test_it_depends_on_seed_epoch_and_count_only() -> None:
    first = whole(5000)
    assert whole(5000) == first
    for other in (whole(5000, seed=2), whole(5000, epoch=1), list(range(5000))):
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 15  # 1 by chance


def test_the_order_is_stable_between_versions() -> None:
    # A run resumed with a newer version must see the same order.
    assert whole(10, 1337) == [4, 5, 6, 8, 2, 3, 1, 0, 7, 9]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_all_orders_of_few_sequences_are_equally_likely(count: int) -> None:
    rounds, ways = 6000, math.factorial(count)
    found = Counter(tuple(whole(count, seed)) for seed in range(rounds))
    chi2 = sum((found[way] - rounds / ways) ** 2 / (rounds / ways) for way in found)
    assert len(found) == ways
    assert chi2 < ways - 1 + 5 * math.sqrt(2 * ways)


@each("count", [1000, 10_000, 99_991, 1 << 18])
@each("seed", [0, 1, 2])
def test_neighbours_are_separated(count: int, seed: int) -> None:
    order, places = np.array(whole(count, seed)), np.arange(count)
    limit = 5 / math.sqrt(count)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < limit
    assert abs(np.corrcoef(order, places)[0, 1]) < limit
    assert (np.abs(np.diff(order)) == 1).sum() < 15  # 2 by chance
    assert (order == places).sum() < 12  # 1 by chance
    assert max(Counter(np.diff(order).tolist()).values()) < 20, "no step size is frequent"
    assert abs(np.corrcoef(order, whole(count, seed, epoch=1))[0, 1]) < limit


def test_each_batch_is_drawn_from_the_whole_data() -> None:
    # 256 batches of 256 from 16 parts of the data: as even as random.
    parts = np.array(whole(1 << 16)).reshape(256, 256) // (1 << 12)
    counts = np.stack([np.bincount(row, minlength=16) for row in parts])
    chi2 = ((counts - 16) ** 2 / 16).sum()
    freedom = 256 * 15
    assert abs(chi2 - freedom) < 6 * math.sqrt(2 * freedom)


def test_fifty_million_sequences_start_at_once() -> None:
    started = time.process_time()
    EpochPermutation(50_000_000, 1, 0).indices(25_000_000, 25_004_096)
    assert time.process_time() - started < 0.5  # a permutation takes seconds


def test_digests_prove_that_parts_are_disjoint_and_complete() -> None:
    order = np.array(whole(5000))
    total = digest(np.arange(5000))
    assert digest(order) == total
    assert sum(digest(part) for part in np.array_split(order, 7)) % (1 << 64) == total
    assert digest([]) == 0 and 0 < total < 1 << 64
    twice = order.copy()
    twice[0] = twice[1]
    assert digest(twice) != total
    assert digest([1, 4]) != digest([2, 3]), "not a plain sum"
    assert digest(order.reshape(50, 100)) == total

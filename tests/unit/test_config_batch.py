"""Batch arithmetic: divisible batches and the nearest ones."""

from __future__ import annotations

import random

import pytest

from training.config.batch import Batch, device_choices, divisors, repairs, split


def test_shipped_batches_need_no_accumulation_on_two_gpus() -> None:
    for device, seq, total in ((8, 1536, 24576), (12, 2048, 49152), (14, 3072, 86016)):
        assert split(device, seq, 2, total) == Batch(device, seq, 2, 1)


def test_the_sizes_of_a_step() -> None:
    batch = split(8, 1536, 2, 98304)
    assert batch == Batch(device_sequences=8, seq_len=1536, world_size=2, accumulation=4)
    assert (batch.micro_tokens, batch.total_tokens) == (24576, 98304)
    assert (
        batch.sentence()
        == "8 sequences × 1536 tokens × 2 ranks × 4 accumulation steps = 98304 tokens per step"
    )
    assert (
        Batch(8, 16, 1, 1).sentence()
        == "8 sequences × 16 tokens × 1 rank × 1 accumulation step = 128 tokens per step"
    )


@pytest.mark.parametrize("total", [0, 1, 24575, 24577, 12288, 36864])
def test_an_indivisible_total_has_no_batch(total: int) -> None:
    assert split(8, 1536, 2, total) is None


def test_divisors() -> None:
    assert divisors(1) == [1]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(97) == [1, 97]
    for number in range(1, 400):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_device_choices_are_exactly_the_sizes_that_divide() -> None:
    assert device_choices(1536, 2, 24576) == [1, 2, 4, 8]
    assert device_choices(1536, 3, 24576) == []
    assert device_choices(1536, 2, 1000) == []
    for total in (24576, 30720, 3072, 3073, 9216):
        expected = [d for d in range(1, 100) if split(d, 1536, 2, total)]
        assert device_choices(1536, 2, total) == expected


def test_repairs_of_common_mistakes() -> None:
    # Device batch 16 with a total for 12.
    assert repairs(16, 2048, 2, 49152) == [("total_batch_size", 65536), ("device_batch_size", 12)]
    # 5 ranks.
    assert repairs(8, 1536, 5, 24576) == [("total_batch_size", 61440)]
    # Equally near below and above: the smaller first.
    assert repairs(4, 8, 1, 48) == [
        ("total_batch_size", 32),
        ("total_batch_size", 64),
        ("device_batch_size", 3),
    ]


def test_repairs_are_divisible_and_nearest_first() -> None:
    chance = random.Random(7)
    seen = 0
    for _ in range(3000):
        device, seq, ranks = (
            chance.randint(1, 64),
            chance.choice([8, 100, 128, 1000, 1536, 2048]),
            chance.randint(1, 16),
        )
        total = chance.choice([chance.randint(1, 300_000), seq * ranks * chance.randint(1, 99)])
        if split(device, seq, ranks, total):
            continue
        seen += 1
        found = repairs(device, seq, ranks, total)
        totals = [v for name, v in found if name == "total_batch_size"]
        devices = [v for name, v in found if name == "device_batch_size"]
        assert found == [("total_batch_size", t) for t in totals] + [
            ("device_batch_size", d) for d in devices
        ]
        assert totals, "a divisible total always exists"
        assert all(t > 0 and split(device, seq, ranks, t) for t in totals)
        distances = [abs(t - total) for t in totals]
        assert distances == sorted(distances)
        # No divisible total in between.
        micro = device * seq * ranks
        assert distances[0] == min(abs(k * micro - total) for k in range(1, total // micro + 2))
        assert all(split(d, seq, ranks, total) for d in devices)
        if devices:
            nearest = min(abs(d - device) for d in device_choices(seq, ranks, total))
            assert abs(devices[0] - device) == nearest
    assert seen > 1000

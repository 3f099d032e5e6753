"""Formatting of counts and sizes."""

from __future__ import annotations

from training.config.batch import Batch
from training.core.messages import msg
from training.core.units import millions, percent, plural, significant, size


def test_one_and_many() -> None:
    assert [plural(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert plural(2, "batch", "batches") == "2 batches"
    assert (
        Batch(1, 128, 1, 1).sentence()
        == "1 sequence × 128 tokens × 1 rank × 1 accumulation step = 128 tokens per step"
    )


def test_small_values_are_not_rounded_to_zero() -> None:
    less = msg("core.units.below", bound="0.1 %")
    assert [percent(n) for n in (0, 0.04, 0.1, 41.26)] == ["0.0 %", less, "0.1 %", "41.3 %"]
    assert [size(n) for n in (0, 1, 999, 1500, 512_000, 5_000_000, 34_000_000, 2.5e9)] == [
        *("0 bytes", "1 byte", "999 bytes", "1.5 kB", "512 kB", "5.0 MB", "34 MB", "2.5 GB"),
    ]
    assert [millions(n) for n in (321, 99_999, 450_000, 25_400_000)] == [
        "321",
        "99,999",
        "0.45 M",
        "25.40 M",
    ]


def test_figures_have_an_exponent_only_where_they_are_very_large_or_small() -> None:
    figures = (0.0, 0.0041174, 29.8312, 9999.4, 9999.6, -12345.6, 4e8, 4e9, 4e-7)
    assert [significant(figure) for figure in figures] == [
        *("0", "0.004117", "29.83", "9999", "10000", "-12346", "400000000", "4e+09", "4e-07"),
    ]

"""The stage of `make gpu` that recovers from out of memory."""

from __future__ import annotations

from benchmarks.gpu import recovery


def test_batches_of_restarts_in_words() -> None:
    assert recovery.sizes([[8, 4]]) == "8 → 4"
    assert recovery.sizes([[8, 4], None, [4, 2]]) == "8 → 4, unchanged, 4 → 2"

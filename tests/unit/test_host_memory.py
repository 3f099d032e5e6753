"""The memory formula against known figures and against the model itself."""

from __future__ import annotations

import pytest

from training.host.memory import GIB, Estimate, estimate, gib, parameters


@pytest.mark.parametrize(
    ("depth", "sequences", "seq_len", "compiled", "gb_65536", "gb_32768"),
    [
        (12, 8, 1536, True, 9.2, 7.5),
        (16, 12, 2048, True, 24.6, 21.8),
        (20, 14, 3072, True, 58, 54),
        (12, 8, 1536, False, 18.2, 12.1),
        (16, 12, 2048, False, 43.9, 32.0),
        (20, 14, 3072, False, 94, 74),
    ],
)
def test_the_figures_of_the_three_configs(
    depth: int, sequences: int, seq_len: int, compiled: bool, gb_65536: float, gb_32768: float
) -> None:
    # Worked out independently for two usual vocabularies, without weight copies.
    for vocab, expected in ((65536, gb_65536), (32768, gb_32768)):
        found = estimate(depth, sequences, seq_len, bf16=True, compiled=compiled, vocab=vocab)
        ours = (found.total - found.weight_copies) / 1e9
        if compiled:
            assert ours == pytest.approx(expected, rel=0.05)
        else:  # on the safe side, not by much
            assert expected <= ours <= 1.25 * expected


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_number_of_weights_is_the_model_s(depth: int) -> None:
    from training.data.tokenizer import PADDED_VOCAB
    from training.engine.model import GPT, Shape

    model = GPT(Shape(depth, PADDED_VOCAB, 16))
    assert sum(p.numel() for p in model.parameters()) == parameters(depth)


def test_the_margins() -> None:
    found = Estimate(parameters=10 * GIB, gradients=0, optimizer=0, weight_copies=0, activations=0, logits=0)
    assert (found.total, found.needed, found.tight) == (10 * GIB, 12 * GIB, int(13.5 * GIB))
    record = found.record()
    assert (record["parameters_bytes"], record["total_bytes"], record["needed_bytes"]) == (10 * GIB, 10 * GIB, 12 * GIB)
    assert found.sentence().startswith("10.0 GiB per rank (parameters 10.0 GiB, ")
    assert found.sentence().endswith("12.0 GiB with the margin that decides")


def test_what_costs_more() -> None:
    small = estimate(4, 4, 128, bf16=True, compiled=True)
    assert estimate(4, 8, 128, bf16=True, compiled=True).activations == 2 * small.activations
    assert estimate(4, 4, 256, bf16=True, compiled=True).logits == 2 * small.logits
    assert estimate(4, 4, 128, bf16=False, compiled=True).activations == 2 * small.activations
    assert estimate(4, 4, 128, bf16=False, compiled=True).weight_copies == 0
    assert estimate(4, 4, 128, bf16=True, compiled=False).total > small.total
    assert estimate(5, 4, 128, bf16=True, compiled=True).parameters > small.parameters


def test_bytes_for_people() -> None:
    assert [gib(n) for n in (None, GIB, int(31.96 * GIB))] == ["-", "1.0 GiB", "32.0 GiB"]

"""The memory formula against the model itself: its weights, and its peak by fake tensors; real runs: benchmarks/memory.py."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.unit.conftest import ROOT, clean_environment
from training.engine.shape import Shape
from training.host.memory import CONTEXT, GIB, Estimate, Load, estimate, gib

AGGRESSIVE = Load(20, 14, 3072, 320, bf16=True, compiled=False, cuda=False)
BALANCED = replace(AGGRESSIVE, depth=16, sequences=12, seq_len=2048)
CONSERVATIVE = replace(AGGRESSIVE, depth=12, sequences=8, seq_len=1536)
SMALL = Load(4, 4, 128, 320, bf16=True, compiled=True, cuda=False)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_number_of_weights_is_the_model_s(depth: int) -> None:
    from training.engine.model import GPT

    model = GPT(Shape(depth, 320, 16))
    assert sum(p.numel() for p in model.parameters()) == Shape(depth, 320, 16).weights


@pytest.mark.parametrize(
    "load",
    [
        CONSERVATIVE,
        BALANCED,
        AGGRESSIVE,
        replace(CONSERVATIVE, vocab=65536, muon=False),
        replace(BALANCED, vocab=32768),
        replace(AGGRESSIVE, vocab=65536),
        replace(AGGRESSIVE, vocab=65536, chunks=8),
        replace(AGGRESSIVE, vocab=32768, chunks=16, blocks=17),
        replace(AGGRESSIVE, blocks=16),
        replace(AGGRESSIVE, blocks=20),
        replace(CONSERVATIVE, bf16=False),
        replace(CONSERVATIVE, bf16=False, vocab=32768, chunks=8, blocks=6),
        replace(CONSERVATIVE, bf16=False, blocks=12),
        Load(3, 16, 128, 320, bf16=True, compiled=False, cuda=False),
    ],
    ids=lambda one: f"d{one.depth} v{one.vocab} {'bf16' if one.bf16 else 'fp32'} again{one.blocks} parts{one.chunks}",
)
def test_the_formula_is_the_peak_of_our_model(load: Load) -> None:
    from training.engine.measure import peak

    assert estimate(load).total == pytest.approx(peak(load), rel=0.05)


def test_the_margins() -> None:
    found = Estimate(10 * GIB, 0, 0, 0, 0, 0, 0, 0)
    assert (found.total, found.needed, found.tight) == (10 * GIB, 12 * GIB, int(13.5 * GIB))
    record = found.record()
    assert (record["parameters_bytes"], record["total_bytes"], record["needed_bytes"]) == (10 * GIB, 10 * GIB, 12 * GIB)
    assert found.sentence().startswith("10.0 GiB per rank (parameters 10.0 GiB, ")
    assert found.sentence().endswith("12.0 GiB with the margin that decides")


def test_the_fixed_parts() -> None:
    weights = Shape(4, 320, 8).weights
    matrices, tables = 4 * Shape(4, 320, 8).block_weights, 2 * 320 * 256
    muon, adamw = estimate(SMALL), estimate(replace(SMALL, muon=False))
    assert (muon.parameters, muon.gradients) == (4 * weights, 4 * weights)
    assert (muon.optimizer, adamw.optimizer) == (4 * matrices + 8 * tables, 8 * weights)
    assert estimate(replace(SMALL, bf16=False)).weight_copies == 0
    assert (muon.context, estimate(replace(SMALL, cuda=True)).context) == (0, CONTEXT)
    assert CONTEXT == GIB // 2


def test_what_costs_more() -> None:
    small = estimate(SMALL)
    assert estimate(replace(SMALL, sequences=8)).activations == 2 * small.activations
    assert estimate(replace(SMALL, seq_len=256)).activations == 2 * small.activations
    for bigger in ({"bf16": False}, {"compiled": False}, {"depth": 5}, {"vocab": 4096}, {"muon": False}, {"sequences": 5}):
        assert estimate(replace(SMALL, **bigger)).total > small.total  # type: ignore[arg-type]
    wide = replace(SMALL, vocab=65536)
    assert estimate(replace(wide, chunks=8)).logits < estimate(wide).logits / 6
    assert estimate(replace(SMALL, blocks=2)).activations < small.activations


def test_the_time_of_computing_again() -> None:
    assert SMALL.extra_time == 0
    everything = replace(SMALL, blocks=4, chunks=2).extra_time
    assert everything == pytest.approx(1 / 3), "one more forward pass, beside one forward and two backward"
    assert 0 < replace(SMALL, chunks=2).extra_time == replace(SMALL, chunks=64).extra_time
    assert replace(SMALL, blocks=2).extra_time == pytest.approx(2 * replace(SMALL, blocks=1).extra_time)


def test_bytes_for_people() -> None:
    assert [gib(n) for n in (None, GIB, int(31.96 * GIB))] == ["-", "1.0 GiB", "32.0 GiB"]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", [{}, {"blocks": 8}, {"vocab": 32768, "chunks": 8}], ids=["plain", "again", "parts"])
def test_the_formula_on_a_gpu(compiled: bool, change: dict[str, int]) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA")
    load = replace(CONSERVATIVE, cuda=True, compiled=compiled, **change)
    code = "import json, sys; from benchmarks.memory import Load, fresh; print(fresh(Load(**json.loads(sys.argv[1]))))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(load.__dict__)],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    formula = estimate(load)
    assert formula.total - formula.context == pytest.approx(int(done.stdout), rel=0.10)

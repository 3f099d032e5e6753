"""Memory formula compared with the model: its weights, and its peak with fake tensors. Real runs:
benchmarks/memory.py."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import clean_environment
from training.core.messages import msg
from training.core.units import GIB
from training.tasks.gpt.memory import Estimate, StepWorkload, estimate
from training.tasks.gpt.model_dims import MUON_BATCH, ModelDims
from training.tasks.memory import CONTEXT, gib

AGGRESSIVE = StepWorkload(20, 14, 3072, 320, bf16=True, compiled=False, cuda=False)
BALANCED = replace(AGGRESSIVE, depth=16, sequences=12, seq_len=2048)
CONSERVATIVE = replace(AGGRESSIVE, depth=12, sequences=8, seq_len=1536)
DROPPING = StepWorkload(7, 16, 512, 320, bf16=False, compiled=False, cuda=False, dropout=0.1)
SMALL = StepWorkload(4, 4, 128, 320, bf16=True, compiled=True, cuda=False)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_number_of_weights_matches_the_model(depth: int) -> None:
    from training.tasks.gpt.model import GPT

    model = GPT(ModelDims(depth, 320, 16))
    assert sum(p.numel() for p in model.parameters()) == ModelDims(depth, 320, 16).weights


def soak(load: StepWorkload) -> object:
    return pytest.param(load, marks=pytest.mark.soak)


@pytest.mark.parametrize(  # seconds for each
    "load",
    [
        pytest.param(CONSERVATIVE, marks=pytest.mark.slow),
        soak(BALANCED),
        soak(AGGRESSIVE),
        soak(replace(CONSERVATIVE, vocab=65536, muon=False)),
        soak(replace(BALANCED, vocab=32768)),
        soak(replace(AGGRESSIVE, vocab=65536)),
        soak(replace(AGGRESSIVE, vocab=65536, chunks=8)),
        soak(replace(AGGRESSIVE, vocab=32768, chunks=16, blocks=17)),
        soak(replace(AGGRESSIVE, blocks=16)),
        soak(replace(AGGRESSIVE, blocks=20)),
        soak(replace(CONSERVATIVE, bf16=False)),
        pytest.param(
            replace(CONSERVATIVE, bf16=False, vocab=32768, chunks=8, blocks=6),
            marks=pytest.mark.slow,
        ),
        soak(replace(CONSERVATIVE, bf16=False, blocks=12)),
        soak(replace(AGGRESSIVE, selective=20)),
        soak(replace(AGGRESSIVE, vocab=65536, chunks=16, blocks=8, selective=12)),
        soak(replace(CONSERVATIVE, bf16=False, selective=6)),
        StepWorkload(3, 16, 128, 320, bf16=True, compiled=False, cuda=False),
        StepWorkload(3, 16, 128, 320, bf16=True, compiled=False, cuda=False, selective=3),
        StepWorkload(3, 16, 128, 320, bf16=True, fp16=True, compiled=False, cuda=False),
        StepWorkload(6, 16, 512, 320, bf16=True, fp16=True, compiled=False, cuda=False, blocks=6),
        StepWorkload(7, 16, 512, 320, bf16=True, compiled=False, cuda=False),
        DROPPING,
        replace(DROPPING, bf16=True),
        replace(DROPPING, blocks=3, selective=4),
        StepWorkload(11, 8, 512, 320, bf16=True, compiled=False, cuda=False, blocks=4),
        StepWorkload(29, 8, 512, 320, bf16=True, compiled=False, cuda=False, selective=3),
    ],
    ids=lambda one: (
        f"d{one.depth} v{one.vocab} {'fp16' if one.fp16 else 'bf16' if one.bf16 else 'fp32'} again{one.blocks} "
        f"selective{one.selective} parts{one.chunks} dropout{one.dropout:g}"
    ),
)
def test_the_formula_matches_the_peak_of_the_model(load: StepWorkload) -> None:
    from training.tasks.gpt.fake_memory import peak

    assert estimate(load).total == pytest.approx(peak(load), rel=0.05)


def test_the_margins() -> None:
    found = Estimate(10 * GIB, 0, 0, 0, 0, 0, 0, 0)
    assert (found.total, found.needed, found.tight) == (10 * GIB, 12 * GIB, int(13.5 * GIB))
    record = found.record()
    assert (record["parameters_bytes"], record["total_bytes"], record["needed_bytes"]) == (
        10 * GIB,
        10 * GIB,
        12 * GIB,
    )
    assert found.sentence().startswith("10.0 GiB per rank (parameters 10.0 GiB, ")
    assert found.sentence().endswith("12.0 GiB with safety margin")


def test_the_fixed_parts() -> None:
    weights = ModelDims(4, 320, 8).weights
    matrices, tables = 4 * ModelDims(4, 320, 8).block_weights, 2 * 320 * 256
    muon, adamw = estimate(SMALL), estimate(replace(SMALL, muon=False))
    assert muon.parameters == 4 * weights
    assert (muon.optimizer, adamw.optimizer) == (4 * matrices + 8 * tables, 8 * weights)
    assert estimate(replace(SMALL, bf16=False)).weight_copies == 0
    assert (muon.context, estimate(replace(SMALL, cuda=True)).context) == (0, CONTEXT)
    assert CONTEXT == GIB // 2
    context = msg("tasks.gpt.memory.context", context=gib(CONTEXT))
    assert context in estimate(replace(SMALL, cuda=True)).sentence()
    assert context not in muon.sentence()


def test_the_average_of_the_weights_is_counted() -> None:
    """Once on the device, and once in the copy of a checkpoint, on a CPU in the same memory."""
    weights, ema = 4 * SMALL.shape.weights, replace(SMALL, ema=True)
    assert (estimate(SMALL).average, estimate(ema).average) == (0, weights)
    assert estimate(ema).total - estimate(SMALL).total == weights
    on_cpu = [estimate(replace(one, copy=True)).total for one in (SMALL, ema)]
    assert on_cpu[1] - on_cpu[0] == 2 * weights
    assert weights <= ema.saving - SMALL.saving < 2 * weights
    assert "average of the weights" in estimate(ema).sentence()


def test_accumulation_on_several_ranks_holds_the_gradients_twice() -> None:
    """In addition to the buckets of DDP; verified with DDP below."""
    weights, micro = SMALL.shape.weights, SMALL.tokens
    for ranks, total, copies in (
        (1, 8 * micro, 1),
        (2, 2 * micro, 1),
        (2, 4 * micro, 2),
        (2, 0, 1),
        (4, 4 * micro, 1),
    ):
        assert (
            estimate(replace(SMALL, ranks=ranks, total_tokens=total)).gradients
            == 4 * weights * copies
        )
    # A smaller micro-batch of the same step accumulates.
    assert (
        estimate(replace(SMALL, ranks=2, total_tokens=2 * micro, sequences=2)).gradients
        == 8 * weights
    )


@each(("ranks", "copies"), [(1, 0), (2, 4), (3, 2)])
def test_compressed_gradients_are_held_besides(ranks: int, copies: int) -> None:
    """Of two ranks those of both."""
    load = replace(SMALL, ranks=ranks)
    compressed, plain = estimate(replace(load, compressed=True)), estimate(load)
    assert compressed.total - plain.total == copies * SMALL.shape.weights
    assert compressed.gradients - plain.gradients == copies * SMALL.shape.weights


def test_one_rank_creates_gradients_in_the_backward_pass_of_its_only_micro_batch() -> None:
    """At the loss there are none, in the last block its own and the head's, in Muon's step all."""
    shape = SMALL.shape
    at_loss = replace(SMALL, vocab=65536)
    in_block = replace(SMALL, sequences=64)
    in_update = replace(SMALL, cuda=True, sequences=1)
    found = [estimate(load).gradients for load in (at_loss, in_block, in_update)]
    last = shape.block_weights + shape.vocab * shape.width
    assert found == [0, 4 * last, 4 * shape.weights]
    for load in (at_loss, in_block, in_update):
        for more in ({"total_tokens": 2 * load.tokens}, {"ranks": 2}):
            held = estimate(replace(load, **more))  # type: ignore[arg-type]  # numbers only
            assert held.gradients == 4 * load.shape.weights


def test_ddp_holds_the_gradients_twice_during_accumulation() -> None:
    code = """
import os, tempfile, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False), gradient_as_bucket_view=True)
weight = model.module.weight
for step in range(3):
    bucket = weight.grad.data_ptr() if step else None
    if step == 2:  # the buckets of the step before are kept here by this reference only: DDP must hold them itself
        held = weight.grad.untyped_storage()
    model.zero_grad(set_to_none=True)
    with model.no_sync():
        model(torch.ones(1, 64)).sum().backward()
    own = weight.grad.data_ptr()
    model(torch.ones(1, 64)).sum().backward()
    if step == 2:
        print(own != bucket, weight.grad.data_ptr() == bucket)
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split() == ["True", "True"], "gathered beside the bucket, then in it"


def test_rank_0_of_a_cpu_training_copies_its_checkpoints() -> None:
    weights, tables = SMALL.shape.weights, 2 * 320 * 256
    matrices = weights - tables
    alone = estimate(replace(SMALL, copy=True))
    assert alone.saved == 4 * weights + 4 * matrices + 8 * tables and estimate(SMALL).saved == 0
    assert alone.total == estimate(SMALL).total + alone.saved
    assert (
        "checkpoint 26 MiB, " in alone.sentence() and "checkpoint" not in estimate(SMALL).sentence()
    )
    two = estimate(replace(SMALL, copy=True, ranks=2))
    assert two.saved == alone.saved + 2 * matrices, "half of Muon's state comes from the other rank"


def test_the_measurement_includes_memory_outside_the_step() -> None:
    from training.tasks.gpt.fake_memory import peak

    load = replace(SMALL, compiled=False, ranks=2)
    more = replace(load, total_tokens=4 * load.tokens, copy=True)
    assert peak(more) - peak(load) == estimate(more).total - estimate(load).total > 0


def test_benchmark_and_engine_compile_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import memory
    from training.tasks.gpt.model import GPT

    compiled: list[GPT] = []
    monkeypatch.setattr(GPT, "compile_parts", lambda self, together: compiled.append(self))
    tiny = replace(SMALL, depth=1, sequences=1, seq_len=16, bf16=False)
    memory.steps(replace(tiny, compiled=False), 1)
    assert not compiled
    memory.steps(tiny, 1)
    assert len(compiled) == 1


def test_settings_that_need_more_memory() -> None:
    small = estimate(SMALL)
    assert estimate(replace(SMALL, sequences=8)).activations == 2 * small.activations
    assert estimate(replace(SMALL, seq_len=256)).activations == 2 * small.activations
    for bigger in (
        {"bf16": False},
        {"compiled": False},
        {"depth": 5},
        {"vocab": 4096},
        {"muon": False},
        {"sequences": 5},
    ):
        assert estimate(replace(SMALL, **bigger)).total > small.total  # type: ignore[arg-type]
    wide = replace(SMALL, vocab=65536)
    assert estimate(replace(wide, chunks=8)).logits < estimate(wide).logits / 6
    selective = estimate(replace(SMALL, selective=2)).activations
    assert estimate(replace(SMALL, blocks=2)).activations < selective < small.activations


def test_the_time_of_recomputation() -> None:
    assert SMALL.extra_time == 0
    everything = replace(SMALL, blocks=4, chunks=2).extra_time
    assert everything == pytest.approx(1 / 3), (
        "one more forward pass in addition to one forward and two backward"
    )
    assert 0 < replace(SMALL, chunks=2).extra_time == replace(SMALL, chunks=64).extra_time
    assert 0 < replace(AGGRESSIVE, selective=20).extra_time < 0.05
    assert replace(SMALL, blocks=2).extra_time == pytest.approx(
        2 * replace(SMALL, blocks=1).extra_time
    )


@each(
    ("change", "kept"),
    [({"cuda": True}, 2), ({"compiled": True}, 2), ({"bf16": True}, 4), ({"bf16": False}, 8)],
)
def test_dropout_keeps_two_masks_in_a_block(change: dict[str, Any], kept: int) -> None:
    load = replace(CONSERVATIVE, **change)
    more = estimate(replace(load, dropout=0.1)).activations - estimate(load).activations
    assert more == kept * load.depth * load.width * load.tokens


def test_with_a_small_batch_the_peak_is_the_optimizer_s() -> None:
    small = replace(CONSERVATIVE, cuda=True, sequences=1, seq_len=128)
    found = estimate(small)
    assert found.updates == small.updates > 0
    assert (found.activations, found.weight_copies, found.logits, found.block) == (0, 0, 0, 0)
    assert "Muon's updates" in found.sentence()
    assert estimate(replace(small, muon=False)).updates == 0
    assert estimate(replace(CONSERVATIVE, cuda=True)).updates == 0


@each(("depth", "ranks"), [(20, 1), (20, 2), (20, 64), (12, 16), (4, 3)])
def test_muon_s_batch_is_that_of_the_formula(
    depth: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from training.tasks.gpt import muon

    monkeypatch.setitem(MUON_BATCH, "cpu", MUON_BATCH["cuda"])  # of tensors without memory
    for name, value in (("is_initialized", True), ("get_world_size", ranks), ("get_rank", 0)):
        monkeypatch.setattr(muon.dist, name, lambda value=value: value)
    load = replace(AGGRESSIVE, depth=depth, cuda=True, ranks=ranks)
    width, inner = load.width, load.shape.inner
    shapes = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]
    weights = [torch.nn.Parameter(torch.empty(s, device="meta")) for s in shapes * depth]
    made = muon.Muon(weights, lr=0.1, weight_decay=0, momentum=0.9, dtype=torch.bfloat16)
    each_rank = [bucket.share * bucket.matrices[0].numel() * 2 for bucket in made.buckets]
    assert each_rank == [own for own, _ in load._muon_batches()]


def test_formatted_bytes() -> None:
    assert [gib(n) for n in (None, GIB, int(31.96 * GIB))] == ["unknown", "1.0 GiB", "32.0 GiB"]

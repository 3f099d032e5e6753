"""The memory formula against torch's caching allocator, with nothing, everything and parts of the
blocks recomputed. All compiled steps of the configs: `python -m benchmarks.gpu_memory`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_memory
from tests.null_gpu import programs
from tests.null_gpu.conftest import NullGpus
from training.tasks.gpt.memory import StepWorkload, estimate

# configs/dual_gpu/conservative.py
PLAIN = StepWorkload(
    12, 8, 1536, 320, bf16=True, compiled=False, ranks=gpu_memory.RANKS, total_tokens=24576
)
LOADS = [
    PLAIN,
    replace(PLAIN, selective=12),
    replace(PLAIN, blocks=6, selective=6, vocab=32768, chunks=4),
    replace(PLAIN, selective=6, sequences=4),  # accumulates
    replace(PLAIN, compressed=True),
    replace(PLAIN, dropout=0.1),
    replace(PLAIN, dropout=0.1, selective=12),
    replace(PLAIN, fp16=True),
    replace(PLAIN, fp16=True, blocks=12),
    replace(PLAIN, fp16=True, selective=12, vocab=32768, chunks=4),
    replace(PLAIN, sequences=1, seq_len=128, total_tokens=256),  # the optimizer needs the most
    replace(PLAIN, sequences=1, seq_len=128, total_tokens=256, fp16=True),
    replace(PLAIN, depth=20, sequences=1, seq_len=128, total_tokens=256),  # in larger batches
]
COMPILED = [
    replace(PLAIN, compiled=True, vocab=vocab, chunks=chunks)
    for vocab, chunks in ((320, 1), (32768, 1), (32768, 8))
]
MIXED = replace(PLAIN, compiled=True, blocks=3, selective=5)
# One rank compiles four blocks as one graph.
TOGETHER = replace(PLAIN, compiled=True, ranks=1, selective=4)
KERNEL_US = 1000
# No gradients exist before the backward pass of a step's only micro-batch.
ONCE = replace(PLAIN, ranks=1, total_tokens=0)
ALONE = [
    ONCE,  # the peak is in the last block
    replace(ONCE, depth=4, vocab=32768, chunks=8),  # at the loss
    replace(ONCE, blocks=6, selective=6),
    replace(ONCE, blocks=12),  # in the first block, when the others have created theirs
    replace(ONCE, sequences=1, seq_len=128),  # in the optimizer's step
]


def peaks_as_estimated(loads: list[StepWorkload], gpus: NullGpus) -> list[int]:
    """The allocator's peaks in bytes, each within 3 % of the formula."""
    peaks = [peak["allocated"] for peak in gpu_memory.measured(loads, gpus.environ)]
    formulas = [estimate(load) for load in loads]
    ratios = [(f.total - f.context) / peak for f, peak in zip(formulas, peaks, strict=True)]
    assert ratios == [pytest.approx(1, abs=gpu_memory.LIMIT)] * len(loads)
    return peaks


def test_the_formula_is_the_allocator_s_peak(gpus: NullGpus, token: str) -> None:
    peaks = peaks_as_estimated(LOADS, gpus)
    assert peaks[1] < 0.7 * peaks[0]


def test_the_formula_is_the_peak_of_one_rank(gpus: NullGpus, token: str) -> None:
    peaks_as_estimated(ALONE, gpus)


@pytest.mark.timeout(900)
def test_the_formula_is_the_peak_of_compiled_steps(gpus: NullGpus, token: str) -> None:
    peaks_as_estimated(COMPILED, gpus)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "load",
    [MIXED, TOGETHER, replace(PLAIN, compiled=True, dropout=0.1)],
    ids=["mixed", "together", "dropout"],
)
def test_the_formula_is_the_peak_of_other_compiled_steps(
    load: StepWorkload, gpus: NullGpus, token: str
) -> None:
    peaks_as_estimated([load], gpus)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_formula_is_the_peak_of_every_config(gpus: NullGpus, token: str) -> None:
    rows = [*gpu_memory.rows(*gpu_memory.MATRIX, compiled=False, recomputed="auto")]
    gpus.environ["NULL_GPU_GIB"] = "200"  # the estimate is measured even where it is wrong
    peaks = gpu_memory.measured([row.load for row in rows], gpus.environ)
    ratios = [row.formula / peak["allocated"] for row, peak in zip(rows, peaks, strict=True)]
    assert len(rows) >= 24 and gpu_memory.beyond(rows, ratios) == []


BATCHES = """
import json

import torch
from training.data.device_copy import to_device
from training.trainer.prefetch import ahead

device, size, most = torch.device("cuda", 0), 64 << 20, []
torch.cuda.set_device(device)
read = (torch.zeros(size, dtype=torch.uint8) for _ in range(6))
batches = ahead(read, lambda batch: to_device(batch, device), device)
for _ in range(5):
    torch.cuda.reset_peak_memory_stats()
    next(batches)
    most.append(torch.cuda.max_memory_allocated() // size)
print(json.dumps(most))
"""


def test_two_batches_are_on_the_gpu(gpus: NullGpus) -> None:
    printed = programs.printed(gpus.environ, BATCHES)
    assert json.loads(printed) == [2] * 5


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("ranks", "per_weight"), [(2, 4), (3, 2)])
def test_compressed_gradients_do_not_pile_up(
    gpus: NullGpus, tmp_path: Path, ranks: int, per_weight: int
) -> None:
    """NCCL holds what it has sent until the host has seen the end and exchanges again."""
    for device in range(ranks):
        gpus.slow_down(device, KERNEL_US)
    environ = gpus.environ | {"NULL_GPU_COUNT": str(ranks)}
    (found,) = programs.recorded(environ, tmp_path, ranks, "queued_steps.py", [], 600)
    copies = (found["bf16"] - found["none"]) / found["weights"]
    assert copies == pytest.approx(per_weight, rel=0.01)

"""What each measure for speed should gain, from the sizes of the model: bytes ÷ bandwidth,
operations ÷ peak, launches × time. Milliseconds of a step with the whole batch of each dual-GPU
configuration on one GPU, two micro-batches, compiled, bf16.

    python -m benchmarks.roofline [--gpu=H200]

docs/gpus.md has the measurements beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.common import ROOT
from training.config import loader
from training.config.schema import Config
from training.core.units import GIB
from training.host import flops
from training.plan.exchange import LAUNCHES_LEFT
from training.tasks.gpt import memory_fit
from training.tasks.gpt.memory import StepWorkload, estimate
from training.tasks.gpt.model_dims import ModelDims, flops_per_token
from training.tasks.gpt.newton_schulz import STEPS as ITERATIONS

CONFIGS = ("conservative", "balanced", "aggressive")
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes per second, NVIDIA's data sheets (SXM)
PEAK_NAME = {"H100": "H100 80GB HBM3", "H200": "H200"}
VOCABULARY, MICRO, RANKS = 320, 2, 2
FREE = 31 * GIB  # of a GPU with 32 GB, as in docs/memory.md

# Compiled, a block reads and writes the residual stream in its two sums, reads it for the gradients
# of its two norms, and reads and writes the stream's gradient at both: tensors of width × tokens.
STREAM_PASSES = 2 * 2 + 2 + 2 * 2
# Bytes per token and unit of width that a selective block writes and reads again: two norms, query
# and key after rotation, SwiGLU's product (8/3); read for it: the stream twice, attention's output
# in the sum, query, key, gate and up. All in bf16.
RECOMPUTED = 2 * (2 + 2 + 8 / 3) + 2 * (2 + 1 + 2 + 2 * 8 / 3)

# Of docs/gpus.md, on the H200: from the end of a kernel to the start of one that is queued in time;
# the host's time in the calls that launch, for the launches of a step of conservative.
GAP_US = 1.3
CALL_US = 8000 / (1229 + 70)
# The host's time for a step of conservative there, with one block in each graph, and the GPU's for
# a step of each configuration.
HOST_MS, HOST_DEPTH = 60.0, 12
GPU_MS = {"conservative": 40.6, "balanced": 165.8, "aggressive": 522.6}
# Counted (benchmarks.launches): torch's Muon for each matrix, and Duet's for all.
TORCH_MUON, DUET_MUON = 34, 68


class Launches(NamedTuple):
    """Kernels of the forward and backward pass: of two micro-batches with separate and with joined
    products, and of one micro-batch of twice the size."""

    separate: int
    joined: int
    one_micro_batch: int


LAUNCHES = {"conservative": Launches(1675, 1219, 625)}  # of docs/gpus.md too; others not counted


@dataclass(frozen=True)
class Machine:
    """Operations and bytes per second."""

    peak: float
    bandwidth: float


@dataclass(frozen=True)
class Step:
    """A step of one of the configurations."""

    name: str
    dims: ModelDims
    tokens: int
    config: Config

    @property
    def pass_bytes(self) -> int:
        """Of one bf16 tensor with the residual stream's shape, in all blocks and micro-batches."""
        return 2 * self.dims.width * self.tokens * self.dims.depth

    @property
    def matrices(self) -> int:
        return 7 * self.dims.depth  # four of attention, three of the MLP

    @property
    def host_ms(self) -> float:
        """With one block in each graph."""
        return HOST_MS * self.dims.depth / HOST_DEPTH


def step_of(name: str) -> Step:
    values, _ = loader.load(ROOT / f"configs/dual_gpu/{name}.py")
    config = Config(**{key: value for key, (value, _) in values.items()})
    assert isinstance(config.total_batch_size, int)
    dims = ModelDims(config.depth, VOCABULARY, config.max_seq_len)
    return Step(name, dims, config.total_batch_size, config)


def at_peak_ms(step: Step, gpu: Machine) -> float:
    """The step's operations, as counted for MFU."""
    return 1e3 * step.tokens * flops_per_token(step.dims) / gpu.peak


def stream_ms(step: Step, gpu: Machine) -> float:
    """The other two bytes of a residual stream in fp32."""
    return 1e3 * STREAM_PASSES * step.pass_bytes / gpu.bandwidth


def _muon_launches(step: Step) -> int:
    """Launches that torch's Muon has more than Duet's."""
    return TORCH_MUON * step.matrices - DUET_MUON


def muon_gpu_ms(step: Step, _: Machine) -> float:
    """Gaps between kernels that batches of matrices do not have."""
    return _muon_launches(step) * GAP_US / 1e3


def muon_host_ms(step: Step, _: Machine) -> float:
    """Calls that batches of matrices do not have."""
    return _muon_launches(step) * CALL_US / 1e3


def symmetric_ms(step: Step, gpu: Machine) -> float:
    """Half of the operations of XXᵀ, 2m²n, and of G², 2m³, of an m × n matrix, m ≤ n."""
    m, inner = step.dims.width, step.dims.inner
    saved = sum(m * m * n + m**3 for n in (m, m, m, m, inner, inner, inner))
    return 1e3 * ITERATIONS * step.dims.depth * saved / gpu.peak


def shared_gram_ms(step: Step, gpu: Machine) -> float:
    """What Gram matrices for two and three steps save of the MLP's m × n matrices, with half of the
    operations of symmetric products: three times XXᵀ, m²n, and GX, 2m²n, for nine products of G
    more, m³ each."""
    m, n = step.dims.width, step.dims.inner
    return 1e3 * step.dims.depth * 3 * 9 * (m * m * n - m**3) / gpu.peak


def selective_ms(step: Step, gpu: Machine) -> float:
    """The cost of recomputing selectively in all blocks."""
    return 1e3 * RECOMPUTED / 2 * step.pass_bytes / gpu.bandwidth


def wait_ms(_: Step, __: Machine) -> float:
    """The least that a wait costs: the GPU is idle until the next kernel is launched."""
    return CALL_US / 1e3


def longest_wait_ms(step: Step, _: Machine) -> float:
    """The most that a wait costs: nothing of the host's time and the GPU's overlaps any more."""
    return min(LAUNCHES_LEFT * step.host_ms, GPU_MS[step.name])


def joined_ms(step: Step, _: Machine) -> float | None:
    """Gaps between the kernels that joined products save. None: not counted."""
    found = LAUNCHES.get(step.name)
    return None if found is None else (found.separate - found.joined) * GAP_US / 1e3


def one_micro_batch_ms(step: Step, _: Machine) -> float | None:
    """Gaps between the kernels of the second micro-batch. None: not counted."""
    found = LAUNCHES.get(step.name)
    return None if found is None else (found.joined - found.one_micro_batch) * GAP_US / 1e3


def graphs_ms(step: Step, _: Machine) -> float:
    """What four blocks in a graph save of the host's time, as far as the GPU waits for it."""
    return max(0.0, step.host_ms - max(LAUNCHES_LEFT * step.host_ms, GPU_MS[step.name]))


def recomputation(step: Step) -> tuple[float, float]:
    """Share of a step for recomputation that fits two GPUs of 32 GB: as the plan chooses it, and
    with whole blocks only."""
    asked = StepWorkload(
        step.dims.depth,
        0,
        step.dims.max_seq_len,
        VOCABULARY,
        bf16=True,
        compiled=True,
        ranks=RANKS,
        total_tokens=step.tokens,
    )

    def extra(config: Config) -> float | None:
        plan = memory_fit.choose(asked, config, RANKS, FREE)
        assert plan, "the configurations divide"
        fits = estimate(plan.load).needed <= FREE
        return plan.load.extra_time if fits else None

    chosen = extra(step.config)
    whole = (
        extra(replace(step.config, activation_checkpointing=blocks))
        for blocks in range(step.dims.depth + 1)
    )
    least = next(one for one in whole if one is not None)
    assert chosen is not None
    return chosen, least


ESTIMATES: dict[str, Callable[[Step, Machine], float | None]] = {
    "all operations at the peak": at_peak_ms,
    "bf16 residual stream": stream_ms,
    "batched Muon, GPU": muon_gpu_ms,
    "batched Muon, host": muon_host_ms,
    "half of Muon's symmetric products": symmetric_ms,
    "Muon's shared Gram matrices": shared_gram_ms,
    "joined products": joined_ms,
    "four blocks as one graph, on a slow host": graphs_ms,
    "one micro-batch of twice the size": one_micro_batch_ms,
    "a wait, at least": wait_ms,
    "a wait, at most": longest_wait_ms,
    "selective recomputation of all blocks (cost)": selective_ms,
}


def _shown(ms: float | None) -> str:
    return "–" if ms is None else f"{ms:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu", choices=BANDWIDTH, default="H200")
    name = parser.parse_args().gpu
    peak = flops.peak(PEAK_NAME[name], "bf16")
    assert peak
    gpu, steps = Machine(peak, BANDWIDTH[name]), [step_of(one) for one in CONFIGS]
    print(f"| {name}, ms of a step | {' | '.join(CONFIGS)} |\n|---|---|---|---|")
    for label, compute in ESTIMATES.items():
        print(f"| {label} | {' | '.join(_shown(compute(one, gpu)) for one in steps)} |")
    shares = [recomputation(one) for one in steps]
    print("| recomputation on 2 × 32 GB: the plan's / whole blocks only |", end="")
    print(f" {' | '.join(f'{100 * a:.0f} % / {100 * b:.0f} %' for a, b in shares)} |")


if __name__ == "__main__":
    main()

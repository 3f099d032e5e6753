"""Processor time of a step of Muon on the CPU, without forward and backward pass: Duet's, torch's,
and torch's shared by ZeroRedundancyOptimizer, as in early versions of Duet.

    python -m benchmarks.muon [--shapes=small,big] [--ranks=1,2] [--rounds=9] [--steps=3]
                              [--fp32] [--emulated]

One thread per rank; all variants run in the same processes, in interleaved rounds. The time of a
rank is the mean over the ranks. 'own Gram' is Duet's with a Gram matrix for each step of the
iteration, which it has anyway in bf16. torch's Muon always iterates in bf16, which a CPU without
bf16 matrix instructions emulates (measured with --emulated). 'torch, fp32' is its code in fp32,
which Duet uses on such a CPU; --fp32 does as if this were one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from benchmarks.flags import known, number, several
from benchmarks.peers import SHAPES
from training.host import allocator, decisions
from training.tasks.gpt import newton_schulz
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims
from training.tasks.gpt.muon import Muon

VOCAB = 320  # of bytes; it has no effect on the matrices
SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95}
DUET = "Duet"


class OwnGram(Muon):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with mock.patch.object(newton_schulz, "ASPECT", math.inf):
            return super().step(closure)


class Fp32Muon(torch.optim.Muon):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            return super().step(closure)


def variants(
    ranks: int, asked: argparse.Namespace
) -> dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]:
    bf16 = bool(decisions.cpu_bf16()) and not asked.fp32
    dtype, own = (torch.bfloat16, torch.optim.Muon) if bf16 else (torch.float32, Fp32Muon)

    def zero(matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(matrices, own, parameters_as_bucket_view=True, **SETTINGS)

    made: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        DUET: lambda matrices: Muon(matrices, dtype=dtype, **SETTINGS),
    }
    if not bf16:
        made["own Gram"] = lambda matrices: OwnGram(matrices, dtype=dtype, **SETTINGS)
        made["torch, fp32"] = lambda matrices: Fp32Muon(matrices, **SETTINGS)
    if bf16 or asked.emulated:
        made["torch, bf16"] = lambda matrices: torch.optim.Muon(matrices, **SETTINGS)
    if ranks > 1:
        made["torch, ZeRO"] = zero
    return made


def rank(number: int, ranks: int, asked: argparse.Namespace, folder: str) -> None:
    """Rank 0 writes shape → name → milliseconds per step of each round."""
    torch.set_num_threads(1)
    allocator.keep_freed_memory()  # as in a Duet run
    if ranks > 1:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=number, world_size=ranks)
    found = {shape: of_shape(shape, ranks, asked) for shape in asked.shapes}
    if number == 0:
        Path(folder, "times.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.destroy_process_group()


def of_shape(shape: str, ranks: int, asked: argparse.Namespace) -> dict[str, list[float]]:
    made = {}
    for name, make in variants(ranks, asked).items():
        torch.manual_seed(0)
        model = GPT(ModelDims(SHAPES[shape].depth, VOCAB, SHAPES[shape].seq_len))
        matrices = list(model.blocks.parameters())
        for matrix in matrices:
            matrix.grad = torch.randn_like(matrix)
        made[name] = make(matrices)
    times: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(asked.rounds + 1):  # the first one warms up
        # Another one begins each round: it finds the caches of the last one.
        first, order = turn % len(made), list(made.items())
        for name, optimizer in order[first:] + order[:first]:
            started = time.process_time()
            for _ in range(asked.steps):
                optimizer.step()
            spent = torch.tensor(1000 * (time.process_time() - started) / asked.steps / ranks)
            if ranks > 1:
                dist.all_reduce(spent)
            if turn:
                times[name].append(spent.item())
    return times


def measure(ranks: int, asked: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank, (ranks, asked, folder), ranks)
        return dict(json.loads(Path(folder, "times.json").read_text()))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=several(known(SHAPES)), default=["small", "big"])
    parser.add_argument("--ranks", type=several(number(1, 64)), default=[1, 2])
    parser.add_argument("--rounds", type=number(1, 1000), default=9)
    parser.add_argument("--steps", type=number(1, 1000), default=3)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--emulated", action="store_true")
    return parser.parse_args(argv)


def main() -> None:
    asked = arguments()
    for ranks in asked.ranks:
        for shape, times in measure(ranks, asked).items():
            print(f"\n{shape}, {ranks} rank(s): {SHAPES[shape]}")
            print(f"{'':<14}{'ms/step':>9}{'min':>9}{'max':>9}{'against Duet':>14}")
            for name, own in times.items():
                ratio = statistics.median(a / b for a, b in zip(own, times[DUET], strict=True))
                print(
                    f"{name:<14}{statistics.median(own):9.2f}{min(own):9.2f}{max(own):9.2f}"
                    f"{ratio:14.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

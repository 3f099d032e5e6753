"""Peak memory of the planned steps on GPUs: by the formula of the plan, and as torch's caching
allocator counts it on the null GPU (tests/null_gpu), which computes nothing.

    make gpu-path && python -m benchmarks.gpu_memory [--configs=conservative,balanced,aggressive]
        [--vocabularies=320,32768,65536] [--gpus=24,32,48,80] [--compiled=0,1]
        [--activation_checkpointing=auto]

The plan decides for each GPU what is recomputed; different decisions are measured.
Rank 0 of two ranks under DDP is measured. Compiling takes minutes of a slow core for each config;
torch keeps what it has compiled in TORCHINDUCTOR_CACHE_DIR. Ends with status 1 if a row is beyond
LIMIT, and names it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from benchmarks import null_gpus
from tests.null_gpu import programs
from training.config import loader
from training.config.schema import Config
from training.core.units import GIB
from training.tasks.gpt import memory_fit
from training.tasks.gpt.memory import StepWorkload, estimate

DRIVER = GIB  # of a GPU's memory that is not free before anything runs
RANKS, LIMIT_S = 2, 7200.0
# configs, vocabularies, GiB of the GPUs
MATRIX = ["conservative", "balanced", "aggressive"], [320, 32768, 65536], [24, 32, 48, 80]
LIMIT = 0.03  # of the allocator's peak: how far the formula may be off


@dataclass
class Row:
    """A planned step, and the GPUs for which it is planned."""

    name: str
    load: StepWorkload
    gpus: list[str] = field(default_factory=list)

    @property
    def recomputed(self) -> str:
        load = self.load
        parts = [f"{load.blocks} whole"] * (load.blocks > 0)
        parts += [f"{load.selective} selectively"] * (load.selective > 0)
        parts += [f"loss in {load.chunks}"] * (load.chunks > 1)
        return ", ".join(parts) or "nothing"

    @property
    def step(self) -> str:
        return "compiled" if self.load.compiled else "eager"

    @property
    def formula(self) -> int:
        """Bytes, without the CUDA context."""
        found = estimate(self.load)
        return found.total - found.context


def rows(
    names: list[str],
    vocabularies: list[int],
    gpus: list[int],
    compiled: bool,
    recomputed: int | str,
) -> Iterator[Row]:
    for name in names:
        values, _ = loader.load(programs.ROOT / f"configs/dual_gpu/{name}.py")
        given = {key: value for key, (value, _) in values.items()}
        config = Config(**given | {"activation_checkpointing": recomputed})
        for vocab in vocabularies:
            found: dict[StepWorkload, Row] = {}
            for gib in gpus:
                asked = StepWorkload(
                    config.depth,
                    0,
                    config.max_seq_len,
                    vocab,
                    bf16=True,
                    compiled=compiled,
                    ranks=RANKS,
                    total_tokens=config.total_batch_size,
                )
                plan = memory_fit.choose(asked, config, RANKS, gib * GIB - DRIVER)
                assert plan, "the configs divide"
                found.setdefault(plan.load, Row(name, plan.load)).gpus.append(str(gib))
            yield from found.values()


def measured(loads: list[StepWorkload], environ: dict[str, str]) -> Iterator[dict[str, int]]:
    """Allocated and reserved bytes of each load, in order; all are of the same number of ranks.
    Raises RuntimeError."""
    (count,) = {load.ranks for load in loads}
    with tempfile.TemporaryDirectory() as name, ExitStack() as files:
        store = Path(name, "store")
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(programs.ROOT / "tests/null_gpu/peak_steps.py"),
                    store,
                    str(rank),
                    str(count),
                    json.dumps([asdict(load) for load in loads]),
                ],
                env=os.environ | environ | {"PYTHONPATH": str(programs.CUDA_TORCH)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=files.enter_context(Path(name, f"{rank}.txt").open("w")),
                text=True,
            )
            for rank in range(count)
        ]
        try:
            assert ranks[0].stdout
            for line in ranks[0].stdout:
                yield json.loads(line)
            if ranks[0].wait(LIMIT_S):
                raise RuntimeError(Path(name, "0.txt").read_text()[-3000:])
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def line(row: Row, found: dict[str, int]) -> str:
    cells = (
        row.name,
        row.load.vocab,
        ", ".join(row.gpus),
        row.step,
        row.recomputed,
        f"{100 * row.load.extra_time:.0f} %",
        f"{row.formula / GIB:.1f}",
        f"{found['allocated'] / GIB:.1f}",
        f"{row.formula / found['allocated']:.3f}",
        f"{found['reserved'] / GIB:.1f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def beyond(todo: list[Row], ratios: list[float]) -> list[str]:
    """The rows whose formula ÷ allocated is off by more than LIMIT."""
    return [
        f"{row.name}, vocabulary {row.load.vocab}, {', '.join(row.gpus)} GiB, {row.step}, "
        f"recomputed: {row.recomputed}: {ratio:.3f}"
        for row, ratio in zip(todo, ratios, strict=True)
        if abs(ratio - 1) > LIMIT
    ]


def main() -> None:
    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", type=words, default=MATRIX[0])
    parser.add_argument("--vocabularies", type=numbers, default=MATRIX[1])
    parser.add_argument("--gpus", type=numbers, default=MATRIX[2], help="GiB")
    parser.add_argument("--compiled", type=numbers, default=[0, 1])
    parser.add_argument(
        "--activation_checkpointing",
        type=lambda text: int(text) if text.isdecimal() else text,
        default="auto",
    )
    args = parser.parse_args()
    todo = [
        row
        for compiled in args.compiled
        for row in rows(
            args.configs,
            args.vocabularies,
            args.gpus,
            bool(compiled),
            args.activation_checkpointing,
        )
    ]
    # the estimate is measured even where it is wrong
    with null_gpus.environment(NULL_GPU_GIB="200") as environ:
        print("| config | vocabulary | GPU, GB | step | recomputed | time | formula | allocated "
              "| formula ÷ allocated | reserved |")  # fmt: skip
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
        peaks, ratios = measured([row.load for row in todo], environ), []
        for row, found in zip(tqdm(todo, unit="step", disable=None), peaks, strict=True):
            print(line(row, found), flush=True)
            ratios.append(row.formula / found["allocated"])
    if off := beyond(todo, ratios):
        sys.exit("\n".join([f"beyond {100 * LIMIT:.0f} %:", *off]))


if __name__ == "__main__":
    main()

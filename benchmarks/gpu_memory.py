"""Peak memory of the planned steps on GPUs: by the formula of the plan, and as torch's caching
allocator counts it on the null GPU (tests/null_gpu), which computes nothing.

    make gpu-path && python -m benchmarks.gpu_memory [--configs=conservative,balanced,aggressive]
        [--vocabularies=320,32768,65536] [--gpus=24,32,48,80] [--compiled=0,1]
        [--activation_checkpointing=auto]

The plan decides for each GPU what is recomputed; different decisions are measured.
Rank 0 of two ranks under DDP is measured. Compiling takes minutes of a slow core for each config;
torch keeps what it has compiled in TORCHINDUCTOR_CACHE_DIR.
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

from tests.null_gpu import programs
from tests.null_gpu.build import build
from training.config import loader
from training.config.schema import Config
from training.tasks.gpt import memory_fit
from training.tasks.gpt.memory import StepWorkload, estimate
from training.tasks.memory import GIB

DRIVER = GIB  # of a GPU's memory that is not free before anything runs
RANKS, LIMIT_S = 2, 7200.0


@dataclass
class Row:
    """A planned step, and the GPUs for which it is planned."""

    name: str
    load: StepWorkload
    gpus: list[str] = field(default_factory=list)


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
    """Allocated and reserved bytes of each load, in order. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as files:
        store = Path(name, "store")
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(programs.ROOT / "tests/null_gpu/peak_steps.py"),
                    store,
                    str(rank),
                    json.dumps([asdict(load) for load in loads]),
                ],
                env=os.environ | environ | {"PYTHONPATH": str(programs.CUDA_TORCH)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=files.enter_context(Path(name, f"{rank}.txt").open("w")),
                text=True,
            )
            for rank in range(RANKS)
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
    load, formula = row.load, estimate(row.load)
    own = formula.total - formula.context
    recomputed = [f"{load.blocks} whole"] * (load.blocks > 0)
    recomputed += [f"{load.selective} selectively"] * (load.selective > 0)
    recomputed += [f"loss in {load.chunks}"] * (load.chunks > 1)
    cells = (
        row.name,
        load.vocab,
        ", ".join(row.gpus),
        "compiled" if load.compiled else "eager",
        ", ".join(recomputed) or "nothing",
        f"{100 * load.extra_time:.0f} %",
        f"{own / GIB:.1f}",
        f"{found['allocated'] / GIB:.1f}",
        f"{own / found['allocated']:.3f}",
        f"{found['reserved'] / GIB:.1f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", type=words, default=["conservative", "balanced", "aggressive"])
    parser.add_argument("--vocabularies", type=numbers, default=[320, 32768, 65536])
    parser.add_argument("--gpus", type=numbers, default=[24, 32, 48, 80], help="GiB")
    parser.add_argument("--compiled", type=numbers, default=[0, 1])
    parser.add_argument(
        "--activation_checkpointing",
        type=lambda text: int(text) if text.isdecimal() else text,
        default="auto",
    )
    args = parser.parse_args()
    if not (programs.CUDA_TORCH / "torch").is_dir():
        sys.exit("no CUDA build of torch in .tools/cuda: make gpu-path installs it")
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
    with tempfile.TemporaryDirectory() as name:
        libraries = Path(name)
        build(programs.CUDA_TORCH / "torch", libraries)
        environ = programs.environment(libraries, libraries / "state")
        environ |= {"NULL_GPU_GIB": "200"}  # the estimate is measured even where it is wrong
        print("| config | vocabulary | GPU, GB | step | recomputed | time | formula | allocated "
              "| formula ÷ allocated | reserved |")  # fmt: skip
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
        peaks = measured([row.load for row in todo], environ)
        for row, found in zip(tqdm(todo, unit="step", disable=None), peaks, strict=True):
            print(line(row, found), flush=True)


if __name__ == "__main__":
    main()

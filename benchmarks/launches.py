"""What a training step asks of a GPU, counted on the null GPU (tests/null_gpu), which computes
nothing: launches, waits and host time.

    make gpu-path && python -m benchmarks.launches [--depths=12,16,20] [--ranks=1,2]
        [--compiled=0,1]
        [--nanochat=DIR]        a checkout of https://github.com/karpathy/nanochat

A launch is a kernel, a matrix product, or a copy on the device. The bare loop has a few lines, the
same model, torch.optim.Muon and AdamW, and DDP on two ranks; nanochat has its own model and
optimizer, which compiles its steps and exchanges the gradients of two ranks. Times are CPU time of
this machine: of the thread in the optimizer, of all threads of rank 0 in the step; medians of the
last steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import null_gpus
from benchmarks.flags import NANOCHAT_DIR, nanochat_checkout, number, several
from tests.null_gpu import programs
from tests.null_gpu.counters import launches, waits

SEQUENCES, LENGTH, STEPS = 4, 256, 20
FIRST = 12  # warm-up, and steps in which DDP's own logger waits
PARTS = ("other", "optimizer", "report")  # of a step; the bare loops read no figures
LIMIT_S = 1800.0
FLAGS = {
    "max_seq_len": LENGTH,
    "device_batch_size": SEQUENCES,
    "num_iterations": STEPS,
    "eval_every": 0,
    "inspect_every": 0,
    "sample_tokens": 0,
    "data": "stdlib",
    "report": "false",
    "tensorboard": "false",
    "use_dummy_wandb": "true",
}


def duet(
    environ: dict[str, str], depth: int, ranks: int, compiled: int, precision: str = "bf16"
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = FLAGS | {"depth": depth, "compile": compiled, "run_name": "counted"}
        flags["precision"] = precision
        flags |= {"total_batch_size": SEQUENCES * LENGTH * ranks}
        flags |= {"out_dir": folder / "runs", "log_dir": folder / "logs"}
        return programs.counted(environ, folder, ranks, flags, LIMIT_S)[FIRST:-1]


def bare(
    environ: dict[str, str],
    depth: int,
    ranks: int,
    compiled: int,
    *,
    kind: str = "same",
    folder: Path | None = None,
) -> list[dict[str, Any]]:
    """`folder`: of the files of this kind, on PYTHONPATH."""
    environ = environ | ({"PYTHONPATH": str(folder)} if folder else {})
    words = [kind, *map(str, (depth, SEQUENCES, LENGTH, compiled))]
    with tempfile.TemporaryDirectory() as name:
        steps = programs.recorded(environ, Path(name), ranks, "bare_steps.py", words, LIMIT_S)
    return steps[FIRST:]


def row(label: str, steps: list[dict[str, Any]]) -> str:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    other = median([launches(s["other"]) for s in steps])
    optimizer = median([launches(s["optimizer"]) for s in steps])
    waited = [sum(sum(waits(s[part]).values()) for part in PARTS if part in s) for s in steps]
    times = (median([s[name] for s in steps]) for name in ("optimizer_cpu_ms", "step_cpu_ms"))
    cells = (
        label,
        *(f"{n:.0f}" for n in (other, optimizer, median(waited))),
        *(f"{ms:.1f}" for ms in times),
    )
    return f"| {' | '.join(cells)} |"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depths", type=several(number(1, 100)), default=[12, 16, 20])
    parser.add_argument("--ranks", type=several(number(1, 2)), default=[1, 2])
    parser.add_argument("--compiled", type=several(number(0, 1)), default=[0, 1])
    parser.add_argument(
        "--nanochat",
        metavar="DIR",
        type=nanochat_checkout,
        default=os.environ.get(NANOCHAT_DIR) or None,
    )
    return parser.parse_args(argv)


def main() -> None:
    args, failed = arguments(), False
    measured: dict[str, Callable[..., list[dict[str, Any]]]] = {"Duet": duet, "bare loop": bare}
    if args.nanochat:
        measured["nanochat"] = partial(bare, kind="nanochat", folder=args.nanochat)
    with null_gpus.environment() as environ:
        print("| | launches without the optimizer | optimizer | waits | optimizer, CPU ms | step |")
        print("|---|---|---|---|---|---|", flush=True)
        sizes = itertools.product(args.depths, args.compiled, args.ranks)
        for (depth, compiled, ranks), name in itertools.product(sizes, measured):
            kind = f"depth {depth}, {'compiled' if compiled else 'eager'}"
            label = f"{kind}: {name}, {ranks} rank{'s' * (ranks > 1)}"
            try:
                steps = measured[name](environ, depth, ranks, compiled)
                print(row(label, steps), flush=True)
            except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
                print(f"| {label} | failed | | | | |", flush=True)
                print(error, file=sys.stderr)
                failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()

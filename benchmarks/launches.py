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
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import NANOCHAT_DIR, nanochat_checkout, null_gpus
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
    kind: str,
    depth: int,
    ranks: int,
    compiled: int,
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


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depths", type=numbers, default=[12, 16, 20])
    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument("--compiled", type=numbers, default=[0, 1])
    parser.add_argument(
        "--nanochat",
        metavar="DIR",
        type=nanochat_checkout,
        default=os.environ.get(NANOCHAT_DIR) or None,
    )
    return parser.parse_args(argv)


def main() -> None:
    args = arguments()
    with null_gpus.environment() as environ:
        rows = []
        todo = [(d, c) for d in args.depths for c in args.compiled]
        for depth, compiled in tqdm(todo, unit="model", disable=None):
            kind = f"depth {depth}, {'compiled' if compiled else 'eager'}"
            for ranks in args.ranks:
                label = f"{ranks} rank{'s' * (ranks > 1)}"
                rows.append(row(f"{kind}: Duet, {label}", duet(environ, depth, ranks, compiled)))
                steps = bare(environ, "same", depth, ranks, compiled)
                rows.append(row(f"{kind}: bare loop, {label}", steps))
                if args.nanochat:
                    steps = bare(environ, "nanochat", depth, ranks, compiled, args.nanochat)
                    rows.append(row(f"{kind}: nanochat, {label}", steps))
    print("| | launches without the optimizer | optimizer | waits | optimizer, CPU ms | step |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()

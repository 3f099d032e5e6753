"""Time to a target validation loss: Duet's default training against a plain GPT-2 of equal size
with tuned AdamW, or against nanochat's model and optimizer.

    python -m benchmarks.target [--steps=600] [--rates=1e-3,2e-3,3e-3,6e-3]
                                [--budgets=150,200,250,300,400] [--seeds=1,2]
                                [--precision=bf16|fp32] [--json=FILE]
    NANOCHAT_DIR=DIR python -m benchmarks.target --baseline=nanochat [--rates=1,4,8,16] …

All have depth 4 and width 256 (3.2 million weights), the same corpus (sources of the standard
library, byte tokens), the same 4096 tokens of context 256 in the same order at each step, the same
precision, one process with one thread. The baseline (benchmarks/contenders) trains `steps` steps;
its learning rate is the best of `rates` at the first seed (nanochat's: factors of its own rates).
The target is its final validation loss, in bits per byte. Duet trains complete runs of 150, 200 …
steps, each with its own schedule, until one ends at or below the target. Seconds are the number of
steps times their median, without evaluation and compilation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import NANOCHAT_DIR
from benchmarks.common import ROOT, environment, prepared, train_command
from training.core.rundir import RunDir, read_records

DEPTH, SEQ_LEN, BATCH = 4, 256, 16
EVAL_TOKENS = 131072
POLL_S = 2.0
LABELS = {"gpt2": "GPT-2, AdamW {:g}", "nanochat": "nanochat, rates × {:g}"}
RATES = {"gpt2": "1e-3,2e-3,3e-3,6e-3", "nanochat": "1,4,8,16"}


@dataclass
class Curve:
    """Losses and times of one run."""

    name: str
    seed: int
    step_ms: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    val_bpb: dict[int, float] = field(default_factory=dict)  # by step

    @property
    def steps(self) -> int:
        return len(self.step_ms)

    @property
    def seconds(self) -> float:
        return len(self.step_ms) * statistics.median(self.step_ms) / 1000

    @property
    def final(self) -> float:
        return self.val_bpb[self.steps]


def read(path: Path, name: str, seed: int) -> Curve:
    curve = Curve(name, seed)
    for record in read_records(path):
        if "val_bpb" in record:
            curve.val_bpb[record["step"]] = record["val_bpb"]
        else:
            curve.step_ms.append(record["step_ms"])
            curve.loss.append(record["loss"])
    return curve


def follow(argv: list[str], records: Path, name: str, seed: int, steps: int) -> Curve:
    """Runs a program that writes records, with a progress bar. Raises SystemExit if it fails."""
    with (
        tempfile.TemporaryFile("w+") as err,
        tqdm(
            total=steps, desc=f"{name}, seed {seed}", unit="step", leave=False, disable=None
        ) as bar,
    ):
        process = subprocess.Popen(
            argv, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=err
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                if records.exists():
                    bar.update(read(records, name, seed).steps - bar.n)
        finally:
            process.terminate()
            process.wait()
        if process.returncode:
            err.seek(0)
            sys.exit(f"{' '.join(argv)} failed ({process.returncode}):\n{err.read()[-3000:]}")
    curve = read(records, name, seed)
    print(
        f"{name:<22}{seed:>5}{steps:>7}{curve.seconds:>9.1f}"
        f"{curve.seconds / steps * 1000:>9.1f}{curve.final:>10.4f}",
        flush=True,
    )
    return curve


class Contest:
    """`baseline`: a module of benchmarks.contenders."""

    def __init__(self, baseline: str, folder: Path, precision: str, eval_every: int) -> None:
        self.name, self.folder = baseline, folder
        self.precision, self.eval_every = precision, eval_every
        self.data = prepared()
        self.curves: list[Curve] = []

    def baseline(self, seed: int, steps: int, rate: float) -> Curve:
        out = self.folder / f"baseline-{seed}-{steps}-{rate}.jsonl"
        run: dict[str, Any] = {
            "depth": DEPTH,
            "seq_len": SEQ_LEN,
            "batch": BATCH,
            "steps": steps,
            "rate": rate,
            "seed": seed,
        }
        run |= {
            "bf16": self.precision == "bf16",
            "vocab": self.data.vocab,
            "bos": self.data.bos,
            "train": str(self.data.train[0]),
        }
        run |= {
            "val": str(self.data.val[0]),
            "eval_every": self.eval_every,
            "eval_tokens": EVAL_TOKENS,
            "out": str(out),
        }
        argv = [sys.executable, "-m", f"benchmarks.contenders.{self.name}", json.dumps(run)]
        return self._kept(follow(argv, out, LABELS[self.name].format(rate), seed, steps))

    def duet(self, seed: int, steps: int) -> Curve:
        flags: dict[str, Any] = {
            "depth": DEPTH,
            "max_seq_len": SEQ_LEN,
            "device_batch_size": BATCH,
            "total_batch_size": BATCH * SEQ_LEN,
        }
        flags |= {
            "num_iterations": steps,
            "eval_every": self.eval_every,
            "eval_tokens": EVAL_TOKENS,
            "precision": self.precision,
        }
        folder = self.folder / f"duet-{seed}-{steps}"
        argv = train_command(folder, seed=seed, **flags)
        return self._kept(
            follow(argv, RunDir(folder / "run").metrics, "Duet, defaults", seed, steps)
        )

    def _kept(self, curve: Curve) -> Curve:
        self.curves.append(curve)
        return curve


def first_at(contest: Contest, target: float, seed: int, budgets: list[int]) -> Curve | None:
    """The shortest Duet run that ends at the target or below."""
    return next(
        (
            curve
            for curve in (contest.duet(seed, steps) for steps in budgets)
            if curve.final <= target
        ),
        None,
    )


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600, help="of the baseline")
    parser.add_argument("--baseline", default="gpt2", choices=LABELS)
    parser.add_argument(
        "--rates", help="peak learning rates to try for GPT-2, factors of nanochat's own"
    )
    parser.add_argument(
        "--budgets", default="150,200,250,300,400", help="steps of Duet's runs, tried in this order"
    )
    parser.add_argument(
        "--seeds",
        default="1,2",
        help="seeds of initial weights and data order; the first one tunes the rate",
    )
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"), help="of both")
    parser.add_argument(
        "--eval_every", type=int, default=50, help="steps between the points of the curves"
    )
    parser.add_argument("--json", type=Path, help="write all curves to this file")
    wanted = parser.parse_args()
    seeds = numbers(wanted.seeds)
    rates = [float(rate) for rate in (wanted.rates or RATES[wanted.baseline]).split(",")]
    if (
        wanted.baseline == "nanochat"
        and not Path(os.environ.get(NANOCHAT_DIR, ""), "nanochat/gpt.py").is_file()
    ):
        sys.exit(
            f"{NANOCHAT_DIR} is {os.environ.get(NANOCHAT_DIR, '')!r}; it must be a checkout of "
            "https://github.com/karpathy/nanochat"
        )

    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(wanted.baseline, Path(folder), wanted.precision, wanted.eval_every)
        print(f"{'run':<22}{'seed':>5}{'steps':>7}{'seconds':>9}{'ms/step':>9}{'val bpb':>10}")
        tried = {rate: contest.baseline(seeds[0], wanted.steps, rate) for rate in rates}
        best = min(tried, key=lambda rate: tried[rate].final)
        results = []
        for seed in seeds:
            base = tried[best] if seed == seeds[0] else contest.baseline(seed, wanted.steps, best)
            results.append((base, first_at(contest, base.final, seed, numbers(wanted.budgets))))
    if wanted.json:
        wanted.json.write_text(
            json.dumps([asdict(curve) for curve in contest.curves]), encoding="utf-8"
        )

    edge = (
        " (at the edge of the tried rates)"
        if len(rates) > 1 and best in (min(rates), max(rates))
        else ""
    )
    print(f"\nbaseline: {LABELS[wanted.baseline].format(best)}{edge}, {wanted.precision}")
    print(
        f"{'seed':>4}{'target bpb':>12}{'baseline':>19}{'Duet':>19}"
        f"{'ratio of steps':>16}{'of seconds':>12}"
    )
    for base, own in results:
        line = f"{base.seed:>4}{base.final:>12.4f}{base.steps:>11} {base.seconds:6.1f}s"
        if own:
            line += (
                f"{own.steps:>11} "
                f"{own.seconds:6.1f}s"
                f"{own.steps / base.steps:>16.2f}{own.seconds / base.seconds:>12.2f}"
            )
        print(line if own else f"{line}   not reached in {wanted.budgets} steps")
    reached = [(base, own) for base, own in results if own]
    if len(reached) == len(results):
        print(
            f"ratio of seconds, all seeds: "
            f"{sum(o.seconds for _, o in reached) / sum(b.seconds for b, _ in reached):.2f}"
        )


if __name__ == "__main__":
    main()

"""python -m benchmarks.target (see __init__.py)"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks import NANOCHAT_DIR, target
from benchmarks.common import ROOT, prepared, warn_of_emulation
from benchmarks.gpu.bench import stand_ins
from benchmarks.gpu.machine import PACKAGES
from benchmarks.target import plan, runs, table, texts, turns

STARTS = {"gpt2": 7e-4, "nanochat": 16.0, "nanochat_windows": 16.0}
OUT, PUBLISHED = ROOT / "experiments/target", ROOT / "benchmarks/results/target"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.target",
        description=target.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--baseline", default="gpt2", choices=STARTS)
    parser.add_argument("--steps", default="300,1000,3000", help="of the baseline, ascending")
    parser.add_argument("--seeds", default="1,2,3", help="the first one tunes the rate")
    parser.add_argument(
        "--rate", type=float, help="first rate to try: GPT-2's peak, or a factor of nanochat's own"
    )
    parser.add_argument(
        "--shares", default="0.5,0.6,0.7,0.8,0.9,1,1.25,1.5", help="Duet's steps; ascending"
    )
    parser.add_argument("--share", type=float, default=0.6, help="the first of them to try")
    parser.add_argument("--precision", default="fp32", choices=("bf16", "fp32"), help="of both")
    parser.add_argument(
        "--device", default=plan.CPU, choices=(plan.CPU, plan.CUDA), help="of all trainings"
    )
    parser.add_argument(
        "--corpus",
        default=plan.STDLIB,
        choices=(plan.STDLIB, plan.SOURCES),
        help="sources: also torch's, for more than 2,400 steps",
    )
    parser.add_argument("--eval_every", type=int, default=100, help="steps")
    parser.add_argument("--parallel", type=int, default=1, help="trainings at a time")
    parser.add_argument(
        "--results", type=Path, default=OUT, help="folder with one file for each training"
    )
    parser.add_argument(
        "--scratch", type=Path, default=OUT / "started", help="state of interrupted trainings"
    )
    parser.add_argument("--timing", action="store_true", help="measure the time of a step instead")
    parser.add_argument("--rounds", type=int, default=9, help="of --timing")
    parser.add_argument("--table", action="store_true", help="print the table only")
    wanted = parser.parse_args(argv)
    wanted.steps = sorted(map(int, wanted.steps.split(",")))
    wanted.seeds = list(map(int, wanted.seeds.split(",")))
    wanted.shares = sorted(map(float, wanted.shares.split(",")))
    if wanted.share not in wanted.shares:
        parser.error(f"--share={wanted.share:g} is not one of --shares")
    wanted.rate = wanted.rate or STARTS[wanted.baseline]
    files = Path(os.environ.get(NANOCHAT_DIR, ""), "nanochat/gpt.py")
    if wanted.baseline.startswith("nanochat") and not wanted.table and not files.is_file():
        parser.error(
            f"{NANOCHAT_DIR} is {os.environ.get(NANOCHAT_DIR, '')!r}; it must be a checkout of "
            "https://github.com/karpathy/nanochat"
        )
    return wanted


def planned(asked: argparse.Namespace) -> plan.Plan:
    return plan.Plan(
        asked.baseline,
        asked.precision,
        asked.steps,
        asked.seeds,
        asked.rate,
        asked.shares,
        asked.share,
        asked.device,
        asked.corpus,
    )


def published(baseline: str) -> list[str]:
    """A table of docs/performance.md."""
    words = [f"--baseline={baseline}", "--precision=bf16", "--table", f"--results={PUBLISHED}"]
    asked = arguments(words)
    return table.lines(asked.results, planned(asked))


def _replace_missing(folder: Path) -> None:
    """A lent machine may lack what Duet requires (benchmarks/gpu/stand_ins): here and in the
    trainings."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if found := stand_ins(missing, folder):
        sys.path.append(str(found))
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (os.environ.get("PYTHONPATH"), str(found)))
        )


def main() -> None:
    asked = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that trainings are ended
    chosen = planned(asked)
    if asked.device == plan.CUDA:
        _replace_missing(asked.scratch.resolve() / "stand_ins")
    kept = runs.Kept(asked.results)
    try:
        if not asked.table:
            prepared(texts.data(asked.corpus))
            if asked.device == plan.CPU:
                warn_of_emulation(asked.precision)
            if asked.timing:
                turns.measure(chosen, kept.folder, asked.rounds)
            else:
                runs.complete(
                    kept,
                    lambda losses: plan.wanted(chosen, losses),
                    asked.parallel,
                    asked.eval_every,
                    asked.scratch.resolve(),
                )
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues")
    print("\n".join(table.lines(kept.folder, chosen)))


if __name__ == "__main__":
    main()

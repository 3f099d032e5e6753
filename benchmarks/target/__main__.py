"""python -m benchmarks.target (see __init__.py)"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks import target
from benchmarks.common import ROOT, prepared, warn_of_emulation
from benchmarks.flags import MOST, NANOCHAT_DIR, nanochat_checkout, number, positive, several
from benchmarks.gpu.bench import stand_ins
from benchmarks.gpu.machine import PACKAGES, commit
from benchmarks.target import plan, runs, table, texts, turns

STARTS = {"gpt2": 7e-4, "nanochat": 16.0, "nanochat_windows": 16.0}
OUT, PUBLISHED = ROOT / "experiments/target", ROOT / "benchmarks/results/target"
COUNT = number(1, MOST)  # steps


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.target",
        description=target.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--baseline", default="gpt2", choices=STARTS)
    parser.add_argument(
        "--steps", type=several(COUNT), default="300,1000,3000", help="of the baseline"
    )
    parser.add_argument(
        "--seeds",
        type=several(number(0, 2**31)),
        default="1,2,3",
        help="the first one tunes the rate",
    )
    parser.add_argument(
        "--rate",
        type=positive,
        help="first rate to try: GPT-2's peak, or a factor of nanochat's own",
    )
    parser.add_argument(
        "--shares",
        type=several(positive),
        default="0.5,0.6,0.7,0.8,0.9,1,1.25,1.5",
        help="Duet's steps",
    )
    parser.add_argument("--share", type=positive, default=0.6, help="the first of them to try")
    parser.add_argument("--precision", default="fp32", choices=("bf16", "fp32"), help="of both")
    parser.add_argument(
        "--device", default=plan.CPU, choices=(plan.CPU, plan.CUDA), help="of all trainings"
    )
    parser.add_argument(
        "--corpus",
        default=plan.STDLIB,
        choices=(plan.STDLIB, plan.SOURCES),
        help="sources: also torch's, for more than 2,477 steps",
    )
    parser.add_argument("--eval_every", type=COUNT, default=100, help="steps")
    parser.add_argument("--parallel", type=number(1, 64), default=1, help="trainings at a time")
    parser.add_argument(
        "--results", type=Path, default=OUT, help="folder with one file for each training"
    )
    parser.add_argument(
        "--scratch", type=Path, default=OUT / "started", help="state of interrupted trainings"
    )
    parser.add_argument("--timing", action="store_true", help="measure the time of a step instead")
    parser.add_argument("--rounds", type=number(1, 1000), default=9, help="of --timing")
    parser.add_argument("--table", action="store_true", help="print the table only")
    wanted = parser.parse_args(argv)
    wanted.steps.sort()
    wanted.shares.sort()
    if not round(wanted.shares[0] * wanted.steps[0]):
        parser.error(f"--shares={wanted.shares[0]:g}: of {wanted.steps[0]} steps none remains")
    if wanted.share not in wanted.shares:
        parser.error(f"--share={wanted.share:g} is not one of --shares")
    wanted.rate = wanted.rate or STARTS[wanted.baseline]
    wanted.nanochat = None
    if not wanted.table:
        if wanted.device == plan.CUDA and not _has_gpu():
            parser.error(f"--device={plan.CUDA}: torch finds no GPU")
        if plan.of_nanochat(wanted.baseline):
            wanted.nanochat = _nanochat(parser)
    return wanted


def _has_gpu() -> bool:
    import torch  # not for a table

    return torch.cuda.is_available()


def _nanochat(parser: argparse.ArgumentParser) -> Path:
    given = os.environ.get(NANOCHAT_DIR, "")
    try:
        return nanochat_checkout(given)
    except argparse.ArgumentTypeError:
        parser.error(
            f"{NANOCHAT_DIR} is {given!r}; it must be a checkout of "
            "https://github.com/karpathy/nanochat"
        )


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
    return table.lines(PUBLISHED, _published(baseline))


def published_long(corpus: str) -> list[str]:
    """The longer trainings."""
    found = runs.Kept(PUBLISHED).trainings().items()
    where, above = (corpus, plan.CPU), _published("nanochat").longest
    return table.trainings(
        {t: record for t, record in found if (t.corpus, t.device) == where and t.steps > above}
    )


def _published(baseline: str) -> plan.Plan:
    words = [f"--baseline={baseline}", "--precision=bf16", "--steps=300,1000", "--table"]
    return planned(arguments(words))


def _replace_missing(folder: Path) -> None:
    """A lent machine may lack what Duet requires (benchmarks/gpu/stand_ins): here and in the
    trainings."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if found := stand_ins(missing, folder):
        sys.path.append(str(found))
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (os.environ.get("PYTHONPATH"), str(found)))
        )


def _refuse_others(kept: runs.Kept, chosen: plan.Plan) -> None:
    """One rate is chosen among those of all files."""
    trainings = {t: record for t, record in kept.trainings().items() if chosen.includes(t)}
    if others := runs.nanochats(trainings) - {kept.nanochat}:
        found = f"trainings with nanochat {', '.join(sorted(others))}"
        sys.exit(
            f"[ERROR] {kept.folder} has {found}, the checkout in {NANOCHAT_DIR} is "
            f"{kept.nanochat}\n"
            "    try:     check out that version, or --results=FOLDER"
        )


def main() -> None:
    asked = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that trainings are ended
    chosen = planned(asked)
    version = commit(asked.nanochat, ("nanochat",)) if asked.nanochat else ""
    kept = runs.Kept(asked.results, version)
    if asked.nanochat:
        os.environ[NANOCHAT_DIR] = str(asked.nanochat)  # the trainings run in another folder
        _refuse_others(kept, chosen)
    if asked.device == plan.CUDA:
        _replace_missing(asked.scratch.resolve() / "stand_ins")
    try:
        if not asked.table:
            prepared(texts.data(asked.corpus))
            if asked.device == plan.CPU:
                warn_of_emulation(asked.precision)
            if asked.timing:
                turns.measure(chosen, kept, asked.rounds)
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

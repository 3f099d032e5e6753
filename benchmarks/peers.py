"""Duet's training loop against a hand-written bare loop (the limit), accelerate, Lightning and
Hugging Face's Trainer.

    make peers    once: installs the peers beside .venv
    python -m benchmarks.peers [--shapes=small,big] [--precision=fp32|bf16|both] [--rounds=7]
                               [--probe] [--json=FILE]

All use Duet's GPT, batches of the same corpus, fused AdamW, a constant learning rate, gradients
clipped at 1.0, one process, one thread, on the CPU. Duet is the complete train.py with its run
directory, metrics.jsonl, heartbeat and inspection; the peers run without logging, progress and
checkpoints, so Duet's TensorBoard files are off too and measured in a separate row.

Each measurement is a new process; rounds are interleaved, and each starts with another contender. A
step is measured from the end of one to the end of the next, so it includes all work in between; the
first ten are skipped. Ratios are taken within a round. Memory is the peak of the whole process; for
Duet it includes the checkpoint at the end. --probe: overhead of a loop at batch 1, in ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common import PEERS, measured, prepared, train_command
from training.core.rundir import RunDir, read_records

WARM_STEPS = 10


@dataclass(frozen=True)
class Shape:
    """Model and batch; width is depth × 64."""

    depth: int
    seq_len: int
    batch: int  # sequences
    steps: int  # measured steps

    def __str__(self) -> str:
        return f"depth {self.depth}, width {self.depth * 64}, {self.batch} × {self.seq_len} tokens"


SHAPES = {
    "small": Shape(2, 64, 12, 200),
    "big": Shape(4, 256, 8, 30),
    "probe": Shape(2, 64, 1, 500),
}
BARE, DUET = "bare loop", "Duet"
# name → (module of benchmarks.contenders, package it needs); "" is train.py itself
CONTENDERS = {
    BARE: ("bare", ""),
    DUET: ("", ""),
    "Duet + TensorBoard": ("", ""),
    "accelerate": ("with_accelerate", "accelerate"),
    "Lightning": ("with_lightning", "lightning"),
    "HF Trainer": ("with_hf_trainer", "transformers"),
}


@dataclass(frozen=True)
class Sample:
    """Measurement of one process."""

    median_ms: float
    mean_ms: float
    peak_mib: float
    loss: float  # of the last step


def sample(stamps: list[float], peak_mib: float, loss: float) -> Sample:
    steps = [
        1000 * (b - a) for a, b in zip(stamps[WARM_STEPS - 1 :], stamps[WARM_STEPS:], strict=False)
    ]
    return Sample(statistics.median(steps), statistics.fmean(steps), peak_mib, loss)


def measure(name: str, shape: Shape, precision: str, vocab: int, shard: str) -> Sample:
    steps = shape.steps + WARM_STEPS
    module, package = CONTENDERS[name]
    if not module:
        return duet(shape, precision, steps, tensorboard=name != DUET)
    job = {
        "depth": shape.depth,
        "seq_len": shape.seq_len,
        "batch": shape.batch,
        "precision": precision,
        "steps": steps,
    }
    argv = [
        sys.executable,
        "-m",
        "benchmarks.contenders",
        module,
        json.dumps(job | {"vocab": vocab, "shard": shard}),
    ]
    text, peak_mib = measured(argv, **({"PYTHONPATH": str(PEERS)} if package else {}))
    trace = json.loads(text.splitlines()[-1])
    return sample(trace["stamps"], peak_mib, trace["loss"])


def duet(shape: Shape, precision: str, steps: int, *, tensorboard: bool) -> Sample:
    """train.py with AdamW instead of Muon and a constant rate, as in the others; defaults
    otherwise."""
    flags: dict[str, Any] = {
        "depth": shape.depth,
        "max_seq_len": shape.seq_len,
        "device_batch_size": shape.batch,
    }
    flags |= {
        "total_batch_size": shape.batch * shape.seq_len,
        "num_iterations": steps,
        "precision": precision,
        "eval_every": 0,
    }
    flags |= {
        "optimizer": "adamw",
        "warmup_ratio": 0,
        "warmdown_ratio": 0,
        "tensorboard": str(tensorboard).lower(),
    }
    with tempfile.TemporaryDirectory() as folder:
        _, peak_mib = measured(train_command(Path(folder), **flags))
        records = [r for r in read_records(RunDir(Path(folder, "run")).metrics) if "step_ms" in r]
    return sample([r["time"] for r in records], peak_mib, records[-1]["loss"])


def table(samples: dict[str, list[Sample]]) -> list[str]:
    """Table lines: medians over the rounds; ratios to the bare loop within the same round."""
    lines = [
        f"{'':<20}{'ms/step':>9}{'min':>9}{'max':>9}{'ratio':>8}{'min–max':>13}{'mean':>7}"
        f"{'added':>12}{'peak MiB':>10}{'ratio':>7}"
    ]
    for name, own in samples.items():
        pairs = list(zip(own, samples[BARE], strict=True))
        times = [s.median_ms for s in own]
        ratios = [s.median_ms / b.median_ms for s, b in pairs]
        means = statistics.median(s.mean_ms / b.mean_ms for s, b in pairs)
        added = statistics.median(s.median_ms - b.median_ms for s, b in pairs)
        memory = statistics.median(s.peak_mib for s in own)
        more = statistics.median(s.peak_mib / b.peak_mib for s, b in pairs)
        spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
        lines.append(
            f"{name:<20}{statistics.median(times):9.2f}{min(times):9.2f}{max(times):9.2f}{statistics.median(ratios):8.3f}"
            f"{spread:>13}{means:7.3f}{added:+9.2f} ms{memory:10.0f}{more:7.3f}"
        )
    return lines


def same_work(samples: dict[str, list[Sample]]) -> str:
    """Message about the final losses, which must agree; Duet's data order differs, so its loss is
    skipped."""
    losses = {name: own[0].loss for name, own in samples.items() if CONTENDERS[name][0]}
    low, high = min(losses.values()), max(losses.values())
    if high - low > 1e-3 * high:
        return f"NOT THE SAME WORK: losses of the last step differ: {losses}"
    return f"loss of the last step: {low:.4f} in {', '.join(losses)}"


def lacking(names: list[str]) -> list[str]:
    """Packages that are not installed."""
    return [
        package
        for _, package in map(CONTENDERS.__getitem__, names)
        if package and not (PEERS / package).is_dir()
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", default="small,big", help="comma-separated, of small, big; or none"
    )
    parser.add_argument("--precision", default="both", choices=("fp32", "bf16", "both"))
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="measured steps per process, instead of each shape's default",
    )
    parser.add_argument(
        "--probe", action="store_true", help="also measure batch 1 of the small model, fp32"
    )
    parser.add_argument(
        "--only", default="", help=f"of {', '.join(CONTENDERS)}; the bare loop is always included"
    )
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    wanted = parser.parse_args()
    wanted.shapes = [] if wanted.shapes == "none" else wanted.shapes.split(",")
    wanted.only = [
        n for n in CONTENDERS if n == BARE or not wanted.only or n in wanted.only.split(",")
    ]
    if unknown := [name for name in wanted.shapes if name not in SHAPES]:
        parser.error(f"--shapes: unknown shape {', '.join(unknown)}; allowed: small, big")
    if packages := lacking(wanted.only):
        sys.exit(
            f"not installed: {', '.join(packages)}\n    try:     make peers\n    or:      "
            f"--only='{BARE},{DUET}'"
        )
    return wanted


def main() -> None:
    wanted, data = arguments(), prepared()
    precisions = ["fp32", "bf16"] if wanted.precision == "both" else [wanted.precision]
    cases = [(shape, precision) for shape in wanted.shapes for precision in precisions] + [
        ("probe", "fp32")
    ] * wanted.probe
    samples: dict[tuple[str, str], dict[str, list[Sample]]] = {
        case: {name: [] for name in wanted.only} for case in cases
    }
    with tqdm(
        total=wanted.rounds * len(cases) * len(wanted.only), unit="process", disable=None
    ) as bar:
        for number in range(wanted.rounds):
            turn = number % len(wanted.only)
            for name, precision in cases:
                shape = replace(SHAPES[name], steps=wanted.steps or SHAPES[name].steps)
                for contender in wanted.only[turn:] + wanted.only[:turn]:
                    bar.set_postfix_str(f"{name} {precision} {contender}")
                    samples[name, precision][contender].append(
                        measure(contender, shape, precision, data.vocab, str(data.train[0]))
                    )
                    bar.update()
    for (name, precision), found in samples.items():
        print(f"\n{name}, {precision}: {SHAPES[name]}", *table(found), same_work(found), sep="\n")
    if {("big", "fp32"), ("big", "bf16")} <= set(samples) and DUET in wanted.only:
        limits, fast = samples["big", "fp32"][BARE], samples["big", "bf16"][DUET]
        ratio = statistics.median(
            limit.median_ms / own.median_ms for limit, own in zip(limits, fast, strict=True)
        )
        print(
            f"\nbig: tokens/s of {DUET} in bf16 (its choice on this kind of CPU) are {ratio:.2f} × "
            f"those of a bare loop in fp32,"
        )
        print("which loops with bf16 on GPUs only use (nanoGPT, nanochat)")
    if wanted.json:
        kept = {
            " ".join(case): {name: [vars(s) for s in own] for name, own in found.items()}
            for case, found in samples.items()
        }
        wanted.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

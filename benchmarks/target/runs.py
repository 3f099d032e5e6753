"""The complete trainings in a folder, and their execution."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, environment, prepared, train_command
from benchmarks.gpu.machine import commit
from benchmarks.target import BATCH, DEPTH, EVAL_TOKENS, SEQ_LEN, texts
from benchmarks.target.plan import CUDA, DUET, Training, of_nanochat
from training.core.rundir import RunDir, read_json, read_records, write_json
from training.host import process

SAVE_EVERY = 25  # steps
CURVES = ("loss", "val_bpb")  # in a record: [step, value], …
POLL_S = 0.5
UNKNOWN = "unknown"  # version of nanochat in older files
STOP_S = 120.0  # a step on a busy machine
LABELS = {
    "gpt2": "GPT-2, AdamW {:g}",
    "nanochat": "nanochat, rates × {:g}",
    "nanochat_windows": "nanochat with windows, rates × {:g}",
    DUET: "Duet, defaults",
}


def label(training: Training) -> str:
    return LABELS[training.contender].format(training.rate)


def shown(bpb: float, digits: int) -> str:
    return f"{bpb:.{digits}f}" if math.isfinite(bpb) else "diverged"


Record = dict[str, Any]


def finals(trainings: Mapping[Training, Record]) -> dict[Training, float]:
    """Final validation losses; infinite after a divergence, since NaN is worse than nothing."""
    found = {one: record["val_bpb"][-1][1] for one, record in trainings.items()}
    return {one: math.inf if math.isnan(bpb) else bpb for one, bpb in found.items()}


def nanochats(trainings: Mapping[Training, Record]) -> set[str]:
    """Versions of nanochat."""
    return {
        record.get("nanochat", UNKNOWN)
        for one, record in trainings.items()
        if of_nanochat(one.contender)
    }


class Kept:
    """One file for each complete training. `nanochat`: the version of the checkout."""

    def __init__(self, folder: Path, nanochat: str = "") -> None:
        self.folder, self.nanochat = folder, nanochat

    def losses(self) -> dict[Training, float]:
        return finals(self.trainings())

    def trainings(self) -> dict[Training, Record]:
        """Their records. Raises SystemExit for a file that is not complete, which would be repeated
        silently."""
        found = {}
        for path in sorted(self.folder.glob("*-seed*.json")):
            try:
                record = read_json(path) or {}
                for name in CURVES:  # in a file NaN is a word
                    record[name] = [[step, float(value)] for step, value in record[name]]
                found[Training(**record["training"])] = record
            except (KeyError, TypeError, ValueError):
                sys.exit(f"{path} is not a complete record of a training")
        return found

    def add(self, training: Training, records: Path) -> float:
        """Returns the final validation loss."""
        curve = read(records)
        if len(curve.loss) != training.steps:
            sys.exit(f"{training.name} made {len(curve.loss)} steps of {training.steps}")
        val = sorted(curve.val_bpb.items())
        # The mean since the validation before: the loss of one batch is noise.
        starts = [0, *(step for step, _ in val)]
        losses = [
            [end, round(statistics.fmean(curve.loss[n] for n in range(start + 1, end + 1)), 5)]
            for start, end in itertools.pairwise(starts)
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {"commit": commit(), "torch": version("torch")}
        about |= {"nanochat": self.nanochat} if of_nanochat(training.contender) else {}
        found: dict[str, object] = {"training": asdict(training), **about}
        val_bpb = [[step, round(bpb, 5)] for step, bpb in val]
        found |= dict(zip(CURVES, (losses, val_bpb), strict=True))
        write_json(self.folder / f"{training.name}.json", found)
        return val[-1][1]


@dataclass
class Curve:
    """By step, from 1: a resumed training repeats some."""

    loss: dict[int, float]
    val_bpb: dict[int, float]
    time: dict[int, float]  # unix s at the end of the step


def read(path: Path) -> Curve:
    curve = Curve({}, {}, {})
    for record in read_records(path):
        if "val_bpb" in record:
            curve.val_bpb[record["step"]] = record["val_bpb"]
        else:
            curve.loss[record["step"]] = record["loss"]
            curve.time[record["step"]] = record["time"]
    return curve


def records(training: Training, folder: Path) -> Path:
    return (
        RunDir(folder / "run").metrics if training.contender == DUET else folder / "records.jsonl"
    )


class Process:
    """A training in a folder of its own, continued if it was interrupted."""

    def __init__(
        self, training: Training, folder: Path, eval_every: int, save_every: int = SAVE_EVERY
    ) -> None:
        self.training, self.folder = training, folder
        self.records = records(training, folder)
        own = _flags(training) | {"eval_every": eval_every, "save_every": save_every}
        if any((folder / "run").glob("checkpoints/*")):
            own |= {"resume": folder / "run"}
        else:  # of a run without a checkpoint
            shutil.rmtree(folder / "run", ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        if training.contender == DUET:
            flags = train_command(folder, **own)[2:]
            argv = [sys.executable, "-m", "benchmarks.target.first_text", *flags]
        else:
            job = json.dumps(
                _job(training)
                | {"eval_every": eval_every, "save_every": save_every, "out": str(self.records)}
            )
            argv = [sys.executable, "-m", f"benchmarks.contenders.{training.contender}", job]
        with (folder / "errors").open("w") as errors:
            self.process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=_environment(training),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                # Two that continue the same training would write into one file.
                preexec_fn=functools.partial(  # noqa: PLW1509 – one thread
                    process.die_with_parent, os.getpid(), signal.SIGTERM
                ),
            )

    def ended(self) -> bool:
        """Raises SystemExit if it has failed."""
        if self.process.poll() is None:
            return False
        if self.process.returncode:
            errors = (self.folder / "errors").read_text(errors="replace")
            sys.exit(f"{self.training.name} failed ({self.process.returncode}):\n{errors[-3000:]}")
        return True


def stop(processes: Sequence[Process]) -> None:
    """Duet completes its step and saves."""
    for one in processes:
        one.process.send_signal(signal.SIGCONT)
        one.process.terminate()
    for one in processes:
        try:
            one.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()


def _environment(training: Training) -> dict[str, str]:
    if training.device != CUDA:
        return environment()
    return environment(CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))


def _flags(training: Training) -> dict[str, object]:
    sizes = {"depth": DEPTH, "max_seq_len": SEQ_LEN, "device_batch_size": BATCH}
    return {
        **sizes,
        "total_batch_size": BATCH * SEQ_LEN,
        "num_iterations": training.steps,
        "seed": training.seed,
        "precision": training.precision,
        "device": training.device,
        "eval_tokens": EVAL_TOKENS,
        "keep_checkpoints": 1,
        "data": texts.data(training.corpus),
    }


def _job(training: Training) -> dict[str, object]:
    data = prepared(texts.data(training.corpus))
    corpus: dict[str, object] = {"vocab": data.vocab, "bos": data.bos}
    corpus |= {"train": str(data.train[0]), "val": str(data.val[0])}
    return {
        **corpus,
        "depth": DEPTH,
        "seq_len": SEQ_LEN,
        "batch": BATCH,
        "steps": training.steps,
        "rate": training.rate,
        "seed": training.seed,
        "bf16": training.precision == "bf16",
        "device": training.device,
        "eval_tokens": EVAL_TOKENS,
    }


def complete(
    kept: Kept,
    wanted: Callable[[dict[Training, float]], list[Training]],
    parallel: int,
    every: int,
    scratch: Path,
) -> None:
    """Run what is wanted, `parallel` at a time, until nothing is; what no longer is, is stopped.
    Raises SystemExit at the first failure. Trainings that are not complete continue from `scratch`
    in the next call."""
    running: list[Process] = []
    try:
        while True:
            for one in [one for one in running if one.ended()]:
                running.remove(one)
                _keep(kept, one.training, one.folder)
            needed = wanted(kept.losses())
            for one in [one for one in running if one.training not in needed]:
                running.remove(one)
                stop([one])
            while len(running) < parallel:
                busy = {one.training for one in running}
                waiting = [t for t in wanted(kept.losses()) if t not in busy]
                if not waiting:
                    break
                training, folder = waiting[0], scratch / _state(waiting[0], kept.nanochat)
                if training.steps in read(records(training, folder)).val_bpb:
                    _keep(kept, training, folder)  # complete when this program was killed
                else:
                    running.append(Process(training, folder, every))
            if not running:
                return
            time.sleep(POLL_S)
    finally:
        stop(running)


def _state(training: Training, nanochat: str) -> str:
    """Name of the folder of a training that is not complete: another nanochat starts at step 0."""
    return f"{training.name}-{nanochat}" if of_nanochat(training.contender) else training.name


def _keep(kept: Kept, training: Training, folder: Path) -> None:
    final = kept.add(training, records(training, folder))
    shutil.rmtree(folder)
    name, steps = label(training), training.steps
    print(f"{name:<24}{steps:>6} steps, seed {training.seed}: {shown(final, 4)}", flush=True)

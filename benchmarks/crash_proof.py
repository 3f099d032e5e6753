"""What must be true of a run that was killed again and again: compared with the run that nobody
touched."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.core import manifest
from training.core.rundir import RunDir, read_json, read_records

# Times and memory in a metrics record: all else is the same in every run.
MEASURED = ("time", "tokens_per_s", "step_ms", "eval_ms", "compute_ms", "memory_bytes", "mfu")
SAME = (
    "status",
    "steps",
    "tokens",
    "loss_first",
    "loss_last",
    "val_bpb_first",
    "val_bpb_last",
    "sample",
    "checkpoint",
)

Record = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """The uninterrupted run: the checksum of every checkpoint's state (weights and optimizer),
    every metrics record, the summary."""

    states: dict[int, str]
    records: dict[tuple[int, str], Record]
    summary: Record

    @property
    def steps(self) -> int:
        return max(self.states)

    @property
    def every(self) -> int:
        """Steps between two checkpoints."""
        return min(self.states)


def reference(run: RunDir) -> Reference:
    """Of a run that has kept all its checkpoints. Raises SystemExit when it is not whole."""
    states = {
        int(path.name.removeprefix("step_")): checksum(path / "state.pt")
        for path in manifest.all_in(run.checkpoints)
    }
    summary = read_json(run.summary)
    if not summary or summary["steps"] not in states:
        raise SystemExit(f"the uninterrupted run in {run.path} has not finished")
    return Reference(
        states, {key(record): essence(record) for record in read_records(run.metrics)}, summary
    )


def key(record: Record) -> tuple[int, str]:
    """A step has up to two records: of the training, and of its evaluation."""
    return record["step"], "val_loss" if "val_loss" in record else "loss"


def essence(record: Record) -> Record:
    return {name: value for name, value in record.items() if name not in MEASURED}


def checksum(state: Path) -> str:
    return hashlib.sha256(state.read_bytes()).hexdigest()


def damaged(run: RunDir, whole: Reference) -> list[str]:
    """A folder that is named like a checkpoint is one: whole, and bit for bit what the
    uninterrupted run had at that step."""
    found = []
    for path in manifest.all_in(run.checkpoints):
        facts, wrong = manifest.read(path)
        if wrong or facts is None:
            found.append(f"{path.name}: {wrong}")
            continue
        try:
            state = checksum(path / "state.pt")
        except OSError as error:
            found.append(f"{path.name}: state.pt can not be read: {error.strerror}")
            continue
        if state != facts["sha256"]:
            found.append(f"{path.name}: state.pt does not match its checksum")
        elif state != whole.states.get(facts["step"]):
            found.append(f"{path.name}: other weights than the uninterrupted run")
    return found


def newest(run: RunDir) -> int:
    """Step of the newest checkpoint, 0 without one. Called after damaged()."""
    return max(
        (int(path.name.removeprefix("step_")) for path in manifest.all_in(run.checkpoints)),
        default=0,
    )


def half_written(run: RunDir) -> bool:
    """Did the kill come while a checkpoint was written?"""
    return (
        any(path.name.startswith(".") for path in run.checkpoints.iterdir())
        if run.checkpoints.is_dir()
        else False
    )


@dataclass
class Continuity:
    """Follows events.jsonl over all starts of a run: each begins at the checkpoint that was the
    newest on the disk, and what was announced as saved is there."""

    run: RunDir
    on_disk: int = 0  # when the last kill was over
    _read: int = field(default=0, init=False)
    _announced: int = field(default=0, init=False)

    def problems(self, on_disk: int) -> list[str]:
        """`on_disk`: the newest checkpoint now, with no rank alive that could write another."""
        events, found = list(read_records(self.run.events)), []
        for event in events[self._read :]:
            if event["event"] == "checkpoint":
                self._announced = event["step"]
            elif event["event"] == "start":
                if event["step"] != self.on_disk:
                    found.append(
                        f"started at step {event['step']}, the newest checkpoint was of step "
                        f"{self.on_disk}"
                    )
                self._announced = event["step"]
        if on_disk < self._announced:
            found.append(
                f"step {self._announced} was announced as saved, the newest checkpoint is of step "
                f"{on_disk}"
            )
        self._read, self.on_disk = len(events), on_disk
        return found


def lost(begun: int, saved: int) -> int:
    """Steps that are trained once more; one that had only been begun counts."""
    return max(0, begun - saved)


def most_lost(whole: Reference) -> int:
    """While one checkpoint is written the training goes on, but never beyond the next one that is
    due."""
    return 2 * whole.every


def wrong_records(records: Sequence[Record], whole: Reference) -> list[str]:
    """Whatever was ever written down, also by starts that were killed later, is what the
    uninterrupted run has written."""
    found, seen = [], set()
    for record in records:
        seen.add(key(record))
        expected = whole.records.get(key(record))
        if essence(record) != expected:
            found.append(f"metrics.jsonl has {essence(record)}, the uninterrupted run {expected}")
    if missing := sorted(set(whole.records) - seen):
        found.append(
            f"metrics.jsonl lacks "
            f"{', '.join(f'{what} of step {step}' for step, what in missing[:5])}"
        )
    return found


def wrong_end(run: RunDir, whole: Reference) -> list[str]:
    """A run that has come to its end after all: weights, every loss, the summary; no sign of
    trouble is left."""
    summary = read_json(run.summary) or {}
    found = [f"the end: {problem}" for problem in damaged(run, whole)]
    if newest(run) != whole.steps:
        found.append(f"the last checkpoint is of step {newest(run)}, not {whole.steps}")
    found += wrong_records(list(read_records(run.metrics)), whole)
    found += [
        f"summary.json: {n} is {summary.get(n)!r}, not {whole.summary[n]!r}"
        for n in SAME
        if summary.get(n) != whole.summary[n]
    ]
    found += [
        f"{path.name} is left after the end"
        for path in (run.failure, run.plan_before)
        if path.exists()
    ]
    if half_written(run):
        found.append(f"half a checkpoint is left in {run.checkpoints}")
    return found

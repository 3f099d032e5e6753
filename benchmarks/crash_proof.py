"""Checks of a repeatedly killed run against an uninterrupted one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.core import manifest
from training.core.rundir import RunDir, read_json, read_records

# Times and memory in a metrics record; all other fields are the same in every run.
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
    """The uninterrupted run: checksums of every checkpoint's state (weights and optimizer), all
    metrics records, the summary."""

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
    """Reference from a run that kept all its checkpoints. Raises SystemExit if it is incomplete."""
    states = {
        int(path.name.removeprefix("step_")): checksum(path / "state.pt")
        for path in manifest.all_in(run.checkpoints)
    }
    summary = read_json(run.summary)
    if not summary or summary["steps"] not in states:
        raise SystemExit(f"the uninterrupted run in {run.path} did not finish")
    return Reference(
        states, {key(record): essence(record) for record in read_records(run.metrics)}, summary
    )


def key(record: Record) -> tuple[int, str]:
    """Key of a record: a step has up to two, one of the training and one of its evaluation."""
    return record["step"], "val_loss" if "val_loss" in record else "loss"


def essence(record: Record) -> Record:
    return {name: value for name, value in record.items() if name not in MEASURED}


def checksum(state: Path) -> str:
    return hashlib.sha256(state.read_bytes()).hexdigest()


def damaged(run: RunDir, whole: Reference) -> list[str]:
    """Checkpoints that are incomplete, or not bit-identical to the uninterrupted run at that
    step."""
    found = []
    for path in manifest.all_in(run.checkpoints):
        facts, wrong = manifest.read(path)
        if wrong or facts is None:
            found.append(f"{path.name}: {wrong}")
            continue
        try:
            state = checksum(path / "state.pt")
        except OSError as error:
            found.append(f"{path.name}: cannot read state.pt: {error.strerror}")
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
    """Whether the kill left a partial checkpoint."""
    return (
        any(path.name.startswith(".") for path in run.checkpoints.iterdir())
        if run.checkpoints.is_dir()
        else False
    )


@dataclass
class Continuity:
    """Checks events.jsonl over all starts of a run: each starts at the newest checkpoint on disk,
    and every announced checkpoint exists."""

    run: RunDir
    on_disk: int = 0  # newest checkpoint after the last kill
    _read: int = field(default=0, init=False)
    _announced: int = field(default=0, init=False)

    def launched(self) -> bool:
        """Has anything run since the last kill? A complete run is not started again."""
        return len(list(read_records(self.run.events))) > self._read

    def problems(self, on_disk: int) -> list[str]:
        """`on_disk`: the newest checkpoint now, with all ranks dead."""
        events, found = list(read_records(self.run.events)), []
        for event in events[self._read :]:
            if event["event"] == "checkpoint":
                self._announced = event["step"]
            elif event["event"] == "start":
                if event["step"] != self.on_disk:
                    found.append(
                        f"started at step {event['step']}, but the newest checkpoint was of step "
                        f"{self.on_disk}"
                    )
                self._announced = event["step"]
        if on_disk < self._announced:
            found.append(
                f"step {self._announced} was announced as saved, but the newest checkpoint is of "
                f"step {on_disk}"
            )
        self._read, self.on_disk = len(events), on_disk
        return found


def lost(begun: int, saved: int) -> int:
    """Steps to repeat, including one that had only begun."""
    return max(0, begun - saved)


def most_lost(whole: Reference) -> int:
    """Upper bound of lost steps: training continues while a checkpoint is written, but not beyond
    the next one."""
    return 2 * whole.every


def wrong_records(records: Sequence[Record], whole: Reference) -> list[str]:
    """Metrics records, also of starts that were killed later, that differ from the uninterrupted
    run."""
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


def wrong_end(run: RunDir, whole: Reference, *, launched: bool = True) -> list[str]:
    """Differences of a finished run from the uninterrupted one: weights, losses, summary, leftover
    files. `launched`: by the last start; without it, the run was complete when it was killed, maybe
    in its sample, which comes last."""
    summary = read_json(run.summary) or {}
    same = [n for n in SAME if launched or n != "sample" or summary.get(n) is not None]
    found = [f"the end: {problem}" for problem in damaged(run, whole)]
    if newest(run) != whole.steps:
        found.append(f"the last checkpoint is of step {newest(run)}, not {whole.steps}")
    found += wrong_records(list(read_records(run.metrics)), whole)
    found += [
        f"summary.json: {n} is {summary.get(n)!r}, not {whole.summary[n]!r}"
        for n in same
        if summary.get(n) != whole.summary[n]
    ]
    found += [
        f"{path.name} is left over" for path in (run.failure, run.plan_before) if path.exists()
    ]
    if half_written(run):
        found.append(f"a partial checkpoint is left in {run.checkpoints}")
    return found

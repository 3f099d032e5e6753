"""Evaluations of a run, and the checkpoint with the best one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from training.core import json_text, jsonl, last_resume, manifest, metric_units
from training.core.jsonl import Record, number, whole
from training.core.last_resume import LastResume
from training.core.rundir import RunDir

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord


def read(file: Path) -> tuple[dict[int, Record], float, LastResume | None]:
    """From events.jsonl: (evaluations by step, of which a resume has discarded the later ones; time
    of the last restart; the last resume)."""
    return _kept(_events(file))


def discarded(file: Path) -> set[int]:
    """From events.jsonl: the steps whose evaluation a resume has discarded, without those that were
    evaluated again."""
    events = _events(file)
    evaluated = (whole(e.get("step")) for e in events if e.get("event") == "eval")
    return {step for step in evaluated if step is not None} - _kept(events)[0].keys()


def _kept(events: Iterable[Record]) -> tuple[dict[int, Record], float, LastResume | None]:
    evaluations: dict[int, Record] = {}
    restarted = 0.0
    resumed: LastResume | None = None
    for record in events:
        kind, step = record.get("event"), whole(record.get("step"))
        if kind == "restart":
            restarted = max(restarted, number(record.get("time")) or 0.0)
        elif kind == "eval" and step is not None:
            evaluations[step] = record
        elif (found := last_resume.after(resumed, record)) and found is not resumed:
            resumed = found
            evaluations = {s: r for s, r in evaluations.items() if s <= found.step}
    return evaluations, restarted, resumed


def _events(file: Path) -> list[Record]:
    """The events that decide which evaluations count, parsed in one call: one for each would take
    three times as long. Most of the file are checkpoints."""
    try:
        content = file.read_bytes()
    except OSError:
        return []
    lines = [
        line
        for line in content.split(b"\n")
        if b'"eval"' in line or b'"resume"' in line or b'"start"' in line or b'"restart"' in line
    ]
    try:
        records = json_text.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):  # a line cut by a crash
        records = [jsonl.parse(line) for line in lines]
    return [record for record in records if isinstance(record, dict)]


class Scored(NamedTuple):
    """A checkpoint with the score of the evaluation at its own step."""

    path: Path
    name: str  # val_NAME
    value: float
    facts: ManifestRecord


def best_checkpoint(
    checkpoints: Iterable[Path], now: ManifestRecord | None = None
) -> Scored | None:
    """The checkpoint with the best evaluation, the first of equal ones; None: none was evaluated.
    `checkpoints`: of one run, oldest first; damaged manifests are skipped. `now`: only scores of
    the validation data of this manifest are compared, by default that of the last one.

    The score is in the manifest; that of a checkpoint of early 0.1 in events.jsonl.
    """
    found: list[Scored] = []
    recorded: dict[int, Record] | None = None
    for path in checkpoints:
        facts = manifest.read(path)[0]
        if facts is None:
            continue
        if "score" in facts:
            score = facts["score"]
            if score:
                found.append(Scored(path, score["name"], score["value"], facts))
            continue
        if recorded is None:
            recorded = read(RunDir(path.parent.parent).events)[0]
        if main := metric_units.main_score(recorded.get(facts["step"], {})):
            found.append(Scored(path, *main, facts))
    if not found:
        return None
    current = json_text.as_stored(now or found[-1].facts)
    found = [one for one in found if _same_validation(one.facts, current)]
    if not found:
        return None
    name = found[-1].name  # other ones are from before a change of the task's metrics
    same = [one for one in found if one.name == name]
    return min(same, key=lambda one: metric_units.rank_of(name, one.value))


def _same_validation(one: ManifestRecord, other: ManifestRecord) -> bool:
    """Whether the scores of two manifests were measured on the same data, and as much of it."""
    measured = [facts["measured"] for facts in (one, other) if "measured" in facts]
    if len(measured) == 2 and measured[0] != measured[1]:
        return False
    # Only one of them is of early 0.1, where the scores of clips were those of unrounded colours.
    if len(measured) == 1 and "frames" in measured[0]:
        return False
    return _same_data(one.get("data"), other.get("data"))


def _same_data(one: Any, other: Any) -> bool:
    """As far as it is known."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        # video restoration of early 0.1 has one digest of all parts: unknown
        return type(one) is not type(other) or bool(one == other)
    if "val" in one and "val" in other:
        return bool(one["val"] == other["val"])
    kept = [{n: v for n, v in data.items() if n != "folder"} for data in (one, other)]
    return bool(kept[0] == kept[1])

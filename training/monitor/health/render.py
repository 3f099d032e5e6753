"""The health report as one screen, or as one JSON object."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from training.core.cells import cells, pad
from training.core.messages import msg
from training.core.units import GIB
from training.monitor.health.check import BAD, OK, UNKNOWN, WARN
from training.monitor.health.health import ANSWER_UNKNOWN, HAS_ENDED, NO, YES, HealthReport
from training.monitor.process_states import process_word
from training.monitor.term_text import STYLES, clean

if TYPE_CHECKING:
    from training.core.contracts.state import HealthRecord, HealthRow

SCHEMA_VERSION = 1
LOOKS = {OK: "good", WARN: "warn", BAD: "bad", UNKNOWN: "dim"}
ANSWERS = {YES: "good", NO: "bad", ANSWER_UNKNOWN: "warn", HAS_ENDED: "bold"}
ROWS = 16  # of ranks; of more ranks, those with problems come first


def screen(report: HealthReport, *, colour: bool = False) -> list[str]:
    """Lines of text; control sequences from files and processes are removed."""
    rest = clean(report.headline.removeprefix(report.word))
    lines = [f"{_styled(report.word, ANSWERS[report.answer], colour)}{rest}", *_subject(report)]
    marks = {
        OK: msg("monitor.health.mark.ok"),
        WARN: msg("monitor.health.mark.warn"),
        BAD: msg("monitor.health.mark.bad"),
        UNKNOWN: "?",
    }
    wide = max((cells(check.shown_name) for check in report.checks), default=0)
    for check in report.checks:
        mark = _styled(pad(marks[check.status], 4), LOOKS[check.status], colour)
        lines.append(f"  {mark}  {pad(check.shown_name, wide)}  {clean(check.text)}")
    return [*lines, *_table(report)]


def record(report: HealthReport) -> HealthRecord:
    """For --json: units are in the keys; null means unknown."""
    target, run = report.target, report.run
    value: HealthRecord = {
        "schema_version": SCHEMA_VERSION,
        "time_unix_s": time.time(),
        "answer": report.answer,
        "text": report.headline,
        "exit_code": int(report.code),
        "looked_s": round(report.looked_s, 2),
        "run": {
            "name": run.name,
            "dir": str(run.path),
            "state": report.state["run"]["state"] if report.state else None,
        }
        if run
        else None,
        "ranks_expected": target.world
        if target
        else (report.state["run"]["ranks"] if report.state else None),
        "ranks_here": len(target.pids) if target else 0,
        "checks": [
            {"name": c.name, "status": c.status, "text": c.text, "ranks": list(c.ranks)}
            for c in report.checks
        ],
        "ranks": report.ranks,
    }
    return value


def _subject(report: HealthReport) -> list[str]:
    if report.run is None:
        pids = sorted(report.target.pids.values()) if report.target else []
        what = msg(
            "monitor.health.no_run",
            pids=", ".join(map(str, pids[:4])) + (", …" if len(pids) > 4 else ""),
        )
    else:
        what = msg(
            "monitor.health.run", name=clean(report.run.name), path=clean(str(report.run.path))
        )
    if report.looked_s:
        what += msg("monitor.health.observed", seconds=report.looked_s)
    return [f"  {what}"]


def _table(report: HealthReport) -> list[str]:
    """Table of the ranks, without empty columns."""
    rows = _chosen(report)
    if not rows:
        return []
    columns = {
        "rank": [str(r["rank"]) for r in rows],
        "pid": [_text(r["pid"]) for r in rows],
        "GPU": [_text(r.get("gpu")) for r in rows],
        msg("monitor.health.column.state"): [process_word(r.get("state")) for r in rows],
        msg("monitor.health.column.step"): [_step(r) for r in rows],
        "CPU": ["" if (cpu := r.get("cpu")) is None else f"{100 * cpu:.0f} %" for r in rows],
        msg("monitor.health.column.compute"): [
            "" if r.get("compute_ms_median") is None else f"{r['compute_ms_median']:.1f} ms"
            for r in rows
        ],
        (
            msg("monitor.health.column.allocated")
            if report.state and report.state["run"]["device"] == "cuda"
            else msg("monitor.health.column.memory")
        ): [_bytes(r.get("memory_bytes")) for r in rows],
        msg("monitor.health.column.gpu_memory"): [_bytes(r.get("gpu_memory_bytes")) for r in rows],
        msg("monitor.health.column.place"): [_place(r) for r in rows],
    }
    shown = {name: cells_ for name, cells_ in columns.items() if any(cells_)}
    wide = {name: max(cells(name), *map(cells, values)) for name, values in shown.items()}
    lines = ["", "  " + "  ".join(pad(name, wide[name]) for name in shown).rstrip()]
    for i in range(len(rows)):
        lines.append("  " + "  ".join(pad(shown[name][i], wide[name]) for name in shown).rstrip())
    left = len(report.ranks) - len(rows)
    return [*lines, "  " + msg("monitor.health.more_ranks", count=left)] if left else lines


def _chosen(report: HealthReport) -> list[HealthRow]:
    named = {rank for check in report.checks if check.status != OK for rank in check.ranks}
    first = sorted(report.ranks, key=lambda row: (row["rank"] not in named, row["rank"]))[:ROWS]
    return sorted(first, key=lambda row: row["rank"])


def _step(row: HealthRow) -> str:
    if row.get("step") is None:
        return ""
    return (
        f"{row['step_before']} → {row['step']}"
        if row.get("step_before") not in (None, row["step"])
        else str(row["step"])
    )


def _place(row: HealthRow) -> str:
    if phase := row.get("phase"):
        return clean(phase) + (
            ""
            if row.get("phase_s") is None
            else msg("monitor.health.phase_for", seconds=row["phase_s"])
        )
    name, place = row.get("waits_in"), row.get("where")
    if name and place:
        return clean(msg("monitor.health.waits_at", name=name, place=place))
    return clean(msg("monitor.health.work.waits_in", name=name) if name else place or "")


def _bytes(count: float | None) -> str:
    return "" if count is None else f"{count / GIB:.2f} GiB"


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _styled(text: str, style: str, colour: bool) -> str:
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if colour else text

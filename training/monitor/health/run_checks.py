"""Checks of a run's own files besides progress: data, parameters, loss, speed, memory, checkpoint,
findings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.core import metric_units, run_reader, units
from training.core.jsonl import dig, items, text, whole
from training.core.rundir import RunDir
from training.monitor import alerts
from training.monitor.health.activity import ActivityWindow
from training.monitor.health.check import BAD, OK, UNKNOWN, WARN, HealthCheck, alike, span
from training.monitor.health.target import Target

if TYPE_CHECKING:
    from training.core.contracts.events import EventRecord
    from training.core.contracts.state import RunState

GIB = 1 << 30
SHOWN = 3  # findings
CHECKED = (*alerts.CODES_OF_FULL, "alert.foreign_process")  # alerts that other checks cover
STARTS, NOTABLE = ("start", "restart"), ("restart", "warning", "verdict")  # kinds of events
UNEVEN = 1.2  # times the memory of another rank
LATE = 2  # a checkpoint is overdue after this many times the usual interval
SEE = "not visible from outside: see docs/inspection.md"


def events(run: RunDir) -> list[EventRecord]:
    """Events since the ranks were last started."""
    found: list[EventRecord] = []
    for event in run_reader.read_events(run.events):
        if event.get("event") in STARTS:
            found = [e for e in found[-1:] if e.get("event") == "restart"]
        found.append(event)
    return found


def of_run(
    target: Target, looked: ActivityWindow, state: RunState, happened: list[EventRecord]
) -> list[HealthCheck]:
    """Checks of a run with a Duet task."""
    return [
        speed(state),
        data(target, happened),
        parameters(target, looked, state, happened),
        loss(state),
        memory(state),
        checkpoint(target, state),
        *findings(happened),
    ]


def of_script(before: RunState | None, after: RunState | None) -> list[HealthCheck]:
    """Checks of a training without heartbeats, from two reads of its log."""
    checks = [HealthCheck("data", UNKNOWN, SEE), HealthCheck("parameters", UNKNOWN, SEE)]
    if before is None or after is None:
        return [
            *checks,
            HealthCheck("log", UNKNOWN, "its output is not in a readable file"),
        ]
    first, last, file = before["progress"]["step"], after["progress"]["step"], after["log"]["file"]
    if last is None:
        return [*checks, HealthCheck("log", UNKNOWN, f"no step recognised in {file}")]
    moved = f"step {first} → {last}" if first not in (None, last) else f"step {last}"
    checks.append(HealthCheck("log", OK, f"{moved} in {file}"))
    return [*checks, loss(after)] if after["training"]["loss"] is not None else checks


def speed(state: RunState) -> HealthCheck:
    """Compute time of each rank; names a rank that slows down the others."""
    own = {
        r["rank"]: median for r in state["ranks"] if (median := r["compute_ms_median"]) is not None
    }
    rate, step = metric_units.speed(state["training"]), state["training"]["step_ms_median"]
    if step is None:
        return HealthCheck("speed", UNKNOWN, "no step is recorded yet")
    whole_step = f"a step takes {step:.0f} ms"
    if rate is not None:
        whole_step += (
            f", {format(rate, '.0f' if rate >= 100 else '.3g')} {state['training']['unit']}/s"
        )
    slow = [alert for alert in state["alerts"] if alert["rank"] in own]
    if slow:
        return HealthCheck(
            "speed",
            WARN,
            f"{slow[0]['text']}; {whole_step}",
            tuple(rank for alert in slow if (rank := alert["rank"]) is not None),
        )
    if not own:
        return HealthCheck("speed", UNKNOWN, f"{whole_step}; no compute times are recorded")
    return HealthCheck(
        "speed",
        OK,
        f"{whole_step}; compute time of a rank {span(own.values(), 'ms', 1)}, none is slow",
    )


def data(target: Target, happened: list[EventRecord]) -> HealthCheck:
    """Each rank's share of the epoch, verified among the ranks at its start (event 'shards')."""
    event = next((e for e in reversed(happened) if e.get("event") == "shards"), None)
    reports = [r for r in items(dig(event, "ranks")) if isinstance(r, dict)]
    if event is None or not reports:
        return HealthCheck(
            "data", UNKNOWN, "the ranks' shares are not verified yet (event 'shards')"
        )
    pieces = metric_units.pieces(target.plan)
    epoch, proven, world = event.get("epoch"), whole(event.get("proven_sequences")), target.world
    sizes = {r.get("rank"): whole(r.get("dataset_sequences")) for r in reports}
    counts, batches = (
        [whole(r.get("count")) or 0 for r in reports],
        [whole(r.get("batches")) or 0 for r in reports],
    )
    sequences = whole(dig(target.plan, "batch", "device_sequences"))
    share = (
        f"{batches[0] * sequences} {pieces} in {batches[0]} batches"
        if sequences
        else f"{batches[0]} batches"
    )
    firsts = [tuple(items(r.get("first_sequences"))) for r in reports]
    if len(set(sizes.values())) > 1:
        differing = alike({int(r or 0): f"{size} {pieces}" for r, size in sizes.items()})
        return HealthCheck(
            "data",
            BAD,
            f"the ranks' datasets differ: {differing}",
            headline=f"the ranks' datasets differ: {differing}",
        )
    if world is not None and (
        len(reports) != world or any(whole(r.get("world_size")) != world for r in reports)
    ):
        headline = f"the data is divided among {len(reports)} ranks, but the plan has {world}"
        return HealthCheck("data", BAD, headline)
    if len({s for first in firsts for s in first}) < sum(map(len, firsts)) or len(set(counts)) > 1:
        return HealthCheck(
            "data", BAD, f"epoch {epoch}: the ranks' shares overlap or differ in size: {counts}"
        )
    whole_of = (
        f"epoch {epoch}: {sizes[reports[0].get('rank')]} {pieces}, {share} for each of "
        f"{len(reports)} ranks"
    )
    return HealthCheck(
        "data", OK, f"{whole_of}; disjoint and complete, verified for {proven} of them"
    )


def parameters(
    target: Target, looked: ActivityWindow, state: RunState, happened: list[EventRecord]
) -> HealthCheck:
    """Last step at which they were equal on all ranks; a run with unequal ones ends at once."""
    every = whole(dig(target.plan, "config", "inspect_every"))
    if not every:
        text = (
            "never compared (--inspect_every=0)"
            if every == 0
            else "unknown: inspect_every is missing in the plan"
        )
        return HealthCheck("parameters", WARN if every == 0 else UNKNOWN, text)
    begun = next((whole(e.get("step")) for e in happened if e.get("event") == "start"), None) or 0
    past = [m.after.step - 1 for m in looked.motions.values() if m.after and m.after.first_step]
    done = max(state["progress"]["step"] or 0, min(past, default=0))
    last = done - done % every or (1 if done else 0)
    if done <= begun or last <= begun:
        following = 1 if begun == 0 else begun + every - begun % every
        return HealthCheck(
            "parameters",
            UNKNOWN,
            f"not compared yet in this start; first comparison at step {following}",
        )
    return HealthCheck(
        "parameters",
        OK,
        f"equal on all ranks at step {last}, bit for bit; compared every {every} steps",
    )


def loss(state: RunState) -> HealthCheck:
    """Loss and gradient norm of the last step; they include all ranks."""
    training, progress = state["training"], state["progress"]
    value = training["loss"]
    if value is None:
        return HealthCheck("loss", UNKNOWN, "none recorded yet")
    factor, unit = metric_units.display(training)
    if not math.isfinite(value):
        return HealthCheck(
            "loss",
            BAD,
            f"{value} at step {progress['step']}",
            headline=f"the loss is {value} at step {progress['step']}",
        )
    norm = training["grad_norm"]
    more = "" if norm is None else f", gradient norm {norm:.3g}"
    if norm is not None and not math.isfinite(norm):
        return HealthCheck("loss", BAD, f"gradient norm {norm} at step {progress['step']}")
    return HealthCheck(
        "loss",
        OK,
        f"{units.decimal(value * factor)}{f' {unit}' if unit else ''} at step {progress['step']}, "
        f"finite{more}",
    )


def memory(state: RunState) -> HealthCheck:
    held = {
        r["rank"]: size / GIB for r in state["ranks"] if (size := r["memory_bytes"]) is not None
    }
    system = [alert["text"] for alert in state["alerts"] if alert["code"] in alerts.CODES_OF_FULL]
    shown = f"{span(held.values(), 'GiB', 2)} for each rank" if held else "none recorded yet"
    if held and max(held.values()) > UNEVEN * min(held.values()):
        shown += f", most on rank {max(held, key=lambda rank: held[rank])}"
    if system:
        return HealthCheck("memory", WARN, f"{'; '.join(system)}; {shown}")
    return HealthCheck("memory", OK if held else UNKNOWN, shown)


def checkpoint(target: Target, state: RunState) -> HealthCheck:
    """Age of the newest checkpoint, and whether the next is overdue."""
    every, step, found = (
        whole(dig(target.plan, "config", "save_every")),
        state["progress"]["step"] or 0,
        state["checkpoint"],
    )
    how = (
        "only at the end (--save_every=0)"
        if every == 0
        else f"every {every} steps"
        if every
        else "interval unknown"
    )
    if found is None:
        late = bool(every) and step > LATE * (every or 0)
        return HealthCheck("checkpoint", WARN if late else OK, f"none yet at step {step}; {how}")
    age = max(0.0, state["time_unix_s"] - (found["time_unix_s"] or state["time_unix_s"]))
    late = bool(every) and found["step"] is not None and step - found["step"] > LATE * (every or 0)
    behind = (
        f", {step - found['step']} steps ago"
        if found["step"] is not None and step >= found["step"]
        else ""
    )
    return HealthCheck(
        "checkpoint",
        WARN if late else OK,
        f"step {found['step']}, {duration(age)} old{behind}; {how}",
    )


def findings(happened: list[EventRecord]) -> list[HealthCheck]:
    """Warnings, verdicts and restarts since the start, and the last report of DDPInspector
    (docs/inspection.md) if it is used."""
    notable = [e for e in happened if e.get("event") in NOTABLE]
    checks = []
    if inspected := [
        report
        for e in happened
        if e.get("event") == "inspection" and (report := text(e.get("text")))
    ]:
        checks.append(HealthCheck("inspector", OK, inspected[-1]))
    if not notable:
        return [*checks, HealthCheck("findings", OK, "no warning since the start")]
    shown = "; ".join(f"{text(e.get('text')) or e['event']}{_at(e)}" for e in notable[-SHOWN:])
    more = f" (the last of {len(notable)})" if len(notable) > SHOWN else ""
    ranks = {rank for e in notable if (rank := whole(e.get("rank"))) is not None}
    return [*checks, HealthCheck("findings", WARN, f"{shown}{more}", tuple(sorted(ranks)))]


def attention(state: RunState) -> list[HealthCheck]:
    """Other alerts of the monitor: throttling, disks, the clock."""
    rest = [a["text"] for a in state["alerts"] if a["rank"] is None and a["code"] not in CHECKED]
    return [HealthCheck("attention", WARN, "; ".join(rest))] if rest else []


def _at(event: EventRecord) -> str:
    step = whole(event.get("step"))
    return (
        f" (step {step})"
        if step is not None and f"step {step}" not in str(event.get("text"))
        else ""
    )


def duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"

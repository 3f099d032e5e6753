"""Checks of a run's own files besides progress: data, parameters, loss, speed, memory, checkpoint,
findings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.core import metric_units, run_reader, units
from training.core.jsonl import dig, items, text, whole
from training.core.messages import msg
from training.core.rundir import RunDir
from training.core.units import GIB
from training.monitor import alerts
from training.monitor.health.activity import ActivityWindow
from training.monitor.health.check import (
    BAD,
    OK,
    UNKNOWN,
    WARN,
    HealthCheck,
    alike,
    separated,
    span,
)
from training.monitor.health.target import Target

if TYPE_CHECKING:
    from training.core.contracts.events import EventRecord
    from training.core.contracts.state import RunState

SHOWN = 3  # findings
CHECKED = (*alerts.CODES_OF_FULL, "alert.foreign_process")  # alerts that other checks cover
STARTS, NOTABLE = ("start", "restart"), ("restart", "warning", "verdict")  # kinds of events
UNEVEN = 1.2  # times the memory of another rank
LATE = 2  # a checkpoint is overdue after this many times the usual interval


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
    invisible = msg("monitor.health.invisible")
    checks = [HealthCheck(name, UNKNOWN, invisible) for name in ("data", "parameters")]
    if before is None or after is None:
        return [
            *checks,
            HealthCheck("log", UNKNOWN, msg("monitor.health.log.unreadable")),
        ]
    first, last, file = before["progress"]["step"], after["progress"]["step"], after["log"]["file"]
    if last is None:
        return [*checks, HealthCheck("log", UNKNOWN, msg("monitor.health.log.no_step", file=file))]
    moved = (
        msg("monitor.health.log.steps", first=first, last=last, file=file)
        if first not in (None, last)
        else msg("monitor.health.log.step", step=last, file=file)
    )
    checks.append(HealthCheck("log", OK, moved))
    return [*checks, _printed_loss(after)] if after["training"]["loss"] is not None else checks


def _printed_loss(state: RunState) -> HealthCheck:
    """The GradScaler of an fp16 training skips a step with an infinite gradient."""
    found, value = loss(state), state["training"]["loss"]
    if found.status != BAD or value is None or not math.isfinite(value):
        return found
    norm, step = state["training"]["grad_norm"], state["progress"]["step"]
    return HealthCheck("loss", WARN, msg("monitor.health.loss.norm_skipped", norm=norm, step=step))


def speed(state: RunState) -> HealthCheck:
    """Compute time of each rank; names a rank that slows down the others."""
    own = {
        r["rank"]: median for r in state["ranks"] if (median := r["compute_ms_median"]) is not None
    }
    rate, step = metric_units.speed(state["training"]), state["training"]["step_ms_median"]
    if step is None:
        return HealthCheck("speed", UNKNOWN, msg("monitor.health.speed.no_step"))
    whole_step = (
        msg("monitor.health.speed.step", step_ms=step)
        if rate is None
        else msg(
            "monitor.health.speed.step_and_rate",
            step_ms=step,
            rate=format(rate, ".0f" if rate >= 100 else ".3g"),
            unit=state["training"]["unit"],
        )
    )
    slow = [alert for alert in state["alerts"] if alert["rank"] in own]
    if slow:
        return HealthCheck(
            "speed",
            WARN,
            separated([slow[0]["text"], whole_step]),
            tuple(rank for alert in slow if (rank := alert["rank"]) is not None),
        )
    if not own:
        unknown = msg("monitor.health.speed.no_compute")
        return HealthCheck("speed", UNKNOWN, separated([whole_step, unknown]))
    times = msg("monitor.health.speed.compute", times=span(own.values(), "ms", 1))
    return HealthCheck("speed", OK, separated([whole_step, times]))


def data(target: Target, happened: list[EventRecord]) -> HealthCheck:
    """Each rank's share of the epoch, verified among the ranks at its start (event 'shards')."""
    event = next((e for e in reversed(happened) if e.get("event") == "shards"), None)
    reports = [r for r in items(dig(event, "ranks")) if isinstance(r, dict)]
    if event is None or not reports:
        return HealthCheck("data", UNKNOWN, msg("monitor.health.data.unverified"))
    pieces = metric_units.pieces(target.plan)
    epoch, proven, world = event.get("epoch"), whole(event.get("proven_sequences")), target.world
    sizes = {r.get("rank"): whole(r.get("dataset_sequences")) for r in reports}
    counts, batches = (
        [whole(r.get("count")) or 0 for r in reports],
        [whole(r.get("batches")) or 0 for r in reports],
    )
    sequences = whole(dig(target.plan, "batch", "device_sequences"))
    share = (
        msg(
            "monitor.health.data.share",
            count=batches[0] * sequences,
            pieces=pieces,
            batches=batches[0],
        )
        if sequences
        else msg("monitor.health.data.batches", batches=batches[0])
    )
    firsts = [tuple(items(r.get("first_sequences"))) for r in reports]
    if len(set(sizes.values())) > 1:
        differing = alike({int(r or 0): f"{size} {pieces}" for r, size in sizes.items()})
        return HealthCheck("data", BAD, msg("monitor.health.data.differ", sizes=differing))
    if world is not None and (
        len(reports) != world or any(whole(r.get("world_size")) != world for r in reports)
    ):
        divided = msg("monitor.health.data.divided", ranks=len(reports), planned=world)
        return HealthCheck("data", BAD, divided)
    if len({s for first in firsts for s in first}) < sum(map(len, firsts)) or len(set(counts)) > 1:
        overlap = msg("monitor.health.data.overlap", epoch=epoch, counts=counts)
        return HealthCheck("data", BAD, overlap)
    verified = msg(
        "monitor.health.data.verified",
        epoch=epoch,
        size=sizes[reports[0].get("rank")],
        pieces=pieces,
        share=share,
        ranks=len(reports),
        proven=proven,
    )
    return HealthCheck("data", OK, verified)


def parameters(
    target: Target, looked: ActivityWindow, state: RunState, happened: list[EventRecord]
) -> HealthCheck:
    """Last step at which they were equal on all ranks; a run with unequal ones ends at once."""
    every = whole(dig(target.plan, "config", "inspect_every"))
    if not every:
        text = (
            msg("monitor.health.parameters.never")
            if every == 0
            else msg("monitor.health.parameters.unknown")
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
            msg("monitor.health.parameters.not_yet", step=following),
        )
    return HealthCheck(
        "parameters",
        OK,
        msg("monitor.health.parameters.equal", step=last, every=every),
    )


def loss(state: RunState) -> HealthCheck:
    """Loss and gradient norm of the last step; they include all ranks."""
    training, progress = state["training"], state["progress"]
    value = training["loss"]
    if value is None:
        return HealthCheck("loss", UNKNOWN, msg("monitor.health.none_recorded"))
    factor, unit = metric_units.display(training)
    if not math.isfinite(value):
        return HealthCheck(
            "loss",
            BAD,
            msg("monitor.health.loss.at", loss=value, step=progress["step"]),
            headline=msg("monitor.health.loss.is", loss=value, step=progress["step"]),
        )
    norm = training["grad_norm"]
    if norm is not None and not math.isfinite(norm):
        bad = msg("monitor.health.loss.norm_at", norm=norm, step=progress["step"])
        return HealthCheck("loss", BAD, bad)
    fine = msg(
        "monitor.health.loss.finite",
        loss=units.decimal(value * factor) + (f" {unit}" if unit else ""),
        step=progress["step"],
    )
    if norm is not None:
        fine += msg("monitor.health.loss.norm", norm=norm)
    return HealthCheck("loss", OK, fine)


def memory(state: RunState) -> HealthCheck:
    held = {
        r["rank"]: size / GIB for r in state["ranks"] if (size := r["memory_bytes"]) is not None
    }
    system = [alert["text"] for alert in state["alerts"] if alert["code"] in alerts.CODES_OF_FULL]
    shown = (
        msg("monitor.health.memory.each", sizes=span(held.values(), "GiB", 2))
        if held
        else msg("monitor.health.none_recorded")
    )
    if held and max(held.values()) > UNEVEN * min(held.values()):
        shown += msg("monitor.health.memory.most", rank=max(held, key=lambda rank: held[rank]))
    if system:
        return HealthCheck("memory", WARN, separated([*system, shown]))
    return HealthCheck("memory", OK if held else UNKNOWN, shown)


def checkpoint(target: Target, state: RunState) -> HealthCheck:
    """Age of the newest checkpoint, and whether the next is overdue."""
    every, step, found = (
        whole(dig(target.plan, "config", "save_every")),
        state["progress"]["step"] or 0,
        state["checkpoint"],
    )
    how = (
        msg("monitor.health.checkpoint.at_end")
        if every == 0
        else msg("monitor.health.checkpoint.every", every=every)
        if every
        else msg("monitor.health.checkpoint.interval_unknown")
    )
    if found is None:
        late = bool(every) and step > LATE * (every or 0)
        none = msg("monitor.health.checkpoint.none", step=step)
        return HealthCheck("checkpoint", WARN if late else OK, separated([none, how]))
    age = max(0.0, state["time_unix_s"] - (found["time_unix_s"] or state["time_unix_s"]))
    late = bool(every) and step - found["step"] > LATE * (every or 0)
    newest = msg("monitor.health.checkpoint.newest", step=found["step"], age=units.age(age))
    if step >= found["step"]:
        newest += msg("monitor.health.checkpoint.behind", steps=step - found["step"])
    return HealthCheck("checkpoint", WARN if late else OK, separated([newest, how]))


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
        return [*checks, HealthCheck("findings", OK, msg("monitor.health.findings.none"))]
    shown = separated(f"{text(e.get('text')) or e['event']}{_at(e)}" for e in notable[-SHOWN:])
    many = len(notable) > SHOWN
    more = msg("monitor.health.findings.last_of", count=len(notable)) if many else ""
    ranks = {rank for e in notable if (rank := whole(e.get("rank"))) is not None}
    return [*checks, HealthCheck("findings", WARN, f"{shown}{more}", tuple(sorted(ranks)))]


def attention(state: RunState) -> list[HealthCheck]:
    """Other alerts of the monitor: throttling, disks, the clock."""
    rest = [a["text"] for a in state["alerts"] if a["rank"] is None and a["code"] not in CHECKED]
    return [HealthCheck("attention", WARN, separated(rest))] if rest else []


def _at(event: EventRecord) -> str:
    """The step of the event, unless its text names it."""
    step = whole(event.get("step"))
    if step is None:
        return ""
    names = {f"step {step}", msg("monitor.health.findings.step", step=step)}
    known = any(name in str(event.get("text")) for name in names)
    return "" if known else msg("monitor.health.findings.at", step=step)

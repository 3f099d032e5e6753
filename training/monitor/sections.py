"""Sections of a screen other than tables: head, verdict, numbers, curves, alerts, warnings, log,
paths."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from training.config.schema import FIELDS
from training.core import metric_units, units
from training.core.cells import cells
from training.core.jsonl import Record, number
from training.core.messages import msg
from training.core.project import typed
from training.monitor import term_text
from training.monitor.run_status import ENDED, ranks_of, state_word
from training.monitor.term_text import Line

if TYPE_CHECKING:
    from training.core.contracts.state import RunState, TrainingState

BADGES = {
    "starting": "info",
    "running": "good",
    "finished": "good",
    "stopped": "warn",
    "failed": "bad",
    "died": "bad",
    "silent": "warn",
}
FINE = 0.1  # labels of a curve below this have three significant digits instead of three decimals
VERDICT = 9  # rows of a verdict from which on its cause is shortened
CLIPPED = 50  # a curve of at least this many points is clipped at the fall of the first steps


def head(state: RunState, width: int) -> list[Line]:
    run, progress = state["run"], state["progress"]
    badge = (state_word(run["state"]).upper(), BADGES[run["state"]])
    first = term_text.sides(
        [("Duet  ", "dim"), (term_text.clean(run["name"]), "bold")],
        [badge, ("  " + _time(state), "dim")],
        width,
    )
    facts = [
        term_text.clean(
            run["script"]
            or (
                msg("monitor.screen.log_of", program=run["source"])
                if run["kind"] == "log" and run["source"]
                else msg("monitor.screen.log_of_another")
                if run["kind"] == "log"
                else msg("monitor.screen.unknown_script")
            )
        )
    ]
    if run["ranks"] is not None:
        facts.append(ranks_of(run["ranks"], run.get("planned_ranks")))
    facts += [term_text.clean(value) for value in (run["device"], run["precision"]) if value]
    if (task := run.get("task")) is not None and task != FIELDS["task"].default:
        facts.insert(1, term_text.clean(task))
    if program := run.get("program"):
        facts.insert(1, term_text.clean(program) + (f" ({run['source']})" if run["source"] else ""))
    if progress["epoch"] is not None:
        facts.append(
            msg("monitor.screen.epoch_of", epoch=progress["epoch"], epochs=progress["epochs"])
            if progress["epochs"]
            else msg("monitor.screen.epoch", epoch=progress["epoch"])
        )
    if run["restarts"]:
        facts.append(units.plural(run["restarts"], "restart"))
    return [first, [(" · ".join(facts), "")], _progress(state, width)]


def _time(state: RunState) -> str:
    """When the run ended, or the present time."""
    now, ended = state["time_unix_s"], state["run"]["ended_unix_s"]
    if state["run"]["state"] not in ENDED or ended is None:
        return units.clock(now)
    return msg(
        "monitor.screen.ended",
        time=units.clock(ended, msg("monitor.screen.day_and_time")),
        duration=units.age(max(0.0, now - ended)),
    )


def _progress(state: RunState, width: int) -> Line:
    progress = state["progress"]
    total, step, percent = progress["total_steps"], progress["step"], progress["percent"]
    if step is None and total and progress.get("scope") == "epoch":
        right = msg("monitor.screen.steps_per_epoch", total=total)
    elif step is None:
        right = msg("monitor.screen.no_step")
    elif total:
        right = msg("monitor.screen.step_of", step=step, total=total)
    else:
        right = msg("monitor.screen.step", step=step)
    if step is not None and progress.get("scope") == "epoch":
        right += msg("monitor.screen.in_this_epoch")
    right += f"  {percent:.1f} %" if percent is not None else ""
    if progress["elapsed_s"] is not None:
        elapsed = units.duration(progress["elapsed_s"])
        right += "  " + msg("monitor.screen.elapsed", duration=elapsed)
    if state["run"]["state"] == "running" and total and step is not None and step >= total:
        right += msg("monitor.screen.finishing")
    if progress["eta_s"] is not None:
        right += msg("monitor.screen.left", duration=units.duration(progress["eta_s"]))
        end, form = state["time_unix_s"] + progress["eta_s"], msg("monitor.screen.day_and_time")
        ends = msg("monitor.screen.ends", time=units.clock(end, form))
        if cells(right + ends) + 7 <= width:
            right += ends
    room = min(60 if width < 140 else 90, width - cells(right) - 2)
    shown: Line = (
        [(term_text.bar(percent / 100, room), "good"), ("  ", "")]
        if percent is not None and room >= 5
        else []
    )
    return [*shown, (right, "")]


def verdict(state: RunState, width: int) -> list[Line]:
    """How the run ended, or why it makes no progress. A long cause is shortened; the advice never
    is, since users copy it."""
    run, summary, failure = state["run"], state["summary"] or {}, state["failure"] or {}
    style = BADGES[run["state"]] if run["state"] in ENDED else "warn"
    if run["state"] == "finished" and "loss_last" in summary:
        scores = (
            msg(
                "monitor.screen.validation",
                course=_from_to(summary, "val_bpb"),
                unit=metric_units.BITS,
            )
            if "val_bpb_last" in summary
            else ", ".join(metric_units.courses(summary))
        )
        done = msg("monitor.screen.done", course=metric_units.course(summary))
        text = " · ".join(filter(None, [done, term_text.clean(scores)]))
        return term_text.wrap([(text, style)], width, 6)
    if not run["reason"]:
        return []
    cause = term_text.wrap([(term_text.clean(run["reason"]), style)], width, 4)
    lines: list[Line] = []
    place = msg("monitor.screen.phase_in_file").join(
        term_text.clean(w)
        for w in (failure.get("phase"), failure.get("where"))
        if isinstance(w, str)
    )
    lines += [[("  " + msg("monitor.screen.in_place", place=place), "")]] if place else []
    advice = failure.get("advice")
    lines += (
        [
            [("  " + msg("monitor.screen.try", advice=term_text.clean(typed(a))), "")]
            for a in advice
            if isinstance(a, str)
        ]
        if isinstance(advice, list)
        else []
    )
    rest = [row for line in lines for row in term_text.wrap(line, width, 4)]
    most = max(1, VERDICT - len(rest))
    if len(cause) > most:
        cause = [*cause[: most - 1], [(f"{''.join(text for text, _ in cause[most - 1])}…", style)]]
    return cause + rest


def _from_to(summary: Record, name: str) -> str:
    return " → ".join(
        units.decimal(number(summary.get(f"{name}_{which}"))) for which in ("first", "last")
    )


def loss(training: TrainingState) -> tuple[str, str]:
    """The last loss and its unit, which is that of the evaluations where possible."""
    factor, unit = metric_units.display(training)
    return units.decimal(
        None if training["loss"] is None else training["loss"] * factor
    ), unit or ""


def evaluation(training: TrainingState) -> str:
    """'val 2.0312 bits/byte, averaged weights (best 2.0000, step 100)'; empty before the first
    one."""
    if training["eval_name"] is None:
        return ""
    name = term_text.clean(training["eval_name"])
    # the unit identifies the metric
    words = "val" if name in ("val_bpb", "val_psnr") else name.replace("_", " ")
    words += f" {units.decimal(training['eval_last'])}" + (
        f" {training['eval_unit']}" if training["eval_unit"] else ""
    )
    words += msg("monitor.screen.averaged") if training["eval_averaged"] else ""
    if training["eval_best_step"] is None:
        return words
    step = training["eval_best_step"]
    return words + (
        msg("monitor.screen.is_best", step=step)
        if training["eval_best"] == training["eval_last"]
        else msg("monitor.screen.best", value=units.decimal(training["eval_best"]), step=step)
    )


def numbers(state: RunState, width: int, rows: int) -> list[Line]:
    training = state["training"]
    # fp16 may skip all steps so far for a loss that is not finite, which is recorded as null
    stepped = training["last_step_unix_s"] is not None or training["step_ms_median"] is not None
    if not stepped and training["loss"] is None and training["eval_last"] is None:
        return []
    style = "" if training["loss_is_finite"] in (True, None) else "bad"
    score, (value, unit_of_loss) = evaluation(training), loss(training)
    # a task has a loss in each step; other output may have none
    by_task = state["run"]["kind"] == "run" and state["run"]["program"] is None
    items: list[Line] = []
    if by_task or training["loss"] is not None:
        unit_of_loss = unit_of_loss and f" {unit_of_loss}"
        items.append([("loss ", "dim"), (value, style or "bold"), (unit_of_loss, "dim")])
    items += [[(score, "")]] if score else []
    unit, rate, count = (
        training["unit"],
        metric_units.speed(training),
        metric_units.so_far(training),
    )
    if rate is not None:
        of_device = training.get("tokens_per_s_of") == "device"
        each = msg("monitor.screen.per_device") if of_device else ""
        items.append(
            [(units.count(rate), "bold"), (f" {term_text.clean(str(unit))}/s{each}", "dim")]
        )
    if training["step_ms_median"] is not None:
        p95 = (
            ""
            if training["step_ms_p95"] is None
            else f" (p95 {units.milliseconds(training['step_ms_p95'])})"
        )
        items.append(
            [
                (msg("monitor.screen.step_time"), "dim"),
                (units.milliseconds(training["step_ms_median"]), ""),
                (p95, "dim"),
            ]
        )
    items.append(
        [("MFU ", "dim"), (units.percent(100 * training["mfu"]), "")]
        if training["mfu"] is not None
        else []
    )
    energy = training.get("joules_per_unit")
    items.append(
        [(units.joules(energy), ""), (f"/{metric_units.one(unit)}", "dim")]
        if energy is not None
        else []
    )
    for name, value_of in (
        ("lr ", training["lr"]),
        (msg("monitor.screen.grad_norm"), training["grad_norm"]),
    ):
        items.append(
            [(name, "dim"), (units.decimal(value_of, ".3g"), "")] if value_of is not None else []
        )
    if (scale := training.get("loss_scale")) is not None:
        shown = f"{scale:,.0f}" if scale >= 1 else f"{scale:g}"
        items.append([(msg("monitor.screen.loss_scale"), "dim"), (shown, "")])
    if skipped := training.get("skipped_steps"):
        items.append([(f"{skipped}", ""), (msg("monitor.screen.skipped"), "dim")])
    items.append(
        [(units.count(count), ""), (f" {term_text.clean(str(unit))}", "dim")]
        if count is not None
        else []
    )
    items.append(
        [
            (f"{memory_word(state)} ", "dim"),
            (f"{units.gib(training['memory_bytes'])} GiB", ""),
        ]
        if training["memory_bytes"]
        else []
    )
    return term_text.flow([item for item in items if item], width, rows)


def memory_word(state: RunState) -> str:
    """What `memory_bytes` of a rank measures: memory of its GPU, or of its process."""
    return metric_units.memory_word(state["run"]["device"] == "cuda")


def loss_curve(state: RunState, width: int, rows: int) -> list[Line]:
    factor, _ = metric_units.display(state["training"])
    return curve(
        [(int(p["step"]), p["loss"] * factor) for p in state["loss_curve"]["points"]],
        "loss",
        width,
        rows,
    )


def speed_curve(state: RunState, width: int, rows: int) -> list[Line]:
    points = state["speed_curve"]["points"] if state.get("speed_curve") else []
    name = (
        "tok/s"
        if (unit := state["training"]["unit"]) == metric_units.TOKENS
        else f"{term_text.clean(str(unit))}/s"
    )
    rates = [(int(p["step"]), rate) for p in points if (rate := metric_units.speed(p)) is not None]
    return curve(rates, name, width, rows, falls=False)


def curve(
    points: list[tuple[int, float]], name: str, width: int, rows: int, *, falls: bool = True
) -> list[Line]:
    """`falls`: the curve starts far above the rest, so its top tenth is clipped and marked by ≥."""
    finite = sorted(v for _, v in points if math.isfinite(v))
    if len(points) < 2 or not finite or rows < 1:
        return []
    clip = falls and len(finite) >= CLIPPED
    low, high = finite[0] if falls else 0.0, finite[len(finite) * 9 // 10] if clip else finite[-1]
    form = "" if abs(high) >= FINE else ".3g"
    shown = (lambda v: units.decimal(v, form, places=3)) if falls else units.count
    top, bottom = ("≥" if clip and high < finite[-1] else "") + shown(high), shown(low)
    if rows == 1:
        label = f" {top} – {bottom}"
        bars = term_text.plot(
            term_text.spread(points, max(1, width - len(label) - len(name) - 1)), low, high, 1
        )
        return [[(f"{name} ", "dim"), (bars[0], "info"), (label, "dim")]]
    margin = max(len(top), len(bottom), len(name))
    bars = term_text.plot(term_text.spread(points, max(1, width - margin - 2)), low, high, rows)
    labels = [top, *[""] * (rows - 2), bottom]
    if rows > 2:
        labels[1] = name
    return [
        [(f"{label:>{margin}} │", "dim"), (part, "info")]
        for label, part in zip(labels, bars, strict=True)
    ]


def alerts(state: RunState, width: int) -> list[Line]:
    return [
        row
        for a in state["alerts"]
        for row in term_text.wrap([("! ", "bad"), (term_text.clean(a["text"]), "bad")], width, 2)
    ]


def warnings(state: RunState) -> list[Line]:
    now = state["time_unix_s"]
    return [
        [
            (msg("monitor.screen.warning", time=units.moment(w["time_unix_s"], now)) + " ", "warn"),
            (term_text.clean(w["text"]), ""),
        ]
        for w in state["warnings"]
    ]


def log(state: RunState, width: int, rows: int) -> list[Line]:
    file, lines = state["log"]["file"], state["log"]["last_lines"]
    if not file or rows < 1:
        return []
    shown = lines[-(rows - 1) :] if rows > 1 else []
    return [
        _path(msg("monitor.screen.log"), file, width),
        *([(term_text.clean(line), "")] for line in shown),
    ]


def places(state: RunState, width: int) -> list[Line]:
    lines: list[Line] = []
    if state["run"]["dir"]:
        lines.append(_path(msg("monitor.screen.run"), state["run"]["dir"], width))
    if saved := state["checkpoint"]:
        at = saved["time_unix_s"]  # None: removed meanwhile
        age = (
            ""
            if at is None or state["run"]["state"] in ENDED
            else msg(
                "monitor.screen.ago",
                duration=units.duration(max(0.0, state["time_unix_s"] - at)),
            )
            + "  "
        )
        lines.append(_path(msg("monitor.screen.checkpoint"), saved["path"] or "", width, age))
    return lines


def _path(label: str, path: str, width: int, age: str = "") -> Line:
    room = width - cells(f"{label}  {age}")
    return [(f"{label}  ", "dim"), (age, ""), (place(path, room) if path else "", "dim")]


def place(path: str, width: int) -> str:
    """A path to copy: relative inside the current folder; only its end where it does not fit."""
    here = os.getcwd().rstrip("/") + "/"
    return term_text.cut_left(term_text.clean(path.removeprefix(here)), width)

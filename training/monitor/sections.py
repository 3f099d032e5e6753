"""Sections of a screen other than tables: head, verdict, numbers, curves, alerts, warnings, log,
paths."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from training.config.schema import FIELDS
from training.core import metric_units, units
from training.core.jsonl import Record, number
from training.monitor import term_text
from training.monitor.run_status import ENDED
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
CLIPPED = 50  # a curve of at least this many points is clipped at the fall of the first steps


def head(state: RunState, width: int) -> list[Line]:
    run, progress = state["run"], state["progress"]
    badge = (f"{run['state'].upper()}", BADGES[run["state"]])
    first = term_text.sides(
        [("Duet  ", "dim"), (term_text.clean(run["name"]), "bold")],
        [badge, ("  " + units.clock(state["time_unix_s"]), "dim")],
        width,
    )
    facts = [
        term_text.clean(
            run["script"]
            or (
                f"log of {run['source'] or 'another program'}"
                if run["kind"] == "log"
                else "unknown script"
            )
        )
    ]
    if run["ranks"] is not None:
        facts.append(units.plural(run["ranks"], "rank"))
    facts += [term_text.clean(value) for value in (run["device"], run["precision"]) if value]
    if (task := run.get("task")) is not None and task != FIELDS["task"].default:
        facts.insert(1, term_text.clean(task))
    if program := run.get("program"):
        facts.insert(1, term_text.clean(program) + (f" ({run['source']})" if run["source"] else ""))
    if progress["epoch"] is not None:
        facts.append(
            f"epoch {progress['epoch']}"
            + (f" of {progress['epochs']}" if progress["epochs"] else "")
        )
    if run["restarts"]:
        facts.append(units.plural(run["restarts"], "restart"))
    return [first, [(" · ".join(facts), "")], _progress(state, width)]


def _progress(state: RunState, width: int) -> Line:
    progress = state["progress"]
    total, step, percent = progress["total_steps"], progress["step"], progress["percent"]
    right = (
        "no step yet"
        if step is None
        else f"step {step:,}"
        + (f" of {total:,}" if total else "")
        + (" in this epoch" if progress.get("scope") == "epoch" else "")
    )
    right += f"  {percent:.1f} %" if percent is not None else ""
    if progress["elapsed_s"] is not None:
        right += f"  {units.duration(progress['elapsed_s'])} elapsed"
    if state["run"]["state"] == "running" and total and step is not None and step >= total:
        right += ", finishing"
    if progress["eta_s"] is not None:
        right += f", {units.duration(progress['eta_s'])} left"
        ends = f" (ends {units.clock(state['time_unix_s'] + progress['eta_s'], '%a %H:%M')})"
        if term_text.cells(right + ends) + 7 <= width:
            right += ends
    room = min(60 if width < 140 else 90, width - term_text.cells(right) - 2)
    shown: Line = (
        [(term_text.bar(percent / 100, room), "good"), ("  ", "")]
        if percent is not None and room >= 5
        else []
    )
    return [*shown, (right, "")]


def verdict(state: RunState, width: int) -> list[Line]:
    """How the run ended, or why it makes no progress; never cut, since users copy it."""
    run, summary, failure = state["run"], state["summary"] or {}, state["failure"] or {}
    style = BADGES[run["state"]] if run["state"] in ENDED else "warn"
    if run["state"] == "finished" and "loss_last" in summary:
        scores = (
            f"validation {_from_to(summary, 'val_bpb')} {metric_units.BITS}"
            if "val_bpb_last" in summary
            else ", ".join(metric_units.courses(summary))
        )
        text = " · ".join(
            filter(None, [f"done: loss {metric_units.course(summary)}", term_text.clean(scores)])
        )
        return term_text.wrap([(text, style)], width, 6)
    if not run["reason"]:
        return []
    lines: list[Line] = [[(term_text.clean(run["reason"]), style)]]
    place = " in ".join(
        term_text.clean(w)
        for w in (failure.get("phase"), failure.get("where"))
        if isinstance(w, str)
    )
    lines += [[(f"  in {place}", "")]] if place else []
    advice = failure.get("advice")
    lines += (
        [[(f"  try: {term_text.clean(a)}", "")] for a in advice if isinstance(a, str)]
        if isinstance(advice, list)
        else []
    )
    return [row for line in lines for row in term_text.wrap(line, width, 4)]


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
    """'val 2.0312 bits/byte (best 2.0000, step 100)'; empty before the first one."""
    if training["eval_name"] is None:
        return ""
    name = term_text.clean(training["eval_name"])
    # the unit identifies the metric
    words = "val" if name in ("val_bpb", "val_psnr") else name.replace("_", " ")
    words += f" {units.decimal(training['eval_last'])}" + (
        f" {training['eval_unit']}" if training["eval_unit"] else ""
    )
    if training["eval_best_step"] is None:
        return words
    best = (
        "best"
        if training["eval_best"] == training["eval_last"]
        else f"best {units.decimal(training['eval_best'])}"
    )
    return f"{words} ({best}, step {training['eval_best_step']:,})"


def numbers(state: RunState, width: int, rows: int) -> list[Line]:
    training = state["training"]
    if training["loss"] is None and training["eval_last"] is None:  # no step yet
        return []
    style = "" if training["loss_is_finite"] in (True, None) else "bad"
    score, (value, unit_of_loss) = evaluation(training), loss(training)
    items: list[Line] = [
        [("loss ", "dim"), (value, style or "bold"), (unit_of_loss and f" {unit_of_loss}", "dim")]
    ]
    items += [[(score, "")]] if score else []
    unit, rate, count = (
        training["unit"],
        metric_units.speed(training),
        metric_units.so_far(training),
    )
    if rate is not None:
        each = " per device" if training.get("tokens_per_s_of") == "device" else ""
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
            [("step ", "dim"), (units.milliseconds(training["step_ms_median"]), ""), (p95, "dim")]
        )
    items.append(
        [("MFU ", "dim"), (f"{100 * training['mfu']:.1f} %", "")]
        if training["mfu"] is not None
        else []
    )
    for name, value_of in (("lr ", training["lr"]), ("grad norm ", training["grad_norm"])):
        items.append(
            [(name, "dim"), (units.decimal(value_of, ".3g"), "")] if value_of is not None else []
        )
    items.append(
        [(units.count(count), ""), (f" {term_text.clean(str(unit))}", "dim")]
        if count is not None
        else []
    )
    items.append(
        [("memory ", "dim"), (f"{units.gib(training['memory_bytes'])} GiB", "")]
        if training["memory_bytes"]
        else []
    )
    return term_text.flow([item for item in items if item], width, rows)


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
    shown = (lambda v: format(v, ".3f" if abs(high) >= FINE else ".3g")) if falls else units.count
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
    return [
        [(f"warning {units.clock(w['time_unix_s'])} ", "warn"), (term_text.clean(w["text"]), "")]
        for w in state["warnings"]
    ]


def log(state: RunState, width: int, rows: int) -> list[Line]:
    file, lines = state["log"]["file"], state["log"]["last_lines"]
    if not file or rows < 1:
        return []
    shown = lines[-(rows - 1) :] if rows > 1 else []
    return [
        [("LOG  ", "dim"), (place(file, width - 5), "dim")],
        *([(term_text.clean(line), "")] for line in shown),
    ]


def places(state: RunState, width: int) -> list[Line]:
    lines: list[Line] = []
    if state["run"]["dir"]:
        lines.append([("RUN  ", "dim"), (place(state["run"]["dir"], width - 5), "dim")])
    if saved := state["checkpoint"]:
        at = saved["time_unix_s"]  # None: removed meanwhile
        age = (
            ""
            if at is None or state["run"]["state"] in ENDED
            else f"{units.duration(max(0.0, state['time_unix_s'] - at))} ago  "
        )
        where = place(saved["path"], width - 12 - len(age)) if saved["path"] else ""
        lines.append([("CHECKPOINT  ", "dim"), (age, ""), (where, "dim")])
    return lines


def place(path: str, width: int) -> str:
    """A path to copy: relative inside the current folder; only its end where it does not fit."""
    here = os.getcwd().rstrip("/") + "/"
    return term_text.cut_left(term_text.clean(path.removeprefix(here)), width)

"""The state of a run as a screen of any size: sections in a fixed order, each given rows by how much it matters."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.monitor import draw, tables
from training.monitor.draw import Line
from training.monitor.records import number
from training.monitor.state import ENDED, State

BADGES = {"starting": "info", "running": "good", "finished": "good", "failed": "bad", "died": "bad"}


@dataclass(frozen=True)
class View:
    width: int
    height: int
    colour: bool = False
    ascii_only: bool = False
    footer: str = ""


def screen(state: State, view: View) -> list[str]:
    """At most `height` lines of at most `width` cells."""
    sections: dict[str, Callable[[int], list[Line]]] = {
        "head": lambda rows: head(state, view.width)[:rows],
        "verdict": lambda rows: verdict(state)[:rows],
        "numbers": lambda rows: numbers(state, view.width, rows),
        "curve": lambda rows: curve(state, view.width, rows),
        "ranks": lambda rows: tables.ranks(state, view.width, rows),
        "gpus": lambda rows: tables.gpus(state, view.width, rows),
        "system": lambda rows: draw.flow(tables.system(state), view.width, rows, gap="  "),
        "warnings": lambda rows: warnings(state)[-rows:],
        "log": lambda rows: log(state, view.width, rows),
        "places": lambda rows: places(state, view.width)[:rows],
    }
    sizes = share_out(state, sections, view)
    lines: list[Line] = []
    left = view.height - sum(sizes.values()) - bool(view.footer)
    for name, build in sections.items():
        block = build(sizes[name]) if sizes[name] else []
        left += sizes[name] - len(block)
        if block and lines and left > 0 and name not in ("verdict", "places"):
            lines.append([])
            left -= 1
        lines += block
    if view.footer:
        lines = lines[: view.height - 1]
        lines += [[]] * (view.height - 1 - len(lines)) + [[(view.footer, "dim")]]
    return [draw.render(line, view.width, colour=view.colour, ascii_only=view.ascii_only) for line in lines[: view.height]]


def share_out(state: State, sections: dict[str, Callable[[int], list[Line]]], view: View) -> dict[str, int]:
    """Rows for each section: first a little of everything, the most important first, then more of each."""
    ranks, gpus = len(state["ranks"]), len(state["gpus"])
    has_curve, has_log = len(state["loss_curve"]["points"]) > 1, bool(state["log"]["last_lines"])
    ended = state["run"]["state"] in ENDED
    wishes = [("head", 3), ("verdict", 2), ("numbers", 2), ("ranks", 1), ("gpus", 1), ("system", 1), ("curve", 1), ("log", 2)]
    wishes += [("places", 1), ("warnings", 1), ("ranks", min(ranks + 1, 5)), ("gpus", min(gpus + 1, 5)), ("curve", 3), ("log", 4)]
    wishes += [("warnings", 3), ("places", 2), ("system", 2), ("verdict", 6 if ended else 2), ("ranks", ranks + 1), ("gpus", gpus + 1)]
    tall = view.height > 30
    if tall:
        wishes += [("curve", 6), ("warnings", 6), ("log", 6), ("curve", view.height // 4), ("log", 11), ("warnings", 20)]
    there = {name: bool(build(1)) for name, build in sections.items()} | {"curve": has_curve, "log": has_log}
    # A tall screen keeps rows for the blank lines between sections.
    sizes, left = dict.fromkeys(sections, 0), view.height - bool(view.footer) - (7 if tall else 0)
    for name, wish in wishes:
        if there[name]:
            most = len(sections[name](wish))
            more = min(max(0, most - sizes[name]), left)
            sizes[name] += more
            left -= more
    return sizes


def head(state: State, width: int) -> list[Line]:
    run, progress = state["run"], state["progress"]
    badge = (f"{run['state'].upper()}", BADGES[run["state"]])
    first = draw.sides(
        [("Duet  ", "dim"), (draw.clean(run["name"]), "bold")], [badge, ("  " + draw.clock(state["time_unix_s"]), "dim")], width
    )
    facts = [draw.clean(run["script"] or "unknown script")]
    facts.append("- ranks" if run["ranks"] is None else f"{run['ranks']} rank{'s' if run['ranks'] != 1 else ''}")
    facts += [draw.clean(run[name]) for name in ("device", "precision") if run[name]]
    if progress["epoch"] is not None:
        facts.append(f"epoch {progress['epoch']}" + (f" of {progress['epochs']}" if progress["epochs"] else ""))
    if run["restarts"]:
        facts.append(f"{run['restarts']} restart{'s' if run['restarts'] != 1 else ''}")
    total, step = progress["total_steps"], progress["step"]
    right = f"step {step:,} of {total:,}  {progress['percent']:.1f} %" if total else f"step {step:,} of an unknown number"
    right += f"  {draw.duration(progress['elapsed_s'])} elapsed"
    if progress["eta_s"] is not None:
        right += f", {draw.duration(progress['eta_s'])} left"
        if width >= 100:
            right += f" (ends {draw.clock(state['time_unix_s'] + progress['eta_s'], '%a %H:%M')})"
    room = min(60, width - draw.cells(right) - 2)
    third: Line = [(draw.bar(step / total, room), "good"), ("  ", "")] if total and room >= 5 else []
    return [first, [(" · ".join(facts), "")], [*third, (right, "")]]


def verdict(state: State) -> list[Line]:
    """How it ended, or why nothing happens."""
    run, summary, failure = state["run"], state["summary"] or {}, state["failure"] or {}
    if not run["reason"]:
        return []
    if run["state"] == "finished":
        return [[(f"{run['reason']}: loss {_from_to(summary, 'loss')} · {_from_to(summary, 'val_bpb')} bits/byte", "good")]]
    lines: list[Line] = [[(draw.clean(run["reason"]), BADGES[run["state"]])]]
    place = " in ".join(draw.clean(w) for w in (failure.get("phase"), failure.get("where")) if isinstance(w, str))
    lines += [[(f"  in {place}", "")]] if place else []
    advice = failure.get("advice")
    lines += [[(f"  try: {draw.clean(a)}", "")] for a in advice if isinstance(a, str)] if isinstance(advice, list) else []
    return lines


def _from_to(summary: State, name: str) -> str:
    pair = [number(summary.get(f"{name}_{which}")) for which in ("first", "last")]
    return " → ".join(draw.decimal(value) for value in pair)


def numbers(state: State, width: int, rows: int) -> list[Line]:
    training = state["training"]
    if training["loss_nats_per_token"] is None and training["val_bpb_best"] is None:  # no step yet
        return []
    loss = "" if training["loss_is_finite"] in (True, None) else "bad"
    best = f"val {draw.decimal(training['val_bpb_best'])} bits/byte"
    if training["val_bpb_best_step"] is not None:
        best += f" (best, step {training['val_bpb_best_step']:,})"
    items: list[Line] = [
        [("loss ", "dim"), (draw.decimal(training["loss_nats_per_token"]), loss or "bold")],
        [(best, "")],
        [("lr ", "dim"), (draw.decimal(training["lr"], ".3g"), "")],
        [("grad norm ", "dim"), (draw.decimal(training["grad_norm"], ".3g"), "")],
        [(draw.count(training["tokens_per_s"]), "bold"), (" tokens/s", "dim")],
        [
            ("step ", "dim"),
            (draw.milliseconds(training["step_ms_median"]), ""),
            (f" (p95 {draw.milliseconds(training['step_ms_p95'])})", "dim"),
        ],
        [(draw.count(training["tokens"]), ""), (" tokens", "dim")],
    ]
    return draw.flow(items, width, rows)


def curve(state: State, width: int, rows: int) -> list[Line]:
    points: list[tuple[int, float]] = [(p["step"], p["loss_nats_per_token"]) for p in state["loss_curve"]["points"]]
    finite = sorted(v for _, v in points if abs(v) < float("inf"))
    if len(points) < 2 or not finite or rows < 1:
        return []
    # The fall of the first steps would flatten the rest: the top tenth is cut off, and the label says so.
    clip = len(finite) >= 50
    low, high = finite[0], finite[len(finite) * 9 // 10] if clip else finite[-1]
    top, bottom = ("≥" if clip and high < finite[-1] else "") + f"{high:.3f}", f"{low:.3f}"
    if rows == 1:
        label = f" {top} – {bottom}"
        bars = draw.plot(draw.spread(points, max(1, width - len(label) - 5)), low, high, 1)
        return [[("loss ", "dim"), (bars[0], "info"), (label, "dim")]]
    margin = max(len(top), len(bottom), 4)
    bars = draw.plot(draw.spread(points, max(1, width - margin - 2)), low, high, rows)
    labels = [top, *[""] * (rows - 2), bottom]
    if rows > 2:
        labels[1] = "loss"
    return [[(f"{label:>{margin}} │", "dim"), (part, "info")] for label, part in zip(labels, bars, strict=True)]


def warnings(state: State) -> list[Line]:
    return [[(f"warning {draw.clock(w['time_unix_s'])} ", "warn"), (draw.clean(w["text"]), "")] for w in state["warnings"]]


def log(state: State, width: int, rows: int) -> list[Line]:
    file, lines = state["log"]["file"], state["log"]["last_lines"]
    if not file or rows < 1:
        return []
    shown = lines[-(rows - 1) :] if rows > 1 else []
    return [[("LOG  ", "dim"), (place(file, width - 5), "dim")], *([(draw.clean(line), "")] for line in shown)]


def places(state: State, width: int) -> list[Line]:
    pairs = [("RUN", state["run"]["dir"]), ("CHECKPOINT", state["checkpoint"])]
    return [[(f"{name}  ", "dim"), (place(path, width - len(name) - 2), "dim")] for name, path in pairs if path]


def place(path: str, width: int) -> str:
    """A path as short as it can be pasted here: relative below the current folder; its end when it does not fit."""
    here = os.getcwd().rstrip("/") + "/"
    return draw.cut_left(draw.clean(path.removeprefix(here)), width)


def one_line(state: State) -> str:
    """For output that is no terminal: a line a look."""
    run, progress, training = state["run"], state["progress"], state["training"]
    words: list[Any] = [draw.clock(state["time_unix_s"], "%Y-%m-%d %H:%M:%S"), draw.clean(run["name"]), run["state"]]
    words += [f"step {progress['step']}/{progress['total_steps'] or '?'}"]
    words += [f"loss {draw.decimal(training['loss_nats_per_token'])}", f"val {draw.decimal(training['val_bpb_last'])} bits/byte"]
    words += [f"{draw.count(training['tokens_per_s'])} tokens/s", f"step {draw.milliseconds(training['step_ms_median'])}"]
    words += [f"{draw.duration(progress['eta_s'])} left"] if run["state"] == "running" else []
    late = [str(r["rank"]) for r in state["ranks"] if r["late"]]
    words += [f"no beat for over 30 s from rank {', '.join(late)}"] if late else []
    words += [draw.clean(run["reason"])] if run["reason"] else []
    return "  ".join(words)

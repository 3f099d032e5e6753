"""The state of a run as a screen of any size: sections in a fixed order; rows by importance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.core import metric_units, units
from training.core.messages import msg
from training.monitor import sections, tables, term_text
from training.monitor.run_status import ENDED, state_word
from training.monitor.state import LOG_LINES
from training.monitor.term_text import Line

if TYPE_CHECKING:
    from training.core.contracts.state import RunState

COLUMNS_FROM = (140, 30)  # smallest terminal, columns and rows, for the layout in two columns
GAP = 3


@dataclass(frozen=True)
class View:
    width: int
    height: int
    colour: bool = False
    ascii_only: bool = False
    footer: str = ""


def screen(state: RunState, view: View) -> list[str]:
    """At most `height` lines of at most `width` cells."""
    wide = view.width >= COLUMNS_FROM[0] and view.height >= COLUMNS_FROM[1]
    return finish(_two_columns(state, view) if wide else _one_column(state, view), view)


def finish(lines: list[Line], view: View) -> list[str]:
    """Cuts to the size of the terminal, with the footer in the last row."""
    if view.footer:
        lines = lines[: view.height - 1]
        lines += [[]] * (view.height - 1 - len(lines)) + [[(view.footer, "dim")]]
    return [
        term_text.render(line, view.width, colour=view.colour, ascii_only=view.ascii_only)
        for line in lines[: view.height]
    ]


Section = Callable[[int], list[Line]]


def _one_column(state: RunState, view: View) -> list[Line]:
    parts: dict[str, Section] = {
        "head": lambda rows: sections.head(state, view.width)[:rows],
        "verdict": lambda rows: sections.verdict(state, view.width)[:rows],
        "alerts": lambda rows: sections.alerts(state, view.width)[:rows],
        "numbers": lambda rows: sections.numbers(state, view.width, rows),
        "curve": lambda rows: sections.loss_curve(state, view.width, rows),
        "ranks": lambda rows: tables.ranks(state, view.width, rows),
        "gpus": lambda rows: tables.gpus(state, view.width, rows),
        "system": lambda rows: term_text.flow(tables.system(state), view.width, rows, gap="  "),
        "warnings": lambda rows: sections.warnings(state)[-rows:],
        "log": lambda rows: sections.log(state, view.width, rows),
        "places": lambda rows: sections.places(state, view.width)[:rows],
    }
    sizes = share_out(state, parts, view)
    lines: list[Line] = []
    left = view.height - sum(sizes.values()) - bool(view.footer)
    for name, build in parts.items():
        block = build(sizes[name]) if sizes[name] else []
        left += sizes[name] - len(block)
        if block and lines and left > 0 and name not in ("verdict", "alerts", "places"):
            lines.append([])
            left -= 1
        lines += block
    return lines


def share_out(state: RunState, parts: dict[str, Section], view: View) -> dict[str, int]:
    """Rows for each section: first a few for each, by importance, then more."""
    ranks, gpus = len(state["ranks"]), len(state["gpus"])
    has_curve, has_log = len(state["loss_curve"]["points"]) > 1, bool(state["log"]["last_lines"])
    ended = state["run"]["state"] in ENDED
    wishes = [
        ("head", 3),
        ("verdict", view.height if ended else 2),
        ("alerts", 1),
        ("numbers", 2),
        ("ranks", 1),
        ("gpus", 1),
        ("system", 1),
        ("curve", 1),
        ("log", 2),
    ]
    wishes += [
        ("alerts", 3),
        ("places", 1),
        ("warnings", 1),
        ("ranks", min(ranks + 1, 5)),
        ("gpus", min(gpus + 1, 5)),
        ("curve", 3),
    ]
    wishes += [
        ("log", 4),
        ("warnings", 3),
        ("places", 2),
        ("system", 2),
        ("verdict", 4),
        ("ranks", ranks + 1),
    ]
    wishes += [("gpus", gpus + 1), ("alerts", 6)]
    tall = view.height > 30
    if tall:
        wishes += [
            ("curve", 6),
            ("warnings", 6),
            ("log", 6),
            ("curve", view.height // 4),
            ("log", 11),
            ("warnings", 20),
        ]
    wishes.append(("log", view.height))  # whatever room is left
    there = {name: bool(build(1)) for name, build in parts.items()} | {
        "curve": has_curve,
        "log": has_log,
    }
    # A tall screen keeps rows for the blank lines between sections.
    sizes, left = dict.fromkeys(parts, 0), view.height - bool(view.footer) - (7 if tall else 0)
    for name, wish in wishes:
        if there[name]:
            most = len(parts[name](wish))
            more = min(max(0, most - sizes[name]), left)
            sizes[name] += more
            left -= more
    return sizes


def _two_columns(state: RunState, view: View) -> list[Line]:
    """Curves on the left; ranks, GPUs and the machine on the right; head above and log below in
    full width."""
    rows = view.height - bool(view.footer)
    top = [
        *sections.head(state, view.width),
        *sections.verdict(state, view.width),
        *sections.alerts(state, view.width)[:5],
        [],
    ]
    top += [*sections.numbers(state, view.width, 2), []]
    left_width = (view.width - GAP) * 9 // 20
    right_width = view.width - GAP - left_width
    most = max(8, (rows - len(top)) * 3 // 5)
    blocks = [
        tables.gpus(state, right_width, min(len(state["gpus"]) + 1, most // 2)),
        term_text.flow(tables.system(state), right_width, 2, gap="  "),
    ]
    used = sum(len(b) + 1 for b in blocks if b)
    blocks.insert(0, tables.ranks(state, right_width, max(3, most - used)))
    right: list[Line] = []
    for block in blocks:
        right += ([[]] if right and block else []) + block
    bottom = [*sections.warnings(state)[-5:], *sections.places(state, view.width)]
    height = max(len(right), min(most, 14), rows - len(top) - len(bottom) - LOG_LINES - 3)
    speed = sections.speed_curve(state, left_width, height // 3) if height >= 9 else []
    left = sections.loss_curve(state, left_width, height - (len(speed) + 1 if speed else 0))
    left += [[], *speed] if speed else []
    middle = term_text.beside(left, right, left_width, GAP) if left else right
    room = rows - len(top) - len(middle) - len(bottom) - 2
    return [
        *top,
        *middle,
        [],
        *sections.log(state, view.width, room),
        *([[]] if bottom else []),
        *bottom,
    ]


def one_line(state: RunState) -> str:
    """The state as one line, for output that is not a terminal."""
    run, progress, training = state["run"], state["progress"], state["training"]
    words: list[Any] = [
        units.clock(state["time_unix_s"], "%Y-%m-%d %H:%M:%S"),
        term_text.clean(run["name"]),
        state_word(run["state"]),
    ]
    words += (
        []
        if progress["step"] is None
        else [
            msg(
                "monitor.line.step",
                step=progress["step"],
                total=progress["total_steps"] or "?",
            )
        ]
    )
    words += (
        []
        if training["loss"] is None
        else [
            f"loss {' '.join(filter(None, sections.loss(training)))}",
            sections.evaluation(training),
        ]
    )
    words += (
        []
        if (rate := metric_units.speed(training)) is None
        else [f"{units.count(rate)} {training['unit']}/s"]
    )
    words += (
        []
        if training["step_ms_median"] is None
        else [msg("monitor.screen.step_time") + units.milliseconds(training["step_ms_median"])]
    )
    words += (
        []
        if progress["eta_s"] is None
        else [msg("monitor.line.left", duration=units.duration(progress["eta_s"]))]
    )
    late = [str(r["rank"]) for r in state["ranks"] if r["late"]]
    words += [msg("monitor.line.late", ranks=", ".join(late))] if late else []
    words += [term_text.clean(run["reason"])] if run["reason"] else []
    words += [term_text.clean(a["text"]) for a in state["alerts"]]
    return "  ".join(filter(None, words))

"""The tables of a screen: ranks, GPUs, the system. When rows are short, the rows that matter most stay."""

from __future__ import annotations

from typing import Any

from training.monitor import draw
from training.monitor.draw import Line
from training.monitor.state import ENDED, State


def ranks(state: State, width: int, rows: int) -> list[Line]:
    """Late and dead ranks first when not all have room, and one line about the others."""
    every: list[dict[str, Any]] = state["ranks"]
    if not every or rows < 1:
        return []
    ended = state["run"]["state"] in ENDED
    if rows < 3 and len(every) + 1 > rows:
        return [_all_ranks(every, ended)]
    shown, others = every, []
    if len(every) + 1 > rows:
        urgent = sorted(every, key=lambda r: (not r["late"], r["alive"] is not False, -(r["beat_age_s"] or 0)))
        shown, others = sorted(urgent[: rows - 2], key=lambda r: r["rank"]), urgent[rows - 2 :]
    lines: list[Line] = [[(f"RANK {'PID':>8} {'STEP':>8} {'LAST BEAT':>10}  DOING", "dim")]]
    for r in shown:
        step = f"{r['step']:,}" if r["step"] is not None else "-"
        line: Line = [(f"{r['rank']:>4} {r['pid'] or '-':>8} {step:>8} ", ""), (f"{_age(r, ended):>10}", "bad" if r["late"] else "")]
        line.append(("  " + draw.clean(r["doing"] or "nothing heard yet"), "bad" if r["late"] else ""))
        if r["alive"] is False and not ended:
            line.append(("  process gone", "bad"))
        lines.append(line)
    return lines + ([_all_ranks(others, ended, "the other ")] if others else [])


def _age(rank: dict[str, Any], ended: bool) -> str:
    age = rank["beat_age_s"]
    if age is None:
        return "-"
    if ended:  # how long ago says nothing any more; when does
        return draw.clock(rank["beat_unix_s"])
    shown = f"{age:.1f} s" if age < 100 else draw.duration(age)
    return shown + (" LATE" if rank["late"] else "")


def _all_ranks(every: list[dict[str, Any]], ended: bool, which: str = "") -> Line:
    late = [r for r in every if r["late"]]
    ages = [r for r in every if r["beat_age_s"] is not None]
    words = f"{which}{len(every)} ranks" if len(every) != 1 else f"{which}1 rank"
    if not ended:
        words += f", {sum(bool(r['alive']) for r in every)} alive"
    if ages:
        oldest = max(ages, key=lambda r: r["beat_age_s"])
        words += f"; oldest beat {_age(oldest, ended)} (rank {oldest['rank']}: {draw.clean(oldest['doing'] or '-')})"
    return [(words, "bad" if late else "")]


def gpus(state: State, width: int, rows: int) -> list[Line]:
    """GPUs of the run first when not all have room."""
    every: list[dict[str, Any]] = state["gpus"]
    if not every:
        # Silence is right for a run on the CPU; a run on GPUs that can not be seen needs a word.
        return [[(f"GPUs: {draw.clean(state['gpus_reason'])}", "warn")]] if state["run"]["device"] == "cuda" else []
    shown = every
    if len(every) + 1 > rows:
        first = sorted(every, key=lambda g: (not g["in_plan"], not any(p["this_run"] for p in g["processes"])))
        shown = sorted(first[: max(0, rows - 2)], key=lambda g: g["index"])
    lines: list[Line] = [[(f"GPU {'NAME':<17} {'USE':>5} {'MEMORY GiB':>14} {'TEMP':>6} {'POWER':>6}  PROCESSES (* this run)", "dim")]]
    for g in shown:
        memory = f"{draw.gib(g['memory_used_bytes'])} / {draw.gib(g['memory_total_bytes'])}"
        name = draw.cut(draw.clean(g["name"]).removeprefix("NVIDIA ").removeprefix("GeForce "), 17)
        line: Line = [(f"{g['index']:>2}{'*' if g['in_plan'] else ' '} {name:<17} {_unit(g['use_percent'], ' %'):>5} ", "")]
        line += [(f"{memory:>14} ", _memory_style(g)), (f"{_unit(g['temperature_c'], ' °C'):>6} {_unit(g['power_w'], ' W'):>6}  ", "")]
        line += _processes(g["processes"])
        lines.append(line)
    if shown is not every:
        used = [g["use_percent"] for g in every if g["use_percent"] is not None]
        rest = f"{len(every)} GPUs" + (f", use {min(used)} to {max(used)} %" if used else "")
        lines = [*lines, [(rest, "dim")]] if len(lines) > 1 else [[(rest, "")]]
    return lines


def _unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _memory_style(gpu: dict[str, Any]) -> str:
    used, total = gpu["memory_used_bytes"], gpu["memory_total_bytes"]
    return "warn" if used is not None and total and used > 0.97 * total else ""


def _processes(processes: list[dict[str, Any]]) -> Line:
    line: Line = []
    for p in sorted(processes, key=lambda p: not p["this_run"]):
        owner = "*" if p["this_run"] else f"{draw.clean(p['user'])} " if p["user"] != "-" else ""
        memory = f" {draw.gib(p['used_bytes'])}" if p["used_bytes"] is not None else ""
        line.append((("" if not line else ", ") + f"{owner}{p['pid']}{memory}", "good" if p["this_run"] else "warn"))
    return line


def system(state: State) -> list[Line]:
    s = state["system"]
    use = f"load {s['load_1min']:.1f}" if s["cpu_percent"] is None else f"{s['cpu_percent']:.0f} %"
    return [
        [(f"CPU {use} of {s['cpu_cores']} cores", "")],
        [(f"RAM {_used(s, 'ram')}", _full(s, "ram", 0.95))],
        [(f"disk {_used(s, 'disk')}", _full(s, "disk", 0.97))],
        [(f"/dev/shm {_used(s, 'shm')}", _full(s, "shm", 0.9))],
    ]


def _used(system: dict[str, Any], name: str) -> str:
    """13.2/24 GiB: the total needs no decimals."""
    total = system[f"{name}_total_bytes"]
    return f"{draw.gib(system[f'{name}_used_bytes'])}/{'-' if total is None else round(total / (1 << 30))} GiB"


def _full(system: dict[str, Any], name: str, limit: float) -> str:
    used, total = system[f"{name}_used_bytes"], system[f"{name}_total_bytes"]
    return "bad" if used is not None and total and used > limit * total else ""

"""Tables of a screen: ranks, GPUs, system. If rows are short, the most important ones remain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.core import units
from training.core.cells import pad
from training.core.jsonl import whole
from training.core.messages import msg
from training.host.visible_devices import PART
from training.monitor import host_stats, script_rows, term_text
from training.monitor.run_status import ENDED
from training.monitor.sections import memory_word
from training.monitor.term_text import Line

if TYPE_CHECKING:
    from training.core.contracts.state import (
        GpuProcessState,
        GpuState,
        GpuTable,
        HostState,
        MachineState,
        RankState,
        RunState,
    )

METER = 24  # cells
NUMBERS_FROM = 90  # columns from which the GPU table shows rank numbers
SHARES_FROM = 75  # columns from which the rank table shows compute time and memory


def ranks(state: RunState, width: int, rows: int) -> list[Line]:
    """Late and dead ranks first if not all fit, and one line for the others."""
    every = state["ranks"]
    if not every or rows < 1:
        return []
    ended = state["run"]["state"] in ENDED
    if rows < 3 and len(every) + 1 > rows:
        return [_all_ranks(every, ended)]
    shown, others = every, []
    if len(every) + 1 > rows:
        urgent = sorted(
            every, key=lambda r: (not r["late"], r["alive"] is not False, -(r["beat_age_s"] or 0))
        )
        shown, others = sorted(urgent[: rows - 2], key=lambda r: r["rank"]), urgent[rows - 2 :]
    # Ranks of a user script have no heartbeat.
    program = state["run"].get("program")
    unheard = "-" if ended or program else msg("monitor.ranks.no_heartbeat")
    shares = width >= SHARES_FROM and any(r["compute_ms_median"] is not None for r in every)
    titles = f"RANK {'PID':>8} {pad(msg('monitor.column.step'), 8, right=True)}"
    if shares:
        titles += f" {pad(msg('monitor.column.compute'), 9, right=True)}"
        titles += f" {pad(memory_word(state).upper(), 9, right=True)}"
    if program:
        titles += script_rows.titles()
    else:
        titles += f" {pad(msg('monitor.column.last_beat'), 10, right=True)}"
    lines: list[Line] = [[(f"{titles}  {msg('monitor.column.doing')}", "dim")]]
    for r in shown:
        step = f"{r['step']:,}" if r["step"] is not None else "-"
        mine = (
            f" {units.milliseconds(r['compute_ms_median']):>9} {units.gib(r['memory_bytes']):>5} "
            f"GiB"
            if shares
            else ""
        )
        line: Line = [(f"{r['rank']:>4} {r['pid'] or '-':>8} {step:>8}{mine} ", "")]
        if program:
            line.append((script_rows.cells(r, ended=ended), ""))
        else:
            line.append((pad(_age(r, ended), 10, right=True), "bad" if r["late"] else ""))
        line.append(
            (
                "  " + term_text.clean(r["doing"] or r.get("last_line") or unheard),
                "bad" if r["late"] else "",
            )
        )
        if r["alive"] is False and not ended:
            line.append(("  " + msg("monitor.ranks.process_gone"), "bad"))
        lines.append(line)
    return lines + ([_all_ranks(others, ended, rest=True)] if others else [])


def _age(rank: RankState, ended: bool) -> str:
    age = rank["beat_age_s"]
    if age is None:
        return "-"
    if ended:  # the age is meaningless, the time is not
        return units.clock(rank["beat_unix_s"])
    shown = f"{age:.1f} s" if age < 100 else units.duration(age)
    return msg("monitor.ranks.late", age=shown) if rank["late"] else shown


def _all_ranks(every: list[RankState], ended: bool, *, rest: bool = False) -> Line:
    late = [r for r in every if r["late"]]
    ages = [r for r in every if r["beat_age_s"] is not None]
    words = units.plural(len(every), "rank")
    if rest:
        words = msg("monitor.ranks.others", ranks=words)
    if not ended and not any(r["pid"] and r["alive"] is None for r in every):
        words += msg("monitor.ranks.alive", count=sum(bool(r["alive"]) for r in every))
    if ages:
        oldest = max(ages, key=lambda r: r["beat_age_s"] or 0.0)
        words += msg(
            "monitor.ranks.oldest",
            age=_age(oldest, ended),
            rank=oldest["rank"],
            doing=term_text.clean(oldest["doing"] or "-"),
        )
    return [(words, "bad" if late else "")]


def gpus(state: GpuTable, width: int, rows: int) -> list[Line]:
    """GPUs of the run first if not all fit."""
    every = state["gpus"]
    if not every:
        # A run on the CPU needs no GPU table; a run whose GPUs cannot be queried needs the reason.
        return (
            [[(msg("monitor.gpus.none", reason=term_text.clean(state["gpus_reason"])), "warn")]]
            if state["run"]["device"] == "cuda"
            else []
        )
    shown = every
    if len(every) + 1 > rows:
        first = sorted(
            every, key=lambda g: (not g["in_plan"], not any(p["this_run"] for p in g["processes"]))
        )
        shown = sorted(first[: max(0, rows - 2)], key=lambda g: g["index"])
    titles = f"GPU {pad(msg('monitor.column.name'), 17)}"
    for title, cells in (
        (msg("monitor.column.use"), 5),
        (msg("monitor.column.gpu_memory"), 14),
        (msg("monitor.column.temperature"), 6),
        (msg("monitor.column.power"), 6),
    ):
        titles += f" {pad(title, cells, right=True)}"
    titles += f"  {msg('monitor.column.gpu_processes')}"
    lines: list[Line] = [[(titles, "dim")]]
    for g in shown:
        memory = f"{units.gib(g['memory_used_bytes'])} / {units.gib(g['memory_total_bytes'])}"
        line: Line = [
            (
                f"{g['index']:>2}{'*' if g['in_plan'] else ' '} {short_name(g):<17} "
                f"{unit(g['use_percent'], ' %'):>5} ",
                "",
            )
        ]
        line.append((f"{memory:>14} ", _memory_style(g)))
        line.append(
            (
                f"{unit(g['temperature_c'], ' °C'):>6} {unit(g['power_w'], ' W'):>6}  ",
                "warn" if g["throttle_reasons"] else "",
            )
        )
        line += processes(g["processes"], state["ranks"] if width >= NUMBERS_FROM else [])
        line += (
            [(("  " if g["processes"] else "") + msg("monitor.gpus.throttled"), "bad")]
            if g["throttle_reasons"]
            else []
        )
        lines.append(line)
    if shown is not every:
        used = [g["use_percent"] for g in every if g["use_percent"] is not None]
        rest = (
            msg("monitor.gpus.all_use", count=len(every), low=min(used), high=max(used))
            if used
            else msg("monitor.gpus.all", count=len(every))
        )
        lines = [*lines, [(rest, "dim")]] if len(lines) > 1 else [[(rest, "")]]
    return lines


def gpu_details(gpu: GpuState, ranks: list[RankState]) -> list[Line]:
    """Everything known about one GPU."""
    memory = msg(
        "monitor.gpu.used_of",
        used=units.gib(gpu["memory_used_bytes"]),
        total=f"{units.gib(gpu['memory_total_bytes'])} GiB",
    )
    used, total = gpu["memory_used_bytes"], gpu["memory_total_bytes"]
    share = None if used is None or not total else used / total
    power = unit(gpu["power_w"], " W")
    if gpu["power_limit_w"] is not None:
        power = msg("monitor.gpu.used_of", used=power, total=f"{gpu['power_limit_w']:.0f} W")
    drawn, limit = gpu["power_w"], gpu["power_limit_w"]
    title = f"GPU {gpu['index']}  {term_text.clean(gpu['name'])}"
    lines: list[Line] = [
        [
            (title, "bold"),
            ("  " + msg("monitor.gpu.used_here") if gpu["in_plan"] else "", "good"),
            (f"  {term_text.clean(gpu['uuid'])}", "dim"),
        ]
    ]
    lines.append(
        _meter(
            msg("monitor.gpu.use"),
            None if gpu["use_percent"] is None else gpu["use_percent"] / 100,
            unit(gpu["use_percent"], " %"),
        )
    )
    lines.append(_meter(msg("monitor.gpu.memory"), share, memory))
    share = drawn / limit if limit and drawn is not None else None
    lines.append(_meter(msg("monitor.gpu.power"), share, power))
    fan = msg("monitor.gpu.fan", percent=unit(gpu["fan_percent"], " %"))
    heat = _label(msg("monitor.gpu.temperature")) + unit(gpu["temperature_c"], " °C")
    lines.append([(f"{heat}   {fan}", "")])
    slow = gpu["throttle_reasons"]
    lines.append(
        [
            (_label(msg("monitor.gpu.clocks")), ""),
            (
                "-"
                if slow is None
                else host_stats.slowdowns(slow) or msg("monitor.gpu.not_throttled"),
                "bad" if slow else "",
            ),
        ]
    )
    numbers = _numbers(ranks)
    for p in sorted(gpu["processes"], key=lambda p: not p["this_run"]):
        who = (
            f"rank {numbers[p['pid']]}"
            if p["pid"] in numbers
            else msg("monitor.gpu.this_run")
            if p["this_run"]
            else msg("monitor.gpu.user", user=term_text.clean(p["user"]))
        )
        used_words = "-" if p["used_bytes"] is None else f"{units.gib(p['used_bytes'])} GiB"
        words = (
            f"{_label(msg('monitor.gpu.process'))}{p['pid']:>8}  {used_words:>9}  {who}  "
            f"{term_text.clean(p['command'])}"
        )
        lines.append([(words, "good" if p["this_run"] else "warn")])
    return lines


def _numbers(ranks: list[RankState]) -> dict[int | None, int]:
    """pid → rank, of this machine."""
    return {r["pid"]: r["rank"] for r in ranks if r["alive"] is not None}


def _meter(name: str, share: float | None, words: str) -> Line:
    return [
        (_label(name), ""),
        (term_text.bar(share, METER), "good") if share is not None else (" " * METER, ""),
        (f"  {words}", ""),
    ]


def _label(name: str) -> str:
    return f"  {pad(name, 12)} "


def short_name(gpu: GpuState) -> str:
    name = term_text.clean(gpu["name"]).removeprefix("NVIDIA ").removeprefix("GeForce ")
    # the size of a MIG instance is at the end
    cut = term_text.cut_middle if gpu["uuid"].startswith(PART) else term_text.cut
    return cut(name, 17)


def unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _memory_style(gpu: GpuState) -> str:
    used, total = gpu["memory_used_bytes"], gpu["memory_total_bytes"]
    return "warn" if used is not None and total and used > 0.97 * total else ""


def processes(every: list[GpuProcessState], ranks: list[RankState]) -> Line:
    """Processes of the run first, ranks with their numbers."""
    line: Line = []
    numbers = _numbers(ranks)
    for p in sorted(every, key=lambda p: not p["this_run"]):
        rank = f"rank {numbers[p['pid']]} " if p["pid"] in numbers else ""
        owner = (
            f"*{rank}"
            if p["this_run"]
            else f"{term_text.clean(p['user'])} "
            if p["user"] != "-"
            else ""
        )
        memory = f" {units.gib(p['used_bytes'])}" if p["used_bytes"] is not None else ""
        line.append(
            (
                ("" if not line else ", ") + f"{owner}{p['pid']}{memory}",
                "good" if p["this_run"] else "warn",
            )
        )
    return line


def system(state: MachineState) -> list[Line]:
    s = state["system"]
    cpu = (
        msg("monitor.system.load", load=s["load_1min"], cores=s["cpu_cores"])
        if s["cpu_percent"] is None
        else msg("monitor.system.cpu", percent=s["cpu_percent"], cores=s["cpu_cores"])
    )
    return [
        [(cpu, "")],
        [(f"{msg('monitor.system.ram')} {_used(s, 'ram')}", _full(s, "ram", 0.95))],
        [(f"{msg('monitor.system.disk')} {_used(s, 'disk')}", _full(s, "disk", 0.97))],
        [(f"/dev/shm {_used(s, 'shm')}", _full(s, "shm", 0.9))],
    ]


def _used(system: HostState, name: str) -> str:
    return units.part(
        whole(system.get(f"{name}_used_bytes")), whole(system.get(f"{name}_total_bytes"))
    )


def _full(system: HostState, name: str, limit: float) -> str:
    used, total = whole(system.get(f"{name}_used_bytes")), whole(system.get(f"{name}_total_bytes"))
    return "bad" if used is not None and total and used > limit * total else ""

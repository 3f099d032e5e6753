"""All runs of a folder in one table: state, progress, speed, best evaluation."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import find_run, metric_units, standing, units
from training.core import units as amounts
from training.core.cells import pad
from training.core.jsonl import mtime, read_object
from training.core.messages import msg
from training.core.rundir import RunDir
from training.monitor import host_stats, rank_states, tables, term_text
from training.monitor.run_status import DIED, ENDED, state_word
from training.monitor.screen import View, finish
from training.monitor.sections import BADGES
from training.monitor.state import GPU_PATIENCE_S, SCHEMA_VERSION, RunWatch
from training.monitor.term_text import Line

if TYPE_CHECKING:
    from training.core.contracts.state import GpuState, RunsState, RunState

MOST = 100  # runs, the newest ones
KEPT_S = 24 * 3600.0  # an older run that was followed stays for this time after its end
Stamp = tuple[int, float | None, float | None]  # mtimes of plan, summary and failure
HOLD_S = 0.15  # one look at the machine serves all runs read within this time


class RunTable:
    """Reads every run of a folder repeatedly; a run that has ended is read once."""

    def __init__(self, experiments: Path) -> None:
        self.experiments = experiments
        self._machine = host_stats.Shared(HOLD_S)
        self._watches: dict[Path, RunWatch] = {}
        # last state, and the files that a restart changes
        self._ended: dict[Path, tuple[Stamp, RunState]] = {}
        self._followed = set[Path]()  # older runs that were active
        self._gone: dict[Path, int] = {}  # older runs without a live process: mtime of the plan

    def read(self, patience_s: float = GPU_PATIENCE_S) -> RunsState:
        """Active runs first, then the newest. `patience_s`: longest wait for the GPU driver."""
        plans = sorted(find_run.planned(self.experiments), reverse=True)
        shown = plans[:MOST] + [pair for pair in plans[MOST:] if self._stays(*pair)]
        runs = [self._look(planned, path, patience_s) for planned, path in shown]
        runs.sort(key=lambda run: run["run"]["state"] in ENDED)
        self._machine.ask()
        gpus, host = self._machine.answer(patience_s, self.experiments)
        return {
            "schema_version": SCHEMA_VERSION,
            "time_unix_s": time.time(),
            "runs_there": len(plans),
            "runs": runs,
            "gpus": _merged(host_stats.gpu_records(gpus, set(), set()), runs),
            "gpus_reason": gpus.reason,
            "system": host,
        }

    def _stays(self, planned: int, path: Path) -> bool:
        """Whether an older run is shown: while it is active, and for a time after its end."""
        if known := self._known(planned, path):
            ended = known["run"]["ended_unix_s"] or 0.0
            return path in self._followed and time.time() - ended < KEPT_S
        if self._lives(planned, path):
            self._followed.add(path)
            return True
        return False

    def _lives(self, planned: int, path: Path) -> bool:
        """Cheaper than reading a run: there may be thousands."""
        if self._gone.get(path) == planned:
            return False
        run = RunDir(path)
        plan, supervisor = read_object(run.plan) or {}, read_object(run.supervisor) or {}
        elsewhere = standing.other_host(plan, supervisor)
        if elsewhere and standing.quiet_s(run) < standing.ELSEWHERE_S:
            lives = path in self._watches or not standing.has_ended(run, plan)
        else:
            lives = any(rank_states.supervised(run, plan, supervisor))
            lives = lives or (path in self._watches and not elsewhere)
        if not lives:
            self._gone[path] = planned
        return lives

    def _look(self, planned: int, path: Path, patience_s: float) -> RunState:
        if known := self._known(planned, path):
            return known
        stamp = _stamp(planned, path)
        watch = self._watches.setdefault(path, RunWatch(RunDir(path), shared=self._machine))
        state = watch.read(patience_s)
        how = state["run"]["state"]
        # one of another machine that was silent may write again
        unsure = how == DIED and watch.elsewhere
        if how in ENDED and not state["run"]["supervisor_alive"] and not unsure:
            self._ended[path] = stamp, state
            del self._watches[path]
        return state

    def _known(self, planned: int, path: Path) -> RunState | None:
        """The state of a run that has ended."""
        stamp, state = self._ended.get(path, (None, None))
        return state if stamp == _stamp(planned, path) else None


def _stamp(planned: int, path: Path) -> Stamp:
    run = RunDir(path)
    return planned, mtime(run.summary), mtime(run.failure)


def _merged(gpus: list[GpuState], runs: list[RunState]) -> list[GpuState]:
    """Marks the GPUs and processes of all active runs."""
    living = [run for run in runs if run["run"]["state"] not in ENDED]
    planned = {g["uuid"] for run in living for g in run["gpus"] if g["in_plan"]}
    ours = {
        p["pid"] for run in living for g in run["gpus"] for p in g["processes"] if p["this_run"]
    }
    for gpu in gpus:
        gpu["in_plan"] = gpu["uuid"] in planned
        for process in gpu["processes"]:
            process["this_run"] = process["pid"] in ours
    return gpus


def screen(state: RunsState, view: View, marked: int | None = None) -> list[str]:
    """A row for each run; below it alerts, GPUs and the machine."""
    runs = state["runs"]
    living = sum(run["run"]["state"] not in ENDED for run in runs)
    words = msg("monitor.runs.count", runs=amounts.plural(state["runs_there"], "run"), alive=living)
    if state["runs_there"] > len(runs):
        words += msg("monitor.runs.newest", count=len(runs))
    below = _below(state, view.width)
    room = _rows_above(below, view)
    first = max(0, min((marked or 0) - room // 2, len(runs) - room))
    right = units.clock(state["time_unix_s"])
    if len(runs) > room:
        part = msg("monitor.runs.part", first=first + 1, last=first + room, count=len(runs))
        right = f"{part}  {right}"
    lines: list[Line] = [
        term_text.sides([("Duet  ", "dim"), (words, "bold")], [(right, "dim")], view.width),
        [],
    ]
    wide = view.width >= 120
    name = max(12, min(40, view.width - (95 if wide else 66)))
    lines.append([(_titles(runs, name, wide), "dim")])
    lines += [
        _row(run, name, wide, number == marked)
        for number, run in enumerate(runs[first : first + room], start=first)
    ]
    return finish([*lines, [], *below], view)


def _titles(runs: list[RunState], name: int, wide: bool) -> str:
    """`name`: cells of the names."""
    titles = f"  {pad(msg('monitor.column.run'), name)} {pad(msg('monitor.column.state'), 8)}"
    columns = [
        (msg("monitor.column.step"), 9),
        (msg("monitor.column.done"), 6),
        (msg("monitor.column.loss"), 8),
        (msg("monitor.column.evaluation"), 8),
        (_speed_title(runs), 9),
        (msg("monitor.column.left"), 9),
    ]
    if wide:
        columns += [(msg("monitor.column.ranks"), 5), (msg("monitor.column.step_time"), 9)]
    titles += "".join(f" {pad(title, width, right=True)}" for title, width in columns)
    return f"{titles}  {msg('monitor.column.started')}" if wide else titles


def _speed_title(runs: list[RunState]) -> str:
    """The unit that all runs share; where they differ, each run's own screen shows its unit."""
    units = {unit for run in runs if (unit := run["training"]["unit"])}
    return (
        msg("monitor.column.speed")
        if len(units) > 1
        else f"{term_text.clean((units or {metric_units.TOKENS}).pop())[:7]}/s".upper()
    )


def _below(state: RunsState, width: int) -> list[Line]:
    """Alerts, GPUs and the machine."""
    alerts = [
        msg(
            "monitor.runs.alert",
            run=term_text.clean(run["run"]["name"]),
            alert=term_text.clean(a["text"]),
        )
        for run in state["runs"]
        for a in run["alerts"]
    ]
    gpus = tables.gpus(
        {
            "gpus": state["gpus"],
            "gpus_reason": state["gpus_reason"],
            "ranks": [],
            "run": {"device": None},
        },
        width,
        9,
    )
    machine = term_text.flow(tables.system(state), width, 2, gap="  ")
    return [*([("! ", "bad"), (alert, "bad")] for alert in alerts[:4]), *gpus, *machine]


def _rows_above(below: list[Line], view: View) -> int:
    return max(1, view.height - 4 - len(below) - bool(view.footer))


def rows_for(state: RunsState, view: View) -> int:
    """How many runs fit."""
    return _rows_above(_below(state, view.width), view)


def _row(state: RunState, name: int, wide: bool, marked: bool) -> Line:
    run, progress, training = state["run"], state["progress"], state["training"]
    done = "-" if progress["percent"] is None else f"{progress['percent']:.0f} %"
    step = "-" if progress["step"] is None else f"{progress['step']:,}"
    style = "bold" if marked else "" if run["state"] not in ENDED else "dim"
    label = term_text.cut_middle(term_text.clean(run["name"]), name)
    line: Line = [("> " if marked else "  ", "bold"), *term_text.fit([(label, style)], name + 1)]
    line.append((pad(state_word(run["state"]).upper(), 8) + " ", BADGES[run["state"]]))
    factor, _ = metric_units.display(training)
    loss = None if training["loss"] is None else training["loss"] * factor
    last, best = units.narrow(loss, 8), units.narrow(training["eval_best"], 8)
    numbers = f"{step:>9} {done:>6} {last:>8} {best:>8} "
    line.append(
        (
            numbers + f"{units.count(metric_units.speed(training)):>9} "
            f"{units.duration(progress['eta_s']):>9}",
            style,
        )
    )
    if wide:
        started = units.clock(run["started_unix_s"], "%m-%d %H:%M")
        line.append(
            (
                f" {run['ranks'] or '-':>5} {units.milliseconds(training['step_ms_median']):>9}  "
                f"{started}",
                style,
            )
        )
    return line

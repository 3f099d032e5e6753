"""Health report of one training: all checks → answer, first line, exit status."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import units
from training.core.errors import Exit, UserError
from training.core.jsonl import dig
from training.core.messages import msg
from training.core.rundir import RunDir
from training.host.gpus import GpuInventory
from training.monitor import host_stats
from training.monitor.health import (
    activity,
    gpu_placement,
    logs,
    progress_checks,
    rank_table,
    run_checks,
    target,
)
from training.monitor.health.activity import ActivityWindow
from training.monitor.health.check import BAD, OK, UNKNOWN, WARN, HealthCheck
from training.monitor.health.target import Target
from training.monitor.run_status import ENDED, FAILED, FINISHED, state_word
from training.monitor.state import RunWatch
from training.watchdog import stall_detector
from training.watchdog.hang_report import SHORT, UNDECIDED, HangFinding, NoFinding

if TYPE_CHECKING:
    from training.core.contracts.state import HealthRow, RunState

YES, NO, ANSWER_UNKNOWN, HAS_ENDED = "yes", "no", "unknown", "ended"
# Of several BAD checks, the first in ORDER is in the first line; YES requires all of DECIDING.
ORDER = (
    progress_checks.PROCESSES,
    progress_checks.STEPS,
    gpu_placement.NAME,
    "loss",
    "data",
    "parameters",
)
DECIDING = (progress_checks.PROCESSES, progress_checks.STEPS)


@dataclass
class HealthReport:
    """Everything that is shown. `state`: the monitor's state of the run."""

    answer: str
    text: str
    code: Exit
    checks: list[HealthCheck] = field(default_factory=list)
    ranks: list[HealthRow] = field(default_factory=list)
    target: Target | None = None
    run: RunDir | None = None
    state: RunState | None = None
    looked_s: float = 0.0

    @property
    def word(self) -> str:
        """The answer as it is shown."""
        match self.answer:
            case "yes":
                return msg("monitor.health.answer.yes")
            case "no":
                return msg("monitor.health.answer.no")
            case "ended":
                return msg("monitor.health.answer.ended")
        return msg("monitor.health.answer.unknown")

    @property
    def headline(self) -> str:
        return self.word + msg("monitor.health.answer.text", text=self.text)


def of_run(run: RunDir) -> HealthReport:
    """Raises UserError if the ranks run where they cannot be inspected."""
    shared = host_stats.Shared()
    watch = RunWatch(run, shared=shared)
    state = watch.read(0.0)
    if (report := _ended(run, state)) is not None:
        return report
    try:
        found = target.of_run(run)
    except UserError as error:
        if watch.elsewhere is None:
            return _without_ranks(run, watch, error)
        found = target.elsewhere(run)
    return _look(found, watch, shared)


def of_process(pid: int) -> HealthReport:
    """Raises UserError."""
    found, shared = target.of_process(pid), host_stats.Shared()
    return _look(found, RunWatch(found.run, shared=shared) if found.run else None, shared)


def _look(found: Target, watch: RunWatch | None, shared: host_stats.Shared) -> HealthReport:
    shared.ask(found.selected)
    before = watch.read(0.0) if watch else None
    log_watch = None if found.beats else logs.watch(found, shared)
    log = log_watch.read(0.0) if log_watch else None
    verdict: HangFinding | NoFinding = NoFinding(SHORT, "")
    if found.beats and before is not None:
        usual = before["training"]["step_ms_p95"]
        seen = activity.at_heartbeats(found, usual / 1000 if usual else None)
    else:
        seen, verdict = _at_processes(found)
    state = watch.read() if watch else None
    if found.run and found.pids and state and (report := _ended(found.run, state)) is not None:
        return report
    gpus, _ = shared.answer(activity.LOOK_S, found.run.path if found.run else Path())
    held, wanted = gpu_placement.find_placement(found, gpus), gpu_placement.expected(found, gpus)
    on = gpu_placement.own(held, wanted)
    later = log_watch.read(0.0) if log_watch else None
    happened = run_checks.events(found.run) if found.run else []
    checks = [progress_checks.processes(found, seen)]
    if found.beats and state is not None:
        checks.append(progress_checks.of_run(found, seen, state))
        begun = any(m.after and m.after.first_step for m in seen.motions.values())
        checks.append(gpu_placement.check(found, gpus, begun=begun))
        checks += run_checks.of_run(found, seen, state, happened)
        checks += run_checks.attention(state)
    else:
        records = {
            gpu_placement.key(g["uuid"], g["index"]): g
            for g in host_stats.gpu_records(gpus, set(found.pids.values()), set())
        }
        theirs = {r: records[name] for r, name in (wanted | on).items() if name in records}
        checks.append(
            progress_checks.of_processes(seen, verdict, theirs, logs_on=_progressed(log, later))
        )
        begun = checks[-1].status == OK  # before, a rank may prepare data without a GPU
        checks.append(gpu_placement.check(found, gpus, begun=begun))
        checks += run_checks.of_script(log, later)
        checks += run_checks.findings(happened) if found.run else []
    answer, text, code = _judge(found, checks, state if found.beats else later)
    return HealthReport(
        answer,
        text,
        code,
        checks,
        rank_table.rank_rows(found, seen, state, _indices(gpus, held, on)),
        found,
        found.run,
        state,
        seen.seconds,
    )


def _indices(
    seen: GpuInventory, held: gpu_placement.Places, on: dict[int, str]
) -> dict[int, tuple[int, int]]:
    """rank → index of its GPU, bytes that it holds there."""
    cards = gpu_placement.by_key(seen)
    return {rank: (cards[name].index, held[rank][name]) for rank, name in on.items()}


def _progressed(before: RunState | None, after: RunState | None) -> bool:
    first, last = (dig(state, "progress", "step") for state in (before, after))
    return first is not None and last is not None and last > first


def _at_processes(found: Target) -> tuple[ActivityWindow, HangFinding | NoFinding]:
    """Observes an apparent hang again for longer: any rank may pause for a second."""
    seen = activity.at_processes(found, activity.LOOK_S)
    verdict = stall_detector.detect_stall(seen.samples, {})
    again = isinstance(verdict, HangFinding) or verdict.code in UNDECIDED
    if again and not any(m.stopped or m.gone for m in seen.motions.values()):
        later = activity.at_processes(found, activity.MORE_S)
        joined = activity.join(seen, later)
        return joined, stall_detector.detect_stall(joined.samples, {})
    return seen, verdict


def _judge(
    found: Target, checks: list[HealthCheck], state: RunState | None
) -> tuple[str, str, Exit]:
    by_name = {check.name: check for check in checks}
    bad = [by_name[name] for name in ORDER if name in by_name and by_name[name].status == BAD]
    bad += [check for check in checks if check.status == BAD and check not in bad]
    if bad:
        more = msg("monitor.health.more_below", count=len(bad) - 1) if len(bad) > 1 else ""
        return NO, f"{bad[0].shown_headline}{more}", Exit.HANG
    unknown = [by_name[name] for name in DECIDING if by_name[name].status == UNKNOWN]
    if unknown:
        return ANSWER_UNKNOWN, unknown[0].shown_headline, Exit.RESOURCES
    count = found.world or len(found.pids)
    if found.beats:
        who = (
            msg("monitor.health.all_train", count=count)
            if count > 1
            else msg("monitor.health.one_trains")
        )
    else:
        who = (
            msg("monitor.health.all_work", count=count)
            if count > 1
            else msg("monitor.health.one_works")
        )
    who += _last_step(state)
    warned = [check.shown_name for check in checks if check.status == WARN]
    if warned:
        who += msg(
            "monitor.health.warnings",
            warnings=units.plural(len(warned), "warning"),
            checks=msg("monitor.join.comma").join(warned),
        )
    return YES, who, Exit.DONE


def _last_step(state: RunState | None) -> str:
    if (
        state is None
        or state["training"]["last_step_unix_s"] is None
        or state["progress"]["step"] is None
    ):
        return ""
    age = max(0.0, time.time() - state["training"]["last_step_unix_s"])
    return msg(
        "monitor.health.last_step",
        step=state["progress"]["step"],
        duration=f"{age:.1f} s" if age < 10 else units.age(age),
    )


def _ended(run: RunDir, state: RunState) -> HealthReport | None:
    """Report on a run that has ended, perhaps only until a restart; None if it has not."""
    how = state["run"]["state"]
    if how not in ENDED:
        return None
    progress = state["progress"]
    step, total = progress["step"], progress["total_steps"]
    ago = state["time_unix_s"] - (state["run"]["ended_unix_s"] or state["time_unix_s"])
    word, past = state_word(how), units.age(max(0.0, ago))
    if step is None:
        text = msg("monitor.health.ended_without_steps", state=word, duration=past)
    elif total:
        text = msg("monitor.health.ended_of", state=word, step=step, total=total, duration=past)
    else:
        text = msg("monitor.health.ended", state=word, step=step, duration=past)
    if reason := state["run"]["reason"]:
        text = msg("monitor.health.ended_because", how=text, reason=reason)
    checks = [run_checks.loss(state)]
    found = state["checkpoint"]
    if found is not None:
        checks.append(
            HealthCheck(
                "checkpoint",
                OK,
                msg("monitor.health.checkpoint.at", step=found["step"], path=found["path"]),
            )
        )
    happened = run_checks.findings(run_checks.events(run))
    answer, code = HAS_ENDED, Exit.DONE if how == FINISHED else Exit.HANG
    if how == FAILED and state["run"]["supervisor_alive"]:
        answer, code = ANSWER_UNKNOWN, Exit.RESOURCES
        pid = state["run"]["supervisor_pid"]
        text = msg("monitor.health.may_restart", text=text, pid=pid)
    ranks = rank_table.at_the_end(state)
    return HealthReport(answer, text, code, [*checks, *happened], ranks, None, run, state)


def _without_ranks(run: RunDir, watch: RunWatch, error: UserError) -> HealthReport:
    """Report on a run without ranks on this machine: before its first start, between two starts, or
    on another machine."""
    state = watch.read(0.0)
    if (report := _ended(run, state)) is not None:
        return report
    pid = state["run"]["supervisor_pid"]
    if state["run"]["supervisor_alive"]:
        text = msg("monitor.health.supervisor_only", pid=pid)
    else:
        text = state["run"]["reason"] or error.problems[0].what
    check = HealthCheck(progress_checks.PROCESSES, UNKNOWN, error.problems[0].what)
    return HealthReport(ANSWER_UNKNOWN, text, Exit.RESOURCES, [check], [], None, run, state)

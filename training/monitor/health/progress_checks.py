"""Checks that decide the answer: are all ranks there, and does each make progress? By heartbeats
for Duet's tasks, else by stacks, CPU, I/O and collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from training.core import phases
from training.core.heartbeat import FINISHED, HeartbeatRecord, kind
from training.core.messages import msg
from training.core.run_reader import as_plan
from training.monitor.health import activity
from training.monitor.health.activity import ActivityWindow, RankActivity
from training.monitor.health.check import (
    BAD,
    OK,
    UNKNOWN,
    HealthCheck,
    alike,
    numbers,
    separated,
    span,
)
from training.monitor.health.target import Target
from training.watchdog import gpu_waits, heartbeat_watchdog, stall_detector
from training.watchdog.hang_report import BLIND, PAUSED, UNDECIDED, HangFinding, NoFinding
from training.watchdog.probes.stacks import own
from training.watchdog.probes.trace import IDLE_SHARE

if TYPE_CHECKING:
    from training.core.contracts.state import GpuState, RunState

PROCESSES, STEPS = "processes", "steps"
# Share of the power limit that a computing GPU exceeds; one that spins in a collective draws less,
# at full utilization.
AT_WORK = 0.35
MANY = 4  # of more ranks, only those without work are listed


def processes(target: Target, looked: ActivityWindow) -> HealthCheck:
    """Whether all expected ranks have a process."""
    comma = msg("monitor.join.comma")
    shown = comma.join(
        msg("monitor.health.processes.rank", rank=rank, pid=pid)
        for rank, pid in list(target.pids.items())[:8]
    )
    shown += f"{comma}…" if len(target.pids) > 8 else ""
    finished = {m.rank for m in looked.motions.values() if m.after and m.after.phase == FINISHED}
    missing = [rank for rank in target.missing if rank not in finished]
    gone = [m.rank for m in looked.motions.values() if m.gone and m.rank not in finished]
    if missing:
        have = (
            msg("monitor.health.processes.rank_missing", rank=numbers(missing))
            if len(missing) == 1
            else msg("monitor.health.processes.ranks_missing", ranks=numbers(missing))
        )
        text = msg(
            "monitor.health.processes.incomplete",
            count=len(target.pids),
            expected=target.here,
            source=target.known_by,
            ranks=shown,
            missing=have,
        )
        return HealthCheck(PROCESSES, BAD, text, tuple(missing), have)
    if gone and len(gone) == len(looked.motions):
        text = msg("monitor.health.processes.all_ended")
        return HealthCheck(PROCESSES, UNKNOWN, text, tuple(gone))
    if gone:
        ended = (
            msg("monitor.health.processes.rank_ended", rank=numbers(gone))
            if len(gone) == 1
            else msg("monitor.health.processes.ranks_ended", ranks=numbers(gone))
        )
        text = msg("monitor.health.processes.with", headline=ended, ranks=shown)
        return HealthCheck(PROCESSES, BAD, text, tuple(gone), ended)
    if target.world is None:
        text = msg("monitor.health.processes.no_world", count=len(target.pids), ranks=shown)
        return HealthCheck(PROCESSES, OK, text)
    if target.here is None:
        text = msg(
            "monitor.health.processes.some_here",
            count=len(target.pids),
            world=target.world,
            ranks=shown,
        )
        return HealthCheck(PROCESSES, UNKNOWN, text)
    if target.elsewhere:
        text = msg(
            "monitor.health.processes.elsewhere",
            count=len(target.pids),
            expected=target.here,
            ranks=shown or msg("monitor.health.processes.none"),
            others=numbers(target.elsewhere),
        )
        return HealthCheck(PROCESSES, OK, text)
    text = msg(
        "monitor.health.processes.all",
        count=len(target.pids),
        world=target.world,
        source=target.known_by,
        ranks=shown,
    )
    return HealthCheck(PROCESSES, OK, text)


def of_run(target: Target, looked: ActivityWindow, state: RunState) -> HealthCheck:
    """Progress by heartbeats: each rank publishes every phase that it enters."""
    motions = looked.motions
    if stopped := _stopped(motions):
        return stopped
    silent = [m.rank for m in motions.values() if m.after is None and m.pid is None]
    here = {rank: m for rank, m in motions.items() if rank not in silent}
    if all(m.stepped for m in here.values()):
        text = msg(
            "monitor.health.steps.in_s",
            ranks=alike({m.rank: _steps(m) for m in here.values()}),
            seconds=looked.seconds,
        )
        if silent:
            return HealthCheck(
                STEPS,
                UNKNOWN,
                separated([text, _no_heartbeat(silent)]),
                tuple(silent),
                _elsewhere(silent),
            )
        return HealthCheck(STEPS, OK, text)
    if found := _overdue(target):
        return HealthCheck(
            STEPS,
            BAD,
            found.sentence(),
            (found.rank,) if found.rank is not None else (),
            _headline(found),
        )
    if silent:
        return HealthCheck(
            STEPS,
            UNKNOWN,
            separated([_phases(here), _no_heartbeat(silent)]),
            tuple(silent),
            _elsewhere(silent),
        )
    return _without_a_step(here, looked.seconds, state)


def _no_heartbeat(silent: list[int]) -> str:
    return msg("monitor.health.steps.no_heartbeat", ranks=numbers(silent))


def _without_a_step(
    motions: dict[int, RankActivity], seconds: float, state: RunState
) -> HealthCheck:
    """No rank is overdue, and not every rank has begun a step."""
    beats = {rank: m.after for rank, m in motions.items() if m.after}
    doing = _phases(motions)
    text = msg("monitor.health.steps.not_all", seconds=seconds, ranks=doing)
    if len(beats) < len(motions) or any(b.first_step == 0 for b in beats.values()):
        headline = msg("monitor.health.steps.not_begun", ranks=doing)
        return HealthCheck(STEPS, UNKNOWN, text, headline=headline)
    finished = [rank for rank, b in beats.items() if b.phase == FINISHED]
    if finished:
        headline = msg("monitor.health.steps.about_to_end", ranks=numbers(finished))
        return HealthCheck(STEPS, UNKNOWN, text, headline=headline)
    still = [m for m in motions.values() if not m.stepped and not m.moved and not m.busy]
    # A rank that waits for a busy one is as patient as that one.
    waits = [m for m in still if m.after and phases.waits(m.after.phase)]
    if len(waits) < len(still) or len(still) == len(motions):
        who = [m for m in still if m not in waits] or still
        idle = msg("monitor.health.steps.idle", ranks=numbers([m.rank for m in who]))
        return HealthCheck(
            STEPS,
            UNKNOWN,
            separated([text, idle]),
            tuple(m.rank for m in who),
            msg(
                "monitor.health.steps.no_progress",
                seconds=seconds,
                ranks=_phases({m.rank: m for m in who}),
            ),
        )
    between = [b.phase for b in beats.values() if kind(b.phase) in phases.BETWEEN]
    if between:
        return HealthCheck(STEPS, OK, msg("monitor.health.steps.between", ranks=doing))
    usual = state["training"]["step_ms_p95"]
    within = (
        msg("monitor.health.steps.within_usual", usual_s=usual / 1000, ranks=doing)
        if usual
        else msg("monitor.health.steps.within", ranks=doing)
    )
    return HealthCheck(STEPS, OK, within)


def of_processes(
    looked: ActivityWindow,
    verdict: HangFinding | NoFinding,
    gpus: dict[int, GpuState],
    *,
    logs_on: bool = False,
) -> HealthCheck:
    """Progress by stacks, CPU, I/O and collectives. `gpus`: the GPU of each rank; `logs_on`: the
    log shows further steps."""
    motions = looked.motions
    if stopped := _stopped(motions):
        return stopped
    work = {rank: text for rank, m in motions.items() if (text := _work(m, gpus.get(rank)))}
    proof = msg("monitor.health.steps.in_s", ranks=_shown(motions, work), seconds=looked.seconds)
    counted = [m.calls for m in motions.values()]
    if counted and all(calls and calls[1] > calls[0] for calls in counted):
        return HealthCheck(STEPS, OK, proof)
    if isinstance(verdict, HangFinding):
        use_gpus = [rank for rank, m in motions.items() if m.course and m.course.last.gpu]
        waits_for_gpu = verdict.rank is None and gpu_waits.may_compute(verdict, use_gpus)
        # a barrier waits for the queue of the GPU, too
        for_gpu = {
            *gpu_waits.may_compute(verdict, use_gpus),
            *gpu_waits.on_gpu(verdict, gpu_waits.BARRIER),
        }
        compute = verdict.rank is None and all(
            rank in for_gpu and rank in use_gpus and _computes(gpus.get(rank)) for rank in motions
        )
        if compute or (waits_for_gpu and logs_on):
            text = separated([proof, msg("monitor.health.steps.gpus_compute")])
            return HealthCheck(STEPS, OK, text)
        if waits_for_gpu:
            text = separated([proof, verdict.sentence()])
            headline = msg("monitor.health.steps.wait_for_gpus", seconds=verdict.since_s)
            return HealthCheck(STEPS, UNKNOWN, text, headline=headline)
        return HealthCheck(
            STEPS,
            BAD,
            verdict.sentence(),
            (verdict.rank,) if verdict.rank is not None else (),
            _headline(verdict),
        )
    idle = sorted(set(motions) - set(work))
    unsure = verdict.code in {BLIND, PAUSED, *UNDECIDED}
    if verdict.code == BLIND and not idle and all(map(_uses_cpu, motions.values())):
        return HealthCheck(
            STEPS,
            UNKNOWN,
            separated([proof, str(verdict)]),
            headline=msg("monitor.health.steps.no_stacks", why=verdict),
        )
    if unsure or idle:
        text = separated([proof, str(verdict)])
        return HealthCheck(STEPS, UNKNOWN, text, tuple(idle), headline=str(verdict))
    return HealthCheck(STEPS, OK, proof)


def _stopped(motions: dict[int, RankActivity]) -> HealthCheck | None:
    found = [m for m in motions.values() if m.stopped]
    if not found:
        return None
    who, pids = numbers([m.rank for m in found]), " ".join(str(m.pid) for m in found)
    single = len(found) == 1
    if all(set(m.states) == {"t"} for m in found):
        headline = (
            msg("monitor.health.steps.rank_traced", rank=who)
            if single
            else msg("monitor.health.steps.ranks_traced", ranks=who)
        )
    else:
        headline = (
            msg("monitor.health.steps.rank_stopped", rank=who, pid=pids)
            if single
            else msg("monitor.health.steps.ranks_stopped", ranks=who, pids=pids)
        )
    others = {m.rank: m for m in motions.values() if not m.stopped and m.after}
    text = separated([headline, *([_phases(others)] if others else [])])
    return HealthCheck(STEPS, BAD, text, tuple(m.rank for m in found), headline)


def _overdue(target: Target) -> HangFinding | None:
    plan, run = target.plan, target.run
    if run is None or not target.pids or not {"compile", "config", "ranks"} <= set(plan):
        return None
    return heartbeat_watchdog.look_once(run, as_plan(plan, run.plan), target.pids, activity.MORE_S)


def _steps(m: RankActivity) -> str:
    assert m.before and m.after
    return msg("monitor.health.steps.from_to", before=m.before.step, after=m.after.step)


def _phases(motions: dict[int, RankActivity]) -> str:
    return alike({rank: doing(m.after) for rank, m in motions.items()})


def doing(beat: HeartbeatRecord | None) -> str:
    if beat is None:
        return msg("monitor.health.steps.unheard")
    if beat.age_s < 1:
        return msg("monitor.health.steps.entered", phase=beat)
    return msg("monitor.health.steps.in_phase", phase=beat, seconds=beat.age_s)


def _elsewhere(silent: list[int]) -> str:
    return msg("monitor.health.steps.elsewhere", ranks=numbers(silent))


def _headline(found: HangFinding) -> str:
    """First line of the answer for a hang."""
    if found.compares:
        return found.how
    known = found.where and found.where not in found.how
    how = found.how
    how += msg("monitor.health.steps.hang_place", place=found.where) if known else ""
    if not found.phase:
        return replace(found, how=how).short()
    return msg(
        "monitor.health.steps.hang_in_phase",
        rank=found.rank,
        phase=found.phase,
        how=how,
        seconds=found.since_s,
    )


def _work(m: RankActivity, gpu: GpuState | None) -> str:
    """Evidence that the rank is at work; "" if there is none."""
    c, found = m.course, []
    if m.calls and m.calls[1] > m.calls[0]:
        found.append(msg("monitor.health.work.collectives", before=m.calls[0], after=m.calls[1]))
    if c is None:
        return ""
    if stall_detector.waits(c):
        return msg("monitor.join.comma").join(found)
    if c.own_cpu > IDLE_SHARE:
        found.append(msg("watchdog.stall.busy", percent=100 * c.own_cpu))
    if c.children_work:
        found.append(msg("monitor.health.work.children", percent=100 * c.childrens_cpu))
    if c.moves_data:
        found.append(f"{c.bytes_moved / 1e3:.0f} kB/s")
    if c.frames and not c.same_place:
        found.append(msg("monitor.health.work.stack"))
    if c.frames and c.woken and not c.same_functions:
        found.append(msg("monitor.health.work.loops"))
    if gpu and _computes(gpu):
        found.append(f"GPU {gpu['index']} {gpu['use_percent']} %")
    return msg("monitor.join.comma").join(found)


def _uses_cpu(m: RankActivity) -> bool:
    return m.course is not None and m.course.own_cpu > IDLE_SHARE


def _shown(motions: dict[int, RankActivity], work: dict[int, str]) -> str:
    if len(motions) > MANY and len(work) == len(motions):
        shares = [100 * m.cpu for m in motions.values() if m.cpu is not None]
        return msg("monitor.health.work.every_rank", share=span(shares, "%"))
    return alike({rank: work.get(rank) or _no_work(m) for rank, m in motions.items()})


def _no_work(m: RankActivity) -> str:
    name = stall_detector.waits(m.course) if m.course else None
    if name:
        return msg("monitor.health.work.waits_in", name=name)
    return msg("monitor.health.work.none") if m.course else msg("monitor.health.work.ended")


def _computes(gpu: GpuState | None) -> bool:
    """By its power: a kernel that waits for other ranks has full utilization too."""
    if gpu is None or not gpu["use_percent"] or not gpu["power_w"] or not gpu["power_limit_w"]:
        return False
    return bool(gpu["power_w"] > AT_WORK * gpu["power_limit_w"])


def where(m: RankActivity) -> str | None:
    main = m.course.last.main if m.course else None
    frame = own(main.frames) if main else None
    return str(frame) if frame else None

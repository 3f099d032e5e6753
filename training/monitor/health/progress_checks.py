"""Checks that decide the answer: are all ranks there, and does each make progress? By heartbeats
for Duet's tasks, else by stacks, CPU, I/O and collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.core import phases
from training.core.heartbeat import FINISHED, HeartbeatRecord, kind
from training.core.run_reader import as_plan
from training.monitor.health import activity
from training.monitor.health.activity import ActivityWindow, RankActivity
from training.monitor.health.check import BAD, OK, UNKNOWN, HealthCheck, alike, numbers, span
from training.monitor.health.target import Target
from training.watchdog import heartbeat_watchdog, stall_detector
from training.watchdog.hang_report import BLIND, LOOPS, PAUSED, QUIET, HangFinding, NoFinding
from training.watchdog.probes.sampling import IDLE_SHARE
from training.watchdog.probes.stacks import own

if TYPE_CHECKING:
    from training.core.contracts.state import GpuState, RunState

PROCESSES, STEPS = "processes", "steps"
# Share of the power limit that a computing GPU exceeds; one that spins in a collective draws less,
# at full utilization.
AT_WORK = 0.35
MANY = 4  # of more ranks, only those without work are listed


def processes(target: Target, looked: ActivityWindow) -> HealthCheck:
    """Whether all expected ranks have a process."""
    shown = ", ".join(f"rank {rank} pid {pid}" for rank, pid in list(target.pids.items())[:8])
    shown += ", …" if len(target.pids) > 8 else ""
    finished = {m.rank for m in looked.motions.values() if m.after and m.after.phase == FINISHED}
    missing = [rank for rank in target.missing if rank not in finished]
    gone = [m.rank for m in looked.motions.values() if m.gone and m.rank not in finished]
    if missing:
        have = f"{numbers(missing)} {'has' if len(missing) == 1 else 'have'} no process"
        text = (
            f"{len(target.pids)} of {target.here} ranks expected here by {target.known_by}: "
            f"{shown}; {have}"
        )
        return HealthCheck(PROCESSES, BAD, text, tuple(missing), have)
    if gone and len(gone) == len(looked.motions):
        text = "every rank has just ended; see its log for the reason"
        return HealthCheck(PROCESSES, UNKNOWN, text, tuple(gone))
    if gone:
        ended = f"{numbers(gone)} {'has' if len(gone) == 1 else 'have'} just ended"
        return HealthCheck(PROCESSES, BAD, f"{ended}: {shown}", tuple(gone), ended)
    if target.world is None:
        text = (
            f"{len(target.pids)} ({shown}); the expected number is unknown: started without "
            f"WORLD_SIZE"
        )
        return HealthCheck(PROCESSES, OK, text)
    if target.here is None:
        text = (
            f"{len(target.pids)} of {target.world} ranks are here ({shown}); the others may run on "
            f"other machines"
        )
        return HealthCheck(PROCESSES, UNKNOWN, text)
    if target.elsewhere:
        text = (
            f"{len(target.pids)} of {target.here} here ({shown or 'none'}); "
            f"{numbers(target.elsewhere)} on other machines"
        )
        return HealthCheck(PROCESSES, OK, text)
    return HealthCheck(
        PROCESSES, OK, f"{len(target.pids)} of {target.world} by {target.known_by}: {shown}"
    )


def of_run(target: Target, looked: ActivityWindow, state: RunState) -> HealthCheck:
    """Progress by heartbeats: each rank publishes every phase that it enters."""
    motions = looked.motions
    if stopped := _stopped(motions):
        return stopped
    silent = [m.rank for m in motions.values() if m.after is None and m.pid is None]
    here = {rank: m for rank, m in motions.items() if rank not in silent}
    if all(m.stepped for m in here.values()):
        text = f"{alike({m.rank: _steps(m) for m in here.values()})}, in {looked.seconds:.1f} s"
        if silent:
            return HealthCheck(
                STEPS,
                UNKNOWN,
                f"{text}; {numbers(silent)}: no heartbeat here",
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
            f"{_phases(here)}; {numbers(silent)}: no heartbeat here",
            tuple(silent),
            _elsewhere(silent),
        )
    return _without_a_step(here, looked.seconds, state)


def _without_a_step(
    motions: dict[int, RankActivity], seconds: float, state: RunState
) -> HealthCheck:
    """No rank is overdue, and not every rank has begun a step."""
    beats = {rank: m.after for rank, m in motions.items() if m.after}
    text = f"not every rank began a step in {seconds:.1f} s: {_phases(motions)}"
    if len(beats) < len(motions) or any(b.first_step == 0 for b in beats.values()):
        return HealthCheck(
            STEPS, UNKNOWN, text, headline=f"training has not begun: {_phases(motions)}"
        )
    finished = [rank for rank, b in beats.items() if b.phase == FINISHED]
    if finished:
        return HealthCheck(
            STEPS, UNKNOWN, text, headline=f"the run is about to end: {numbers(finished)} finished"
        )
    still = [m for m in motions.values() if not m.stepped and not m.moved and not m.busy]
    # A rank that waits for a busy one is as patient as that one.
    waits = [m for m in still if m.after and phases.waits(m.after.phase)]
    if len(waits) < len(still) or len(still) == len(motions):
        who = [m for m in still if m not in waits] or still
        doing = _phases({m.rank: m for m in who})
        text = f"{text}; no activity on {numbers([m.rank for m in who])}, but not yet overdue"
        return HealthCheck(
            STEPS,
            UNKNOWN,
            text,
            tuple(m.rank for m in who),
            f"no progress for {seconds:.0f} s, but no rank is overdue: {doing}",
        )
    between = [b.phase for b in beats.values() if kind(b.phase) in phases.BETWEEN]
    if between:
        return HealthCheck(STEPS, OK, f"between two steps: {_phases(motions)}; not overdue")
    usual = state["training"]["step_ms_p95"]
    lasts = f" of usually up to {usual / 1000:.0f} s" if usual else ""
    return HealthCheck(STEPS, OK, f"within a step{lasts}: {_phases(motions)}; not overdue")


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
    proof = f"{_shown(motions, work)}, in {looked.seconds:.1f} s"
    counted = [m.calls for m in motions.values()]
    if counted and all(calls and calls[1] > calls[0] for calls in counted):
        return HealthCheck(STEPS, OK, proof)
    if isinstance(verdict, HangFinding):
        waits_for_gpu = verdict.rank is None and stall_detector.on_gpu(verdict)
        if waits_for_gpu and (logs_on or all(_computes(gpus.get(rank)) for rank in motions)):
            return HealthCheck(STEPS, OK, f"{proof}; all wait for their GPUs, which are computing")
        if waits_for_gpu:
            text = f"{proof}; {verdict.sentence()}"
            headline = (
                f"all ranks have waited for their GPUs at the same line for "
                f"{verdict.since_s:.0f} s: check again later"
            )
            return HealthCheck(STEPS, UNKNOWN, text, headline=headline)
        return HealthCheck(
            STEPS,
            BAD,
            verdict.sentence(),
            (verdict.rank,) if verdict.rank is not None else (),
            _headline(verdict),
        )
    idle = sorted(set(motions) - set(work))
    unsure = verdict.code in (BLIND, QUIET, LOOPS, PAUSED)
    if verdict.code == BLIND and not idle:
        return HealthCheck(
            STEPS,
            UNKNOWN,
            f"{proof}; {verdict}",
            headline=f"the ranks use their CPUs, but their stacks are not readable: {verdict}",
        )
    if unsure or idle:
        return HealthCheck(
            STEPS, UNKNOWN, f"{proof}; {verdict}", tuple(idle), headline=str(verdict)
        )
    return HealthCheck(STEPS, OK, proof)


def _stopped(motions: dict[int, RankActivity]) -> HealthCheck | None:
    found = [m for m in motions.values() if m.stopped]
    if not found:
        return None
    who, pids = numbers([m.rank for m in found]), " ".join(str(m.pid) for m in found)
    be = "is" if len(found) == 1 else "are"
    by = (
        "held by a debugger"
        if all(set(m.states) == {"t"} for m in found)
        else f"stopped (SIGSTOP); resume: kill -CONT {pids}"
    )
    others = {m.rank: m for m in motions.values() if not m.stopped and m.after}
    text = f"{who} {be} {by}" + (f"; {_phases(others)}" if others else "")
    return HealthCheck(STEPS, BAD, text, tuple(m.rank for m in found), f"{who} {be} {by}")


def _overdue(target: Target) -> HangFinding | None:
    plan, run = target.plan, target.run
    if run is None or not target.pids or not {"compile", "config", "ranks"} <= set(plan):
        return None
    return heartbeat_watchdog.look_once(run, as_plan(plan, run.plan), target.pids, activity.MORE_S)


def _steps(m: RankActivity) -> str:
    assert m.before and m.after
    return f"step {m.before.step} → {m.after.step}"


def _phases(motions: dict[int, RankActivity]) -> str:
    return alike({rank: doing(m.after) for rank, m in motions.items()})


def doing(beat: HeartbeatRecord | None) -> str:
    return f"in '{beat}' for {_age(beat.age_s)}" if beat else "without a heartbeat yet"


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else "less than 1 s"


def _elsewhere(silent: list[int]) -> str:
    return f"{numbers(silent)}: on another machine, whose heartbeats are not visible here"


def _headline(found: HangFinding) -> str:
    """First line of the answer for a hang."""
    if found.rank is None:
        return found.how
    at = f", at {found.where}" if found.where and found.where not in found.how else ""
    doing = f" in '{found.phase}'" if found.phase else ""
    return f"rank {found.rank}{doing} {found.how}{at}, for {found.since_s:.1f} s"


def _work(m: RankActivity, gpu: GpuState | None) -> str:
    """Evidence that the rank is at work; "" if there is none."""
    c, found = m.course, []
    if m.calls and m.calls[1] > m.calls[0]:
        found.append(f"collective {m.calls[0]} → {m.calls[1]}")
    if c is None:
        return ""
    if stall_detector.waits(c):
        return ", ".join(found)
    if c.own_cpu > IDLE_SHARE:
        found.append(f"{100 * c.own_cpu:.0f} % of a core")
    if c.children_work:
        found.append(f"child processes {100 * c.childrens_cpu:.0f} %")
    if c.moves_data:
        found.append(f"{c.bytes_moved / 1e3:.0f} kB/s")
    if c.frames and not c.same_place:
        found.append("changing stack")
    if c.woken and not c.same_functions:
        found.append("looping")
    if gpu and _computes(gpu):
        found.append(f"GPU {gpu['index']} {gpu['use_percent']} %")
    return ", ".join(found)


def _shown(motions: dict[int, RankActivity], work: dict[int, str]) -> str:
    if len(motions) > MANY and len(work) == len(motions):
        shares = [100 * m.cpu for m in motions.values() if m.cpu is not None]
        return f"every rank is at work, with {span(shares, '% of a core')}"
    return alike({rank: work.get(rank) or _no_work(m) for rank, m in motions.items()})


def _no_work(m: RankActivity) -> str:
    name = stall_detector.waits(m.course) if m.course else None
    return f"waits in {name}" if name else "no activity" if m.course else "has ended"


def _computes(gpu: GpuState | None) -> bool:
    """By its power: a kernel that waits for other ranks has full utilization too."""
    if gpu is None or not gpu["use_percent"] or not gpu["power_w"] or not gpu["power_limit_w"]:
        return False
    return bool(gpu["power_w"] > AT_WORK * gpu["power_limit_w"])


def where(m: RankActivity) -> str | None:
    main = m.course.last.main if m.course else None
    frame = own(main.frames) if main else None
    return str(frame) if frame else None

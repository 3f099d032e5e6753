"""Which rank do the others wait for? Decided from snapshots, in this order: a stopped process,
different collectives, the GPU that has not reached the collective in which the others wait, the
rank behind, the rank that is not where ranks wait for each other. Without evidence no rank is
blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from training.core import phases
from training.core.messages import msg
from training.watchdog import compared_calls
from training.watchdog.hang_report import BLOCKED, DESYNC, HANG, STOPPED, HangFinding
from training.watchdog.probes.flight_recorder import Call
from training.watchdog.probes.snapshot import ProcessActivity, RankSnapshot
from training.watchdog.probes.stacks import Frame, Stack, own
from training.watchdog.probes.waits import compiles, waits_for_worker

if TYPE_CHECKING:
    from training.core.contracts.kinds import HangKind

SPINNING = 0.8  # CPU share above which a main thread without progress spins
READING_BYTES = 1 << 16  # moved between two looks: slow storage, not a hang


def behind(everything: list[RankSnapshot]) -> list[RankSnapshot]:
    """The ranks that no other rank is behind: one, several, or all of them."""
    lowest = min(phases.place(e.beat) for e in everything)
    return [e for e in everything if phases.place(e.beat) == lowest]


def still_reading(e: RankSnapshot) -> bool:
    """Does it still read, though slowly?"""
    return (
        phases.reads(e.beat.phase)
        and sum(s.io_bytes for s in (e.process, *e.workers)) > READING_BYTES
    )


def still_compiling(e: RankSnapshot) -> bool:
    """Does it compile? On a GPU, a thread of autograd compiles the backward pass."""
    return any(compiles(thread.frames) for thread in e.process.threads)


def find_culprit(everything: list[RankSnapshot]) -> HangFinding:
    """`everything`: snapshots of the ranks that have not finished; at least one of them is
    overdue."""
    for e in everything:
        if e.process.always("T"):
            return _finding(STOPPED, e, everything, msg("watchdog.stopped"))
        if e.process.always("t"):
            return _finding(STOPPED, e, everything, msg("watchdog.debugger"))
    calls = {e.rank: e.calls for e in everything if e.calls is not None and not e.unrecorded}
    different = compared_calls.mismatch(calls)
    if different:
        odd = next((e for e in everything if e.rank == different.rank), None)
        return _finding(DESYNC, odd, everything, str(different))
    stuck = compared_calls.not_started(calls) if len(calls) == len(everything) else None
    if stuck:
        rank, call = stuck
        slow = next(e for e in everything if e.rank == rank)
        how = msg("watchdog.gpu_stuck", call=call, number=call.number)
        # The line at which its host waits for it is not the cause.
        return replace(_finding(HANG, slow, everything, how), where=None)
    last = behind(everything)
    guilty = _alone([e for e in last if _busy_elsewhere(e)]) or _fewest_calls(everything, calls)
    if guilty is None:
        places = {e.rank: _position(e) for e in everything}
        together = len({e.collective or str(e.beat) for e in last}) == 1
        if all(e.collective or phases.waits(e.beat.phase) for e in last):
            how = (
                msg("watchdog.all_wait.same_place")
                if together
                else msg("watchdog.all_wait.different")
            )
        elif together:
            how = msg("watchdog.all_stuck.same_place")
        else:
            how = msg("watchdog.all_stuck.different")
        if len(everything) > 1 and (off := [e.rank for e in everything if e.unrecorded]):
            how = compared_calls.noted(how, off)
        return HangFinding(
            HANG, None, None, how, places, _stacks(everything), min(e.beat.age_s for e in last)
        )
    if guilty.process.always("D"):
        return _finding(
            BLOCKED,
            guilty,
            everything,
            msg(
                "watchdog.blocked", call=guilty.process.waits_in or msg("watchdog.uninterruptible")
            ),
        )
    return _finding(HANG, guilty, everything, _how(guilty))


def _busy_elsewhere(e: RankSnapshot) -> bool:
    """Is it where no rank waits for others? Without a stack, only a process that is certainly
    blocked counts."""
    return (
        e.collective is None
        if e.process.threads
        else e.process.always("D") or not phases.waits(e.beat.phase)
    )


def _alone(found: list[RankSnapshot]) -> RankSnapshot | None:
    return found[0] if len(found) == 1 else None


def _fewest_calls(
    everything: list[RankSnapshot], calls: dict[int, list[Call]]
) -> RankSnapshot | None:
    """The one rank that has not called the collective in which all others wait."""
    if len(calls) < len(everything) or len(everything) < 2:
        return None
    counts = compared_calls.counts(calls)
    fewest = [e for e in everything if counts[e.rank] == min(counts.values())]
    return _alone(fewest)


def _finding(
    kind: HangKind, guilty: RankSnapshot | None, everything: list[RankSnapshot], how: str
) -> HangFinding:
    others = {e.rank: _position(e) for e in everything if e is not guilty}
    if guilty is None:
        return HangFinding(
            kind,
            None,
            None,
            how,
            others,
            _stacks(everything),
            min(e.beat.age_s for e in everything),
        )
    where, worker = _where(guilty), _guilty_worker(guilty)
    stacks = _stacks(everything) | ({guilty.rank: worker.stacks[-1]} if worker else {})
    return HangFinding(
        kind,
        guilty.rank,
        f"{where.file}:{where.line}" if where else None,
        how,
        others,
        stacks,
        guilty.beat.age_s,
    )


def _how(e: RankSnapshot) -> str:
    if worker := _guilty_worker(e):
        state = (
            msg("watchdog.worker.stopped")
            if worker.always("T")
            else msg("watchdog.stuck_at", frame=worker.own_frame)
            if worker.own_frame
            else msg("watchdog.worker.idle")
        )
        return msg("watchdog.worker.waited_for", pid=worker.pid, state=state)
    busy = e.process.busy > SPINNING or e.process.always("R")  # or ready to spin, without a core
    if e.process.holds_gil and not busy:
        return msg("watchdog.holds_gil", frame=_where(e))
    if busy:
        if e.process.holds_gil:
            return msg("watchdog.spins_with_gil", frame=_where(e))
        return msg("watchdog.spins", frame=_where(e))
    return (
        msg("watchdog.left_behind", collective=e.collective)
        if e.collective
        else msg("watchdog.stuck_at", frame=_where(e))
    )


def _guilty_worker(e: RankSnapshot) -> ProcessActivity | None:
    main = e.process.main
    if not e.workers or not (main and waits_for_worker(main)):
        return None
    # An idle worker waits for indices in torch's code; a stuck one is in the dataset's.
    stuck = [
        w
        for w in e.workers
        if w.always("T", "D") or (w.own_frame and "torch/utils/data" not in w.own_frame.file)
    ]
    return stuck[0] if stuck else e.workers[0]


def _where(e: RankSnapshot) -> Frame | None:
    worker = _guilty_worker(e)
    if worker and worker.own_frame:
        return worker.own_frame
    return e.in_hook or (own(e.process.main.frames) if e.process.main else None)


def _position(e: RankSnapshot) -> str:
    frame = own(e.process.main.frames) if e.process.main else None
    return (
        f"{e.beat}"
        + (msg("watchdog.position.waits_in", collective=e.collective) if e.collective else "")
        + (msg("watchdog.at", frame=frame) if frame else "")
    )


def _stacks(everything: list[RankSnapshot]) -> dict[int, Stack | str]:
    return {e.rank: e.process.stacks[-1] for e in everything if e.process.stacks}

"""Is it a hang, and which rank is guilty? From stacks and /proc alone, for user scripts. Only what
is certain is a finding; any other result names the evidence against a hang."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from training.core import exit_status
from training.core.messages import msg
from training.diagnose.hang_advice import LEAVES
from training.diagnose.rooted import ROOTED
from training.watchdog import hang_report, loader_workers, pool_workers
from training.watchdog.gpu_waits import BACKWARD, GPU, QUEUE
from training.watchdog.hang_report import BLOCKED, HANG, STOPPED, UNEVEN, HangFinding, NoFinding
from training.watchdog.probes import procfs
from training.watchdog.probes.sampling import Sample
from training.watchdog.probes.stacks import Frame, Stack, own
from training.watchdog.probes.trace import IDLE_SHARE, RankTrace, courses
from training.watchdog.probes.waits import (
    in_collective,
    saves,
    waits_for_device,
    waits_for_worker,
)

if TYPE_CHECKING:
    from training.core.contracts.kinds import HangKind

STORE = ("store.get", "wait")  # a wait for torch's store, or for a collective
RENDEZVOUS = "init_process_group"  # ends when all ranks of the training are there
BURST = 20  # consecutive dumps of a rank that may spin: all must be the same
BURST_GIL, BURST_LIMIT_S = 0.9, 10.0

Burst = Callable[[int], list[Stack | str]]


def detect_stall(
    samples: Sequence[Sample],
    ended: Mapping[int, int | None],
    *,
    burst: Burst | None = None,
    elsewhere: bool = False,
    joining: bool = False,
    alone: bool = False,
) -> HangFinding | NoFinding:
    """`samples`: of at least two moments. `ended`: rank → status of those that have exited, None:
    unknown. `elsewhere`: the ranks may be waiting for other machines. `joining`: a process of this
    machine may be a rank that has not joined the others yet. `burst`: takes many consecutive stacks
    of a PID; without it an endless loop is never distinguished from a long computation. `alone`:
    the samples span so much time that an idle data loader counts as a hang even where no rank waits
    for another, and neither writing a file nor a wait that may end counts as work any longer."""
    seen = courses(samples)
    if not seen or (samples and seen.keys() != samples[-1].looks.keys()):
        return NoFinding(hang_report.SHORT, msg("watchdog.stall.too_few_samples"))
    stopped = [c for c in seen.values() if c.always("Tt")]
    if stopped and len(stopped) < len(seen):
        c = stopped[0]
        text = (
            msg("watchdog.debugger") if c.always("t") else msg("watchdog.stopped_resume", pid=c.pid)
        )
        return _finding(STOPPED, c, text, seen)
    if stopped:
        pids = " ".join(str(c.pid) for c in stopped)
        return NoFinding(hang_report.PAUSED, msg("watchdog.stall.all_stopped", pids=pids))
    blind = [
        f"rank {c.rank}: {c.last.stack}"
        for c in seen.values()
        if all(isinstance(look.stack, str) for look in c.looks)
    ]
    if blind:
        return NoFinding(hang_report.BLIND, msg("watchdog.stall.no_stack", blind="; ".join(blind)))
    waiting = {c.rank: name for c in seen.values() if (name := waits(c))}
    others = [c for c in seen.values() if c.rank not in waiting]
    going_round = [c.rank for c in others if _advances(c)]
    if going_round:
        shown = _shown(seen, going_round[0])
        return NoFinding(
            hang_report.ADVANCES, msg("watchdog.stall.collectives_advance", shown=shown)
        )
    if not waiting:
        return _none_waits(seen, alone)
    if not others:
        return _all_wait(
            seen, waiting, ended, elsewhere or (joining and RENDEZVOUS in waiting.values())
        )
    guilty, unsure = [], None  # one that works decides, whatever the others do
    for c in others:
        if c.last.locked_out and c.idle and c.same_functions:
            text = msg("watchdog.stall.locked_out", rank=c.rank, lock=c.last.locked_out)
            unsure = NoFinding(hang_report.LOCKED, text)
            continue
        how = _stuck(c, burst, alone)
        if how is None:
            shown = _shown(seen, c.rank)
            if spins(c):
                text = msg("watchdog.stall.loops", shown=shown)
                unsure = unsure or NoFinding(hang_report.LOOPS, text)
                continue
            asleep = c.idle and c.same_place and not (c.exchanges or c.always("D"))
            if asleep and _may_end(c):
                text = msg("watchdog.stall.may_end", shown=shown)
                unsure = unsure or NoFinding(hang_report.MAY_END, text)
                continue
            return NoFinding(hang_report.WORKS, msg("watchdog.stall.one_works", shown=shown))
        guilty.append((c, how))
    if unsure:
        return unsure
    guilty = _not_for_a_lock(guilty)
    if len(guilty) > 1:  # one of them may wait for another, in a way that is unknown here
        shown = ", ".join(f"rank {o.rank} {text}" for o, text in guilty)
        how = msg("watchdog.stall.several_stuck", shown=shown)
        stuck = {o.rank for o, _ in guilty}
        places = {rank: place for rank, place in _places(seen).items() if rank not in stuck}
        may_end = any(spins(o) or _may_end(o) for o, _ in guilty)
        return HangFinding(
            HANG, None, None, how, places, _stacks(seen), _since(seen), may_end=may_end
        )
    c, how = guilty[0]
    return _finding(BLOCKED if c.always("D") else HANG, c, how, seen)


def _not_for_a_lock(guilty: list[tuple[RankTrace, str]]) -> list[tuple[RankTrace, str]]:
    """Without those that wait for the lock of a file that another one of them holds."""
    if len(guilty) < 2:
        return guilty
    holders, pids = procfs.lock_holders(), {c.pid for c, _ in guilty}
    return [(c, how) for c, how in guilty if holders.get(c.pid) not in pids - {c.pid}] or guilty


def waits(c: RankTrace) -> str | None:
    """The collective (or GPU) in which this rank has waited all the time, in the same place; None
    without one."""
    main = c.last.main
    if main is None or not c.same_place:
        return None
    name = in_collective(main)
    if (
        name is None
        and c.last.gpu
        and not any(look.main and look.main.holds_gil for look in c.looks)
    ):
        name = GPU if waits_for_device(main.frames[0]) else QUEUE if _launches(c) else None
    # A rank in the rendezvous or in a barrier of the store polls repeatedly; every other wait is a
    # single one.
    polls = name == RENDEZVOUS or main.frames[0].name == "_store_based_barrier"
    if name is None or (not polls and _advances(c)) or (c.woken and name in (GPU, QUEUE)):
        return None
    if name in (GPU, QUEUE, BACKWARD):
        # On a CPU 'backward' may be the computation itself.
        busy = c.moves_data or c.children_work
        return None if busy or not (c.last.gpu or c.idle) else name
    return name if c.exchanges_nothing else None


def _launches(c: RankTrace) -> bool:
    """Could it be in the launch of a kernel, anywhere in the script? While the queue of the GPU is
    full (about 1,000 kernels), it polls for a place in C without the GIL. Other computation in C
    looks the same: a pending collective decides (ScriptWatch)."""
    return computes(c) and c.always("R")


def _advances(c: RankTrace) -> bool:
    """Do the collectives complete in which it is seen, or those for which it waits for its GPU?"""
    name = in_collective(c.last.main) if c.last.main else None
    return c.calls_further if name is None else c.calls_collectives(name in STORE)


def _all_wait(
    seen: dict[int, RankTrace],
    waiting: dict[int, str],
    ended: Mapping[int, int | None],
    elsewhere: bool,
) -> HangFinding | NoFinding:
    since = _since(seen)
    if ended:
        rank, how = _awaited(ended)
        return HangFinding(UNEVEN, rank, None, how, _places(seen), _stacks(seen), since)
    if elsewhere:  # a rank there may be evaluating; hang detection there names it if it is stuck
        text = msg("watchdog.stall.elsewhere", waiters=_waiters(waiting))
        return NoFinding(hang_report.ELSEWHERE, text)
    places = _places(seen)
    if len(seen) == 1:
        return NoFinding(
            hang_report.SINGLE, msg("watchdog.stall.single", place=places[min(places)])
        )
    left = [rank for rank, name in sorted(waiting.items()) if name == LEAVES]
    if len(left) == 1:
        return _finding(UNEVEN, seen[left[0]], msg("watchdog.all_wait.left", name=LEAVES), seen)
    if len(set(places.values())) > 1:
        how = (
            msg("watchdog.all_wait.several_left", ranks=", ".join(map(str, left)), name=LEAVES)
            if 0 < len(left) < len(seen)
            else msg("watchdog.all_wait.uneven")
        )
        return HangFinding(UNEVEN, None, None, how, places, _stacks(seen), since)
    names = set(waiting.values())
    how = (
        msg("watchdog.all_wait.same_root", name=name)
        if len(names) == 1 and (name := names.pop()) in ROOTED
        else msg("watchdog.all_wait.same_place")
    )
    return HangFinding(HANG, None, None, how, places, _stacks(seen), since)


def _awaited(ended: Mapping[int, int | None]) -> tuple[int, str]:
    """One of the ranks that have ended, however: they join no collective any more. Of several, one
    that has not finished."""
    ranks = sorted(ended)
    rank = next((rank for rank in ranks if ended[rank]), ranks[0])
    status = ended[rank]
    if status is None:
        how = msg("watchdog.stall.ended")
    else:
        how = exit_status.how(status) if status else msg("watchdog.stall.finished")
    if len(ranks) == 1:
        return rank, msg("watchdog.stall.awaited", how=how)
    return rank, msg("watchdog.stall.several_awaited", how=how, ranks=", ".join(map(str, ranks)))


def _none_waits(seen: dict[int, RankTrace], alone: bool) -> HangFinding | NoFinding:
    """Where no rank waits for another, only a data loader with idle workers counts as a hang: a
    script may sleep, serve or poll indefinitely."""
    shown = _shown(seen, min(seen))
    if not all(c.idle and c.same_functions for c in seen.values()):
        return NoFinding(hang_report.WORKS, shown)
    if locked := next((c for c in seen.values() if c.last.locked_out), None):
        lock = locked.last.locked_out
        text = msg("watchdog.stall.locked_out_alone", rank=locked.rank, lock=lock)
        return NoFinding(hang_report.LOCKED, text)
    if not (alone and all(c.last.main and waits_for_worker(c.last.main) for c in seen.values())):
        return NoFinding(hang_report.QUIET, msg("watchdog.stall.quiet", shown=shown))
    first = seen[min(seen)]
    return _finding(HANG, first, loader_workers.at_worker(first)[0], seen)


def _stuck(c: RankTrace, burst: Burst | None, alone: bool) -> str | None:
    """The state of a stuck rank that waits for no other; None: it works, or may work."""
    main = c.last.main
    if main is None:
        return None
    frame = own(main.frames)
    # one call may also wake to poll a device that does not answer: NVIDIA's driver
    advances = c.advances_in_io and not (alone and c.same_place and not c.faults_in_io)
    if c.writes_back or advances or (saves(main.frames) and not alone):
        return None
    if c.always("D") and not c.moves_data:
        if c.woken and not (alone and c.same_place):
            return None
        return msg(
            "watchdog.blocked_at",
            call=c.last.process.waits_in or msg("watchdog.uninterruptible"),
            frame=frame,
        )
    if not alone and _may_end(c):
        return None
    if c.idle and c.same_functions and waits_for_worker(main):
        return loader_workers.at_worker(c)[0]
    if c.idle and c.same_place:
        if all(look.main and look.main.holds_gil for look in c.looks):
            return msg("watchdog.holds_gil", frame=frame)
        if name := in_collective(main):
            return msg("watchdog.stuck_in_collective", frame=frame, name=name)
        return msg("watchdog.stuck_at", frame=frame)
    if burst and spins(c) and _still_spins(c, burst(c.pid)):
        return msg("watchdog.spins_with_gil", frame=frame)
    return None


def _may_end(c: RankTrace) -> bool:
    """Could its wait end, for a timeout or a process that is not a rank? torch polls a data loader:
    there it depends on the worker."""
    if c.last.main and waits_for_worker(c.last.main):
        return c.exchanges or loader_workers.may_end(c)
    return c.may_end or pool_workers.may_end(c)


def spins(c: RankTrace) -> bool:
    """Could this be an endless loop? Python code in the same functions that never yields its core
    and touches no new memory."""
    alone = not c.children_work and not c.moves_data
    return (
        computes(c)
        and alone
        and c.always("R")
        and c.same_functions
        and all(look.main and look.main.holds_gil for look in c.looks)
    )


def computes(c: RankTrace) -> bool:
    """Does its main thread use a core? Its share depends on the load."""
    used = c.last.process.main_cpu_s - c.looks[0].process.main_cpu_s
    return used > IDLE_SHARE * c.seconds


def _still_spins(c: RankTrace, taken: list[Stack | str]) -> bool:
    here = [(f.file, f.function) for f in c.frames]
    mains = [stack.main for stack in taken if isinstance(stack, Stack) and stack.main]
    same = [main for main in mains if [(f.file, f.function) for f in main.frames] == here]
    return (
        len(mains) >= BURST // 2
        and len(same) == len(mains)
        and sum(main.holds_gil for main in mains) >= BURST_GIL * len(mains)
    )


def _finding(
    kind: HangKind, guilty: RankTrace, how: str, seen: dict[int, RankTrace]
) -> HangFinding:
    main = guilty.last.main
    frame = own(main.frames) if main else None
    if main and waits_for_worker(main):
        frame = loader_workers.at_worker(guilty)[1] or frame
    places = {rank: place for rank, place in _places(seen).items() if rank != guilty.rank}
    loops = spins(guilty)
    return HangFinding(
        kind,
        guilty.rank,
        f"{frame.file}:{frame.line}" if frame else None,
        how,
        places,
        _stacks(seen),
        _since(seen),
        may_end=kind == HANG and not loops and _may_end(guilty),
        loops=loops,
    )


def _places(seen: dict[int, RankTrace]) -> dict[int, str]:
    return {rank: doing(c) for rank, c in seen.items()}


def _shown(seen: dict[int, RankTrace], first: int) -> str:
    """What each rank does, beginning with this one."""
    order = sorted(seen, key=lambda rank: (rank != first, rank))
    return "; ".join(f"rank {rank} {doing(seen[rank])}" for rank in order)


def doing(c: RankTrace) -> str:
    """What the rank does, and where."""
    main = c.last.main
    frame = own(main.frames) if main else None
    if c.always("Tt"):
        return msg("watchdog.is_stopped", at=_at(frame))
    if name := waits(c):
        return msg("watchdog.waits_in", name=name, at=_at(frame))
    busy = msg("watchdog.stall.busy", percent=100 * c.own_cpu)
    if c.children_work:
        busy += msg("watchdog.stall.children_busy", percent=100 * c.childrens_cpu)
    if c.moves_data:
        busy += msg("watchdog.stall.rate", rate=c.bytes_moved / 1e3)
    return (
        msg("watchdog.stall.is_at", frame=frame, busy=busy)
        if frame
        else msg("watchdog.stall.unknown_place", busy=busy)
    )


def place(stack: Stack) -> str:
    """Where a rank is, by one stack alone."""
    frame = own(stack.main.frames) if stack.main else None
    name = in_collective(stack.main) if stack.main else None
    if name:
        return msg("watchdog.waits_in", name=name, at=_at(frame))
    return msg("watchdog.stall.only_at", frame=frame or "?")


def _at(frame: Frame | None) -> str:
    return msg("watchdog.at", frame=frame) if frame else ""


def _waiters(waiting: dict[int, str]) -> str:
    return ", ".join(
        msg("watchdog.stall.waiter", rank=rank, name=name) for rank, name in sorted(waiting.items())
    )


def _stacks(seen: dict[int, RankTrace]) -> dict[int, Stack | str]:
    return {rank: c.last.stack for rank, c in seen.items()}


def _since(seen: dict[int, RankTrace]) -> float:
    return next(iter(seen.values())).seconds

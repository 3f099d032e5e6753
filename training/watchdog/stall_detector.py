"""Is it a standstill, and whose fault? By stacks and /proc alone, for ranks that know nothing of
us. Only what is certain is a finding; in any other case the answer says what speaks against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from training.watchdog import hang_report
from training.watchdog.hang_report import BLOCKED, HANG, STOPPED, UNEVEN, HangFinding, NoFinding
from training.watchdog.probes import procfs, stacks
from training.watchdog.probes.sampling import IDLE_SHARE, RankTrace, Sample, courses
from training.watchdog.probes.stacks import (
    Frame,
    Stack,
    in_collective,
    own,
    saves,
    waits_for_device,
    waits_for_worker,
)

if TYPE_CHECKING:
    from training.core.contracts.kinds import HangKind

GPU = "the GPU"  # waited for, perhaps because it waits for others
BURST = 20  # dumps in a row of a rank that may spin: all of them must be the same
BURST_GIL, BURST_LIMIT_S = 0.9, 10.0

Burst = Callable[[int], list[Stack | str]]


def detect_stall(
    samples: Sequence[Sample],
    ended: Mapping[int, int],
    *,
    burst: Burst | None = None,
    elsewhere: bool = False,
    alone: bool = False,
) -> HangFinding | NoFinding:
    """`samples`: of at least two moments. `ended`: rank → status of those that are gone.
    `elsewhere`: ranks of other machines may be waited for. `burst`: takes many stacks of a pid in a
    row; without it an endless loop is never told from a long computation. `alone`: they reach back
    so far that a data loader which gets nothing is a standstill also where no rank waits for
    another, and a file that is being written is no excuse any more."""
    seen = courses(samples)
    if not seen or (samples and seen.keys() != samples[-1].looks.keys()):
        return NoFinding(hang_report.SHORT, "the ranks were not there in every sample")
    stopped = [c for c in seen.values() if c.always("Tt")]
    if stopped and len(stopped) < len(seen):
        c = stopped[0]
        by = (
            "held by a debugger"
            if c.always("t")
            else f"stopped (SIGSTOP); go on: kill -CONT {c.pid}"
        )
        return _finding(STOPPED, c, f"is {by}", seen)
    if stopped:
        pids = " ".join(str(c.pid) for c in stopped)
        return NoFinding(
            hang_report.PAUSED, f"stopped (SIGSTOP): all ranks; go on: kill -CONT {pids}"
        )
    blind = [
        f"rank {c.rank}: {c.last.stack}"
        for c in seen.values()
        if all(isinstance(look.stack, str) for look in c.looks)
    ]
    if blind:
        return NoFinding(hang_report.BLIND, f"no stack of {'; '.join(blind)}")
    waiting = {c.rank: name for c in seen.values() if (name := waits(c))}
    others = [c for c in seen.values() if c.rank not in waiting]
    going_round = [c.rank for c in others if c.woken and c.last.main and in_collective(c.last.main)]
    if going_round:
        shown = "; ".join(f"rank {rank} {_doing(seen[rank])}" for rank in going_round)
        return NoFinding(hang_report.ADVANCES, f"collectives go on: {shown}")
    if not waiting:
        return _nobody_waits(seen, alone)
    if not others:
        return _all_wait(seen, waiting, ended, elsewhere)
    guilty = []
    for c in others:
        how = _stands_still(c, burst, alone)
        if how is None:
            shown = f"rank {c.rank} {_doing(c)}; {_waiters(waiting)}"
            if spins(c):
                text = (
                    f"in the same Python functions all the time, an endless loop or long work: "
                    f"{shown}"
                )
                return NoFinding(hang_report.LOOPS, text)
            return NoFinding(hang_report.WORKS, f"one of them works: {shown}")
        guilty.append((c, how))
    c, how = guilty[0]
    if len(guilty) > 1:
        how += "; so do " + ", ".join(f"rank {o.rank} {text}" for o, text in guilty[1:])
    return _finding(BLOCKED if c.always("D") else HANG, c, how, seen)


def waits(c: RankTrace) -> str | None:
    """What this rank waits in for other ranks or for its GPU, all the time and in the same place;
    None: it does not."""
    main = c.last.main
    if main is None or not c.same_place or c.children_work:
        return None
    name = in_collective(main)
    if (
        name is None
        and c.last.gpu
        and not any(look.main and look.main.holds_gil for look in c.looks)
        and waits_for_device(main.frames[0])
    ):
        name = GPU
    # Who looks for the others' meeting point tries again and again; every other wait is a single
    # one.
    if name is None or c.moves_data or (c.woken and name != "init_process_group"):
        return None
    # On a CPU a collective that waits uses none; 'backward' may be the computation itself. A GPU is
    # often waited for in a busy loop.
    return name if c.last.gpu or c.idle else None


def on_gpu(found: HangFinding) -> list[int]:
    """The ranks that wait for their GPU: it may compute."""
    return [
        rank for rank, place in sorted(found.waiting.items()) if place.startswith(f"waits in {GPU}")
    ]


def _all_wait(
    seen: dict[int, RankTrace], waiting: dict[int, str], ended: Mapping[int, int], elsewhere: bool
) -> HangFinding | NoFinding:
    done = sorted(rank for rank, status in ended.items() if status == 0)
    since = _since(seen)
    if done:
        who = f"rank {', '.join(map(str, done))}"
        how = f"has finished (status 0), the others wait for {'it' if len(done) == 1 else 'them'}"
        how = how if len(done) == 1 else f"{how}: {who}"
        return HangFinding(UNEVEN, done[0], None, how, _places(seen), _stacks(seen), since)
    if elsewhere:  # somebody there may evaluate; if he is stuck, his own machine's watch names him
        text = f"all ranks here wait, for a rank of another machine perhaps: {_waiters(waiting)}"
        return NoFinding(hang_report.ELSEWHERE, text)
    places = _places(seen)
    if len(seen) == 1:
        return NoFinding(hang_report.SINGLE, f"the only rank here {places[min(places)]}")
    if len(set(places.values())) > 1:
        how = (
            "all ranks wait for each other, in different places: uneven batches, or a branch "
            "that not all of them take"
        )
        return HangFinding(UNEVEN, None, None, how, places, _stacks(seen), since)
    how = "all ranks wait for each other, in the same place: the network between them, or a device"
    return HangFinding(HANG, None, None, how, places, _stacks(seen), since)


def _nobody_waits(seen: dict[int, RankTrace], alone: bool) -> HangFinding | NoFinding:
    """Without a rank that waits for another one, only a data loader that gets nothing from idle
    workers is certain: a script may sleep, serve or poll as long as it likes."""
    shown = "; ".join(f"rank {c.rank} {_doing(c)}" for c in seen.values())
    if not all(c.idle and c.same_functions for c in seen.values()):
        return NoFinding(hang_report.WORKS, shown)
    if not (alone and all(c.last.main and waits_for_worker(c.last.main) for c in seen.values())):
        return NoFinding(
            hang_report.QUIET, f"nobody waits for another rank, nobody does anything: {shown}"
        )
    first = seen[min(seen)]
    return _finding(HANG, first, _at_worker(first)[0], seen)


def _stands_still(c: RankTrace, burst: Burst | None, alone: bool) -> str | None:
    """What a rank that waits for no other one does; None: it works, or may work."""
    main = c.last.main
    if main is None:
        return None
    frame = own(main.frames)
    if c.writes_back or (saves(main.frames) and not alone):
        return None
    if c.always("D") and not c.moves_data:
        return f"is blocked in I/O ({c.last.process.waits_in or 'uninterruptible'}) at {frame}"
    if c.idle and c.same_functions and waits_for_worker(main):
        return _at_worker(c)[0]
    if c.idle and c.same_place:
        if all(look.main and look.main.holds_gil for look in c.looks):
            return f"holds the GIL in C, called at {frame}"
        return f"stands at {frame}" + (
            f", waiting in {name} since others have left it"
            if (name := in_collective(main))
            else ""
        )
    if burst and spins(c) and _still_spins(c, burst(c.pid)):
        return f"spins at {frame}, and holds the GIL"
    return None


def spins(c: RankTrace) -> bool:
    """May this be an endless loop? Python code of the same functions that never lets go of its core
    and touches nothing new."""
    # Always ready to run; what it gets of a core depends on how many others want it.
    computing = c.last.process.main_cpu_s - c.looks[0].process.main_cpu_s > IDLE_SHARE * c.seconds
    alone = not c.children_work and not c.moves_data
    return (
        computing
        and alone
        and c.always("R")
        and c.same_functions
        and all(look.main and look.main.holds_gil for look in c.looks)
    )


def _still_spins(c: RankTrace, taken: list[Stack | str]) -> bool:
    here = [(f.file, f.function) for f in c.frames]
    mains = [stack.main for stack in taken if isinstance(stack, Stack) and stack.main]
    same = [main for main in mains if [(f.file, f.function) for f in main.frames] == here]
    return (
        len(mains) >= BURST // 2
        and len(same) == len(mains)
        and sum(main.holds_gil for main in mains) >= BURST_GIL * len(mains)
    )


def _at_worker(c: RankTrace) -> tuple[str, Frame | None]:
    """The worker that does not answer: one that is stopped or blocked, or one that stands in the
    dataset's own code. Idle ones wait for work in torch's."""
    pids = [pid for pid in procfs.workers(c.pid) if pid in c.last.children]
    found = stacks.dump(pids)
    for pid in pids:
        state, stack = c.last.children[pid].state, found[pid]
        frame = own(stack.main.frames) if isinstance(stack, Stack) and stack.main else None
        busy_there = frame is not None and "/torch/utils/data/" not in frame.file
        if state in "TtD" or busy_there:
            what = {
                "T": "is stopped (SIGSTOP)",
                "t": "is held by a debugger",
                "D": "is blocked in I/O",
            }.get(state, "stands")
            return (
                f"waits for its data-loader worker (pid {pid}), which "
                f"{what}{f' at {frame}' if frame else ''}",
                frame,
            )
    return (
        f"waits for its data-loader workers (pid {', '.join(map(str, pids)) or 'none is left'}), "
        f"which do nothing",
        None,
    )


def _finding(
    kind: HangKind, guilty: RankTrace, how: str, seen: dict[int, RankTrace]
) -> HangFinding:
    main = guilty.last.main
    frame = own(main.frames) if main else None
    if main and waits_for_worker(main):
        frame = _at_worker(guilty)[1] or frame
    places = {rank: place for rank, place in _places(seen).items() if rank != guilty.rank}
    return HangFinding(
        kind,
        guilty.rank,
        f"{frame.file}:{frame.line}" if frame else None,
        how,
        places,
        _stacks(seen),
        _since(seen),
    )


def _places(seen: dict[int, RankTrace]) -> dict[int, str]:
    return {rank: _doing(c) for rank, c in seen.items()}


def _doing(c: RankTrace) -> str:
    main = c.last.main
    frame = own(main.frames) if main else None
    at = f" at {frame}" if frame else ""
    if c.always("Tt"):
        return f"is stopped{at}"
    if name := waits(c):
        return f"waits in {name}{at}"
    busy = f"{100 * c.own_cpu:.0f} % of a core"
    if c.children_work:
        busy += f", its children {100 * c.childrens_cpu:.0f} %"
    if c.moves_data:
        busy += f", {c.bytes_moved / 1e3:.0f} kB/s"
    return f"is{at}, {busy}" if at else f"is not seen, {busy}"


def _waiters(waiting: dict[int, str]) -> str:
    return ", ".join(f"rank {rank} waits in {name}" for rank, name in sorted(waiting.items()))


def _stacks(seen: dict[int, RankTrace]) -> dict[int, Stack | str]:
    return {rank: c.last.stack for rank, c in seen.items()}


def _since(seen: dict[int, RankTrace]) -> float:
    return next(iter(seen.values())).seconds

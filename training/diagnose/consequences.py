"""Events that are only consequences of another: not candidates for the root cause."""

from __future__ import annotations

from training.core import cause_ids
from training.diagnose.events import OWN, UNLISTED, Event, names_exception
from training.diagnose.health import CUT
from training.diagnose.signatures import PEER_MEMORY, ROOT, VICTIM, WEAK

# a program that handles one of these still ends
FATAL = {
    cause_ids.CUDA_DEVICE_ASSERT,
    cause_ids.DATALOADER_WORKER_DIED,
    cause_ids.DISK_FULL,
    cause_ids.GPU_HARDWARE,
    cause_ids.GPU_OOM,
    cause_ids.HOST_OOM_KILLED,
    cause_ids.NAN_LOSS,
    cause_ids.NCCL_INIT,
    cause_ids.NCCL_NETWORK,
    cause_ids.SHM_TOO_SMALL,
    *cause_ids.STOPPED.values(),
}
# where a rank died of a signal
DEATHS = {
    cause_ids.HOST_OOM_KILLED,
    cause_ids.KILLED,
    cause_ids.SEGFAULT,
    cause_ids.SHM_TOO_SMALL,
}
# srun's reports that a task has ended, or that it now ends the others, which may be killed
STEP_ENDS = ("slurm.task.exited", "slurm.noise.step")
SOON = 120  # lines: errors of a rank this close after the root cause follow from it


def without_consequences(events: list[Event]) -> list[Event]:
    for without in (
        _without_lost_memory,
        _without_handled,
        _without_followers,
        _without_ends,
        _without_severed,
    ):
        events = without(events)
    return events


def _without_lost_memory(events: list[Event]) -> list[Event]:
    """Without errors of access to another rank's memory, if there is a reason for its end."""
    others = [e for e in events if not e.signature or e.signature.id != PEER_MEMORY]
    ended = any(e.role in (OWN, ROOT, UNLISTED, WEAK) for e in others)
    return others if ended else events


def _without_handled(events: list[Event]) -> list[Event]:
    """Without exceptions that the program handled: another one, in the handler, ended it. After a
    fatal one, only the clean-up fails there."""
    handled: dict[int, Event] = {}  # traceback → the exception in its handler
    for event in events:
        one = event.thrown
        if one is None or not one.handling or one.end is None or event.line != one.end:
            continue
        if event.role == UNLISTED or (
            event.role == ROOT and event.cause not in cause_ids.STOPPED.values()
        ):
            while one.before is not None:
                one = one.before
                handled[id(one)] = event

    def over(event: Event) -> bool:
        later = handled.get(id(event.thrown))
        if later is None or event.cause in FATAL:
            return False
        return event.role == UNLISTED if later.role == UNLISTED else event.cause != later.cause

    return [e for e in events if not over(e)]


def _without_followers(events: list[Event]) -> list[Event]:
    """Without exceptions of user code that follow from a known cause: in the same chain, or soon
    after it in the same rank."""
    known = [e for e in events if e.role in (ROOT, OWN)]
    listed = [e for e in events if e.hit and names_exception(e.hit)]
    kept = []
    for event in events:
        if event.role in (UNLISTED, CUT):
            chain = event.thrown.first() if event.thrown else None
            # only a wrapper, unless the listed one is a consequence of it
            if any(
                e.thrown
                and e.thrown.first() is chain
                and (e.role in (ROOT, WEAK) or e.line.offset < event.line.offset)
                for e in listed
            ):
                continue
            if any(_follows(event, e) for e in known):
                continue
        kept.append(event)
    return kept


def _without_ends(events: list[Event]) -> list[Event]:
    """Without a stop from outside (Ctrl-C, a time limit) that came after a failure in the same
    log."""
    broke = [
        e
        for e in events
        if e.role in (OWN, ROOT, UNLISTED, WEAK, VICTIM)
        and e.cause not in cause_ids.STOPPED.values()
    ]
    return [
        e
        for e in events
        if e.cause not in cause_ids.STOPPED.values()
        or not any(b.analysis is e.analysis and b.line.offset < e.line.offset for b in broke)
    ]


def _without_severed(events: list[Event]) -> list[Event]:
    """Without lost connections of the program's own that may have been lost with a rank that died,
    unless srun killed that rank after the end of another one."""
    deaths = [e for e in events if e.cause in DEATHS]
    ends = [e for e in events if e.signature and e.signature.id in STEP_ENDS]

    def lost_with(event: Event, death: Event) -> bool:
        if event.rank is not None and event.rank == death.rank:
            return False
        since = event.line.offset if event.analysis is death.analysis else -1
        return not any(
            e.analysis is death.analysis and since < e.line.offset < death.line.offset for e in ends
        )

    return [e for e in events if not (e.severed and any(lost_with(e, d) for d in deaths))]


def _follows(event: Event, root: Event) -> bool:
    if event.analysis is not root.analysis or (
        event.rank is not None and root.rank is not None and event.rank != root.rank
    ):
        return False
    return 0 <= event.line.number - root.line.number <= SOON

"""The data-loader worker for which a rank of a user script waits."""

from __future__ import annotations

from training.core.messages import msg
from training.watchdog.probes import awaited, procfs, stacks
from training.watchdog.probes.stacks import Frame, Stack, own
from training.watchdog.probes.trace import RankTrace


def at_worker(c: RankTrace) -> tuple[str, Frame | None]:
    """What the unresponsive worker does, and where."""
    pid, stack = _unresponsive(c)
    frame = _own_frame(stack)
    if pid is not None:
        doing = {
            "T": msg("watchdog.stopped"),
            "t": msg("watchdog.debugger"),
            "D": msg("watchdog.worker.blocked"),
        }.get(c.last.children[pid].state, msg("watchdog.worker.stuck"))
        at = msg("watchdog.at", frame=frame) if frame else ""
        return msg("watchdog.worker.waited_for", pid=pid, state=doing + at), frame
    pids = _workers(c)
    if not pids:
        return msg("watchdog.worker.none_left"), None
    return msg("watchdog.worker.all_idle", pids=", ".join(map(str, pids))), None


def may_end(c: RankTrace) -> bool:
    """Does the unresponsive worker wait for a timeout, for another process, or for I/O that has
    progressed?"""
    pid, stack = _unresponsive(c)
    if pid is None:
        return False
    state = c.last.children[pid].state
    to_ranks = c.last.sockets.keys() - c.last.outside
    return (state == "D" and c.child_turns(pid) > 0) or (
        state == "S" and awaited.ends_by(pid, stack, to_ranks) != ""
    )


def _unresponsive(c: RankTrace) -> tuple[int | None, Stack | str]:
    """Stopped, blocked, or in the dataset's own code. Idle workers wait in torch's."""
    pids = _workers(c)
    found = stacks.dump(pids)
    for pid in pids:
        frame = _own_frame(found[pid])
        busy_there = frame is not None and "/torch/utils/data/" not in frame.file
        if c.last.children[pid].state in "TtD" or busy_there:
            return pid, found[pid]
    return None, ""


def _own_frame(stack: Stack | str) -> Frame | None:
    return own(stack.main.frames) if isinstance(stack, Stack) and stack.main else None


def _workers(c: RankTrace) -> list[int]:
    return [pid for pid in procfs.workers(c.pid) if pid in c.last.children]

"""The processes of a pool for which a rank of a user script waits."""

from __future__ import annotations

from training.watchdog.probes import awaited, procfs, stacks
from training.watchdog.probes.stacks import Stack
from training.watchdog.probes.trace import RankTrace


def may_end(c: RankTrace) -> bool:
    """Does one of them execute a task that waits for a timeout or for another process?"""
    if c.last.main is None or not awaited.in_pool(c.last.main):
        return False
    pids = [pid for pid in procfs.workers(c.pid) if pid in c.last.children]
    to_ranks = c.last.sockets.keys() - c.last.outside
    return any(
        isinstance(stack, Stack)
        and stack.main is not None
        and awaited.has_task(stack.main)
        and awaited.ends_by(pid, stack, to_ranks) != ""
        for pid, stack in stacks.dump(pids).items()
    )

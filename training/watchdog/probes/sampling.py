"""Samples of the ranks of a user script."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from training.core.messages import msg
from training.watchdog.probes import awaited, graph_capture, procfs, sockets, stacks
from training.watchdog.probes.procfs import Process
from training.watchdog.probes.stacks import Stack, Thread
from training.watchdog.probes.waits import deciding, in_collective, waits_for_device


@dataclass(frozen=True)
class ProcessSample:
    """One rank and its descendants at one moment."""

    process: Process
    stack: Stack | str  # str: why there is none
    gpu: bool
    children: dict[int, Process] = field(default_factory=dict)
    # How often their main threads, and its own computing ones, have gone to sleep.
    children_turns: dict[int, int] = field(default_factory=dict)
    turns: int = 0
    sockets: dict[int, int] = field(default_factory=dict)  # TCP connection → bytes moved so far
    # thread, also of the children → seconds without a core so far
    queued: dict[int, float] = field(default_factory=dict)
    outside: frozenset[int] = frozenset()  # connections to processes that are not ranks
    # The rank's own connections, and those of them that are not to torch's store.
    own_sockets: frozenset[int] = frozenset()
    group_sockets: frozenset[int] = frozenset()
    # Connections to torch's store in this process, whose thread answers NCCL's heartbeat monitor
    # in every rank each second.
    served: frozenset[int] = frozenset()
    ends_by: str = ""  # awaited
    # The lock for which it, or a child, waits, and the running program that holds it; no rank.
    locked_out: str = ""
    # When it has called its newest collective, or one has ended, where torch's flight recorder
    # answers.
    newest_call: int | None = None

    @property
    def main(self) -> Thread | None:
        return deciding(self.stack)


@dataclass(frozen=True)
class Sample:
    at: float  # monotonic
    looks: dict[int, ProcessSample]  # by rank; running ones only
    written: int = 0  # bytes on the machine's disks so far


NewestCall = Callable[[int], int | None]


def take(
    pids: Mapping[int, int],
    newest_call: NewestCall = lambda rank: None,
    before: Sample | None = None,
) -> Sample:
    """`pids`: rank → PID. Takes some 10 ms for each rank, without disturbing it. `newest_call`
    takes longer: it is asked about ranks in a collective that use a GPU or were woken after the
    sample `before`, and about those that may wait for their GPU."""
    found, tree, looks = stacks.dump(pids.values()), procfs.tree(), {}
    families = {rank: procfs.family(pid, tree) for rank, pid in pids.items()}
    ours = {*pids.values(), *itertools.chain(*families.values())}
    locked_out = {
        waits: holder
        for waits, holder in procfs.lock_holders().items()
        if holder not in ours and procfs.lives(holder)
    }
    connected = {rank: sockets.connections([pids[rank], *families[rank]]) for rank in pids}
    for rank, pid in pids.items():
        main = deciding(found[pid])
        thread = main.number if main else 0
        process = procfs.read_process(pid, thread)
        if process is None or process.exits:
            continue
        children = {
            child: now
            for child in families[rank]
            if (now := procfs.read_process(child)) and now.state != "Z"
        }
        queued = {
            thread: seconds
            for one in (pid, *children)
            for thread, seconds in procfs.queued(one).items()
        }
        mine, store = connected[rank], _store_port(pid)
        others = {c.here for other, of in connected.items() if other != rank for c in of.values()}
        to_store = {i for i, c in mine.items() if store in (c.here[1], c.there[1])}
        to_ranks = to_store | {i for i, c in mine.items() if c.there in others}
        own = sockets.inodes([pid]) & mine.keys()
        look = ProcessSample(
            process,
            found[pid],
            procfs.uses_gpu(pid),
            children,
            {child: procfs.sleeps(child) for child in children},
            procfs.turns(pid, thread),
            {inode: connection.moved for inode, connection in mine.items()},
            queued,
            frozenset(mine.keys() - to_ranks),
            frozenset(own),
            frozenset(own - to_store),
            frozenset(i for i, c in mine.items() if c.here[1] == store and i in own),
            awaited.ends_by(pid, found[pid], to_ranks),
            next((_lock(o, locked_out[o]) for o in (pid, *families[rank]) if o in locked_out), ""),
        )
        looks[rank] = replace(look, newest_call=_newest(rank, look, before, newest_call))
    return Sample(time.monotonic(), looks, procfs.written_back())


def _lock(waits: int, holder: int) -> str:
    name, file = procfs.name(holder).strip(), procfs.locked_file(waits) or "?"
    return msg("watchdog.lock", file=file, name=name, pid=holder)


def _store_port(pid: int) -> int:
    """Port of torch's store; 0 where the variable is not set."""
    port = procfs.environment(pid).get("MASTER_PORT", "")
    return int(port) if port.isdecimal() else 0


def _newest(
    rank: int, look: ProcessSample, before: Sample | None, newest_call: NewestCall
) -> int | None:
    main = look.main
    if main is None or (look.gpu and graph_capture.captures(main.frames)):
        return None
    for_gpu = look.gpu and bool(main.frames) and not main.holds_gil
    if for_gpu and (look.process.state == "R" or waits_for_device(main.frames[0])):
        return newest_call(rank)  # it spins: its turns are the same
    collective = in_collective(main) is not None
    if look.gpu and collective:
        return newest_call(rank)  # so it does here, or another thread works for it, as in backward
    last = before.looks.get(rank) if before else None
    if last and last.turns == look.turns and last.newest_call is not None:
        return last.newest_call
    return newest_call(rank) if collective else None

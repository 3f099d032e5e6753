"""Samples of the ranks of a user script: a rank is alive if something changes between them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from training.watchdog.probes import procfs, sockets, stacks
from training.watchdog.probes.procfs import Process
from training.watchdog.probes.stacks import Frame, Stack, Thread

# Less than this is not work: threads that only poll, a logger's helper process.
IDLE_SHARE = 0.05  # of a core
IDLE_BYTES, IDLE_FAULTS = 16384, 200  # a second
# of the time, ready to run without a core: a starved thread uses no CPU time either
QUEUED_SHARE = 0.2
IDLE_DISK = 1e6  # bytes a second, of the whole machine


@dataclass(frozen=True)
class ProcessSample:
    """One rank and its descendants at one moment."""

    process: Process
    stack: Stack | str  # str: why there is none
    gpu: bool
    children: dict[int, Process] = field(default_factory=dict)
    sockets: dict[int, int] = field(default_factory=dict)  # TCP connection → bytes moved so far
    turns: int = 0
    # thread, also of the children → seconds without a core so far
    queued: dict[int, float] = field(default_factory=dict)

    @property
    def main(self) -> Thread | None:
        return self.stack.main if isinstance(self.stack, Stack) else None


@dataclass(frozen=True)
class Sample:
    at: float  # monotonic
    looks: dict[int, ProcessSample]  # by rank; running ones only
    written: int = 0  # bytes on the machine's disks so far


def take(pids: Mapping[int, int]) -> Sample:
    """`pids`: rank → PID. Takes some 10 ms for each rank, without disturbing it."""
    found, tree, looks = stacks.dump(pids.values()), procfs.tree(), {}
    for rank, pid in pids.items():
        process = procfs.read_process(pid)
        if process is None or process.state in "ZX":
            continue
        children = {
            child: now
            for child in procfs.family(pid, tree)
            if (now := procfs.read_process(child)) and now.state != "Z"
        }
        queued = {
            thread: seconds
            for one in (pid, *children)
            for thread, seconds in procfs.queued(one).items()
        }
        moved = sockets.moved([pid, *children])
        looks[rank] = ProcessSample(
            process, found[pid], procfs.uses_gpu(pid), children, moved, procfs.turns(pid), queued
        )
    return Sample(time.monotonic(), looks, procfs.written_back())


@dataclass(frozen=True)
class RankTrace:
    """One rank over all samples, at least two. Rates are per second between the first and the
    last."""

    rank: int
    looks: tuple[ProcessSample, ...]
    seconds: float
    written: int = 0  # on the machine's disks meanwhile, by any process

    @property
    def last(self) -> ProcessSample:
        return self.looks[-1]

    @property
    def pid(self) -> int:
        return self.last.process.pid

    def always(self, states: str) -> bool:
        return all(look.process.state in states for look in self.looks)

    @property
    def frames(self) -> tuple[Frame, ...]:
        return self.last.main.frames if self.last.main else ()

    @property
    def same_place(self) -> bool:
        """Is the stack the same, to the line, in every sample?"""
        return bool(self.frames) and all(
            look.main and look.main.frames == self.frames for look in self.looks
        )

    @property
    def same_functions(self) -> bool:
        here = [(f.file, f.function) for f in self.frames]
        return bool(here) and all(
            look.main and [(f.file, f.function) for f in look.main.frames] == here
            for look in self.looks
        )

    @property
    def own_cpu(self) -> float:
        """CPU share of all threads; 1.0 is one core."""
        return (self.last.process.cpu_s - self.looks[0].process.cpu_s) / self.seconds

    @property
    def childrens_cpu(self) -> float:
        before, now = self.looks[0].children, self.last.children
        return (
            sum(
                max(0.0, p.cpu_s - (before[pid].cpu_s if pid in before else 0.0))
                for pid, p in now.items()
            )
            / self.seconds
        )

    @property
    def bytes_moved(self) -> float:
        """Bytes through files, pipes and TCP, by the rank and its children."""
        first, last = self.looks[0], self.last
        count = (last.process.io_bytes or 0) - (first.process.io_bytes or 0)
        for pid, child in last.children.items():
            before = first.children.get(pid)
            count += (child.io_bytes or 0) - ((before.io_bytes or 0) if before else 0)
        count += sum(
            max(0, total - first.sockets.get(inode, 0)) for inode, total in last.sockets.items()
        )
        return count / self.seconds

    @property
    def faults(self) -> float:
        """New memory of it or a child, or pages read from a mapped file."""
        first, last = self.looks[0], self.last
        count = last.process.faults - first.process.faults
        count += sum(
            child.faults - (first.children[pid].faults if pid in first.children else 0)
            for pid, child in last.children.items()
        )
        return count / self.seconds

    @property
    def woken(self) -> bool:
        """Has its wait ended between samples? It may be seen in the same place each time and make
        progress all the same."""
        return self.last.turns != self.looks[0].turns

    @property
    def new_children(self) -> bool:
        return any(look.children.keys() != self.looks[0].children.keys() for look in self.looks)

    @property
    def moves_data(self) -> bool:
        return self.bytes_moved > IDLE_BYTES or self.faults > IDLE_FAULTS

    @property
    def writes_back(self) -> bool:
        """It is in the kernel, which may be writing back its data: not counted for any process."""
        return self.always("D") and self.written > IDLE_DISK * self.seconds

    @property
    def children_work(self) -> bool:
        return self.new_children or self.childrens_cpu > IDLE_SHARE

    @property
    def starved(self) -> bool:
        """Is a thread of it or of a child starved of CPU time?"""
        first = self.looks[0].queued
        return any(
            now - first.get(thread, now) > QUEUED_SHARE * self.seconds
            for thread, now in self.last.queued.items()
        )

    @property
    def idle(self) -> bool:
        """Nothing has happened in the rank or its children, though they could have run."""
        return (
            self.own_cpu <= IDLE_SHARE
            and not self.children_work
            and not self.moves_data
            and not self.starved
        )


def courses(samples: Sequence[Sample]) -> dict[int, RankTrace]:
    """Traces of the ranks that are in all samples."""
    if len(samples) < 2:
        return {}
    seconds = max(samples[-1].at - samples[0].at, 1e-3)
    return {
        rank: RankTrace(
            rank,
            tuple(sample.looks[rank] for sample in samples),
            seconds,
            samples[-1].written - samples[0].written,
        )
        for rank in samples[-1].looks
        if all(rank in sample.looks for sample in samples)
    }

"""What changes between the samples of a rank: then it is alive."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from training.watchdog.probes.sampling import ProcessSample, Sample
from training.watchdog.probes.stacks import Frame

# Less than this is not work: threads that only poll, a logger's helper process.
IDLE_SHARE = 0.05  # of a core
IDLE_BYTES, IDLE_FAULTS = 16384, 200  # a second
# of the time, ready to run without a core: a starved thread uses no CPU time either
QUEUED_SHARE = 0.2
IDLE_DISK = 1e6  # bytes a second, of the whole machine
# Wakes a second in I/O. A wait that never ends may have a timer: writing with a full page cache
# wakes 5 times a second. Only drivers of devices poll more often.
IO_WAKES = 10
IO_FAULTS = 1  # page faults a second; each of them is a wait
# A request to torch's store may come between the readings of the two counters of its bytes.
STORE_REQUEST = 64  # bytes for each connection


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
        return self._moved(self.last.sockets) / self.seconds

    def _moved(self, inodes: Collection[int]) -> int:
        """Bytes through files, pipes and these connections."""
        first, last = self.looks[0], self.last
        count = (last.process.io_bytes or 0) - (first.process.io_bytes or 0)
        if last.served:  # by read() and write(), which the process's own counter has too
            answered = self._by_tcp(last.served) + STORE_REQUEST * len(last.served)
            count = max(0, count - answered)
        for pid, child in last.children.items():
            before = first.children.get(pid)
            count += (child.io_bytes or 0) - ((before.io_bytes or 0) if before else 0)
        return count + self._by_tcp(inodes)

    def _by_tcp(self, inodes: Collection[int]) -> int:
        first, last = self.looks[0].sockets, self.last.sockets
        return sum(
            max(0, total - first.get(inode, 0)) for inode, total in last.items() if inode in inodes
        )

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

    def child_turns(self, pid: int) -> int:
        """How often the main thread of this child has gone to sleep."""
        now = self.last.children_turns.get(pid, 0)
        return now - self.looks[0].children_turns.get(pid, now)

    @property
    def advances_in_io(self) -> bool:
        """Does it, or a child, complete one operation of I/O after another? No bytes are counted
        for looking up files, and few page faults for reading a mapped one from a slow disk."""
        own = self.last.turns - self.looks[0].turns, [look.process for look in self.looks]
        children = (
            (
                self.child_turns(pid),
                [look.children[pid] for look in self.looks if pid in look.children],
            )
            for pid in self.last.children
        )
        return any(
            turns > IO_WAKES * self.seconds and any(one.state == "D" for one in seen)
            for turns, seen in (own, *children)
        )

    @property
    def faults_in_io(self) -> bool:
        """Does it, or a child, read pages of a mapped file, however slowly?"""
        return self.faults > IO_FAULTS

    @property
    def exchanges(self) -> bool:
        """Has it moved any bytes other than with ranks? A slow service answers in few of them."""
        return self._moved(self.last.outside) > 0

    @property
    def may_end(self) -> bool:
        """Could its wait end by itself, or by a process that is not a rank? A C call that holds
        the GIL blocks the threads that could end it."""
        held = all(look.main and look.main.holds_gil for look in self.looks)
        return self.woken or self.exchanges or (not held and self.last.ends_by != "")

    def calls_collectives(self, store: bool) -> bool:
        """Have collectives ended in which it has waited? A signal wakes it too, as after each
        subprocess of another thread, and nothing wakes one that spins for its GPU: torch's flight
        recorder decides, otherwise bytes of its own connections. `store`: it may wait for torch's
        store, which has no record."""
        calls = [look.newest_call for look in self.looks if look.newest_call is not None]
        known = len(calls) > 1
        if known and calls[0] != calls[-1]:
            return True
        if not self.woken or (known and not store):
            return False
        if not self.last.own_sockets or (self.last.gpu and not known):
            return True  # without a connection, as between GPUs
        return self._by_tcp(self.last.own_sockets if store else self.last.group_sockets) > 0

    @property
    def calls_further(self) -> bool:
        """Has it called further collectives meanwhile, or have some ended, by torch's flight
        recorder?"""
        calls = {look.newest_call for look in self.looks} - {None}
        return self.last.newest_call is not None and len(calls) > 1

    @property
    def new_children(self) -> bool:
        return any(look.children.keys() != self.looks[0].children.keys() for look in self.looks)

    @property
    def moves_data(self) -> bool:
        return self.bytes_moved > IDLE_BYTES or self.faults > IDLE_FAULTS

    @property
    def writes_back(self) -> bool:
        """It, or a child, is in the kernel, which may be writing back its data: not counted for any
        process."""
        children = (
            [look.children[pid].state for look in self.looks if pid in look.children]
            for pid in self.last.children
        )
        in_kernel = self.always("D") or any(set(states) == {"D"} for states in children)
        return in_kernel and self.written > IDLE_DISK * self.seconds

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
            and not self.advances_in_io
            and not self.starved
        )

    @property
    def exchanges_nothing(self) -> bool:
        """Nothing that could take part in a collective has happened. Other threads may use files
        and processes, as nvidia-smi, whose bytes count as the rank's when it has ended."""
        faults = self.last.process.faults - self.looks[0].process.faults
        return (
            self._by_tcp(self.last.own_sockets) <= IDLE_BYTES * self.seconds
            and faults <= IDLE_FAULTS * self.seconds
            # waiting for a GPU is often a busy loop
            and (self.last.gpu or (self.own_cpu <= IDLE_SHARE and not self.starved))
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

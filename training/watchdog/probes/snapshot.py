"""Snapshot of the ranks of this machine from outside, without stopping them: processes, stacks,
collectives. Two looks with a pause between them: what changes is alive."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from training.core import phases, rundir
from training.core.heartbeat import HeartbeatRecord
from training.core.messages import msg
from training.watchdog.probes import flight_recorder, on_request, procfs, stacks, waits
from training.watchdog.probes.flight_recorder import Call
from training.watchdog.probes.stacks import Frame, Stack, Thread

BETWEEN_S = 0.4
PAGE = 4096
DUMP_S = 2.0  # at most, for all of them together
LOOKS = 4  # at the state of a process, in that time


@dataclass
class ProcessActivity:
    """One process: a rank, or a worker of its data loader."""

    pid: int
    # of the main thread: R S D T …, one for each look
    states: list[str] = field(default_factory=list)
    busy: float = 0.0  # CPU share of the main thread, 1.0 is one core
    io_bytes: int = 0  # read and written between the looks
    waits_in: str = ""  # kernel function in which it sleeps
    # one for each dump; a text is the reason for none
    stacks: list[Stack | str] = field(default_factory=list)

    @property
    def gone(self) -> bool:
        return not self.states

    def always(self, *states: str) -> bool:
        return bool(self.states) and all(state in states for state in self.states)

    @property
    def threads(self) -> list[Thread]:
        """Threads of the last dump, the main thread first."""
        last = next((s for s in reversed(self.stacks) if isinstance(s, Stack)), None)
        return sorted(last.threads, key=lambda t: not t.main) if last else []

    @property
    def main(self) -> Thread | None:
        return next((t for t in self.threads if t.main), None)

    @property
    def own_frame(self) -> Frame | None:
        return stacks.own(self.main.frames) if self.main else None

    @property
    def holds_gil(self) -> bool:
        """Threads that are the same in every dump."""
        dumps = [s for s in self.stacks if isinstance(s, Stack)]
        return bool(dumps) and all(any(t.main and t.holds_gil for t in s.threads) for s in dumps)


@dataclass
class RankSnapshot:
    """Snapshot of one rank."""

    beat: HeartbeatRecord
    process: ProcessActivity
    workers: list[ProcessActivity]
    calls: list[Call] | None

    @property
    def rank(self) -> int:
        return self.beat.rank

    @property
    def unrecorded(self) -> bool:
        """Is its flight recorder off? It lists nothing, though a step has collectives."""
        return self.calls == [] and self.beat.first_step > 0

    @property
    def collective(self) -> str | None:
        """The collective in which it waits for other ranks, according to its stack. A computing
        backward pass waits for none."""
        main = self.process.main
        name = waits.in_collective(main) if main else None
        if (
            name is None
            and main
            and main.frames
            and phases.waits(self.beat.phase)
            and not main.holds_gil
        ):
            # NCCL: a rank waits where it needs the result.
            name = msg("watchdog.gpu") if waits.waits_for_device(main.frames[0]) else None
        return None if name == "backward" and (self.process.busy > 0.5 or self.in_hook) else name

    @property
    def in_hook(self) -> Frame | None:
        """User code in an autograd thread (one for each GPU) for which the main thread waits."""
        for thread in self.process.threads:
            if thread.name.startswith("pt_autograd") and thread.frames:
                return stacks.own(thread.frames)
        return None


def gather(
    run: rundir.RunDir, beats: list[HeartbeatRecord], pids: Mapping[int, int]
) -> list[RankSnapshot]:
    """Takes about half a second, a few seconds when ranks do not answer; blocks meanwhile."""
    there = [beat for beat in beats if beat.rank in pids]
    with ThreadPoolExecutor(max(1, len(there))) as pool:
        calls = list(pool.map(lambda beat: flight_recorder.read(run.ranks, beat.rank), there))
    everything = [
        RankSnapshot(
            beat,
            ProcessActivity(pids[beat.rank]),
            [ProcessActivity(pid) for pid in procfs.workers(pids[beat.rank])],
            called,
        )
        for beat, called in zip(there, calls, strict=True)
    ]
    # The ranks before their workers, and those behind first: time may be short.
    suspects = sorted(everything, key=lambda e: phases.place(e.beat))
    processes = [e.process for e in suspects] + [w for e in suspects for w in e.workers]
    _dump(processes)
    first, began = {s.pid: procfs.read_process(s.pid) for s in processes}, time.monotonic()
    for _ in range(LOOKS):
        time.sleep(BETWEEN_S / LOOKS)
        for seen in processes:
            if now := procfs.read_process(seen.pid):
                seen.states.append(now.state)
    for seen in processes:
        before, now = first[seen.pid], procfs.read_process(seen.pid)
        if before and now:
            seen.busy = (now.main_cpu_s - before.main_cpu_s) / (time.monotonic() - began)
            # A mapped file is read by page faults.
            seen.io_bytes = (
                (now.io_bytes or 0) - (before.io_bytes or 0) + PAGE * (now.faults - before.faults)
            )
            seen.waits_in = now.waits_in
    _dump(processes)
    return everything


def complete(run: rundir.RunDir, everything: list[RankSnapshot]) -> bool:
    """Ask the ranks without a stack for it; for ranks that would be ended otherwise. Returns
    whether any has answered."""
    blind = {e.rank: e.process.pid for e in everything if not e.process.threads}
    found = on_request.ask(run.ranks, blind)
    for e in everything:
        if e.rank in found:
            e.process.stacks.append(found[e.rank])
    return bool(found)


def _dump(processes: list[ProcessActivity]) -> None:
    missing = sorted(processes, key=lambda seen: bool(seen.threads))  # in the look before
    found = stacks.dump((seen.pid for seen in missing), DUMP_S)
    for seen in processes:
        seen.stacks.append(found.get(seen.pid, msg("watchdog.snapshot.none")))


def texts(everything: list[RankSnapshot]) -> dict[int, str]:
    """The snapshot as text, by rank: for users and bug reports."""
    return {e.rank: _text(e) for e in everything}


def _text(e: RankSnapshot) -> str:
    lines = [
        msg(
            "watchdog.snapshot.rank",
            rank=e.rank,
            beat=e.beat,
            epoch=e.beat.epoch,
            age_s=e.beat.age_s,
        ),
        _process(e.process),
        "",
    ]
    lines += [_stack(s) for s in e.process.stacks]
    for number, worker in enumerate(e.workers):
        lines += [
            "",
            msg("watchdog.snapshot.child", number=number),
            _process(worker),
            *(_stack(s) for s in worker.stacks[-1:]),
        ]
    if e.calls == []:
        lines += ["", msg("watchdog.snapshot.no_collectives")]
    elif e.calls:
        lines += [
            "",
            msg("watchdog.snapshot.collectives"),
            *(
                msg("watchdog.snapshot.call", number=call.number, call=call, group=call.group)
                for call in e.calls[-20:]
            ),
        ]
    return "\n".join(lines) + "\n"


def _process(seen: ProcessActivity) -> str:
    states = "".join(seen.states) or msg("watchdog.snapshot.gone")
    return msg(
        "watchdog.snapshot.process",
        pid=seen.pid,
        states=states,
        percent=100 * seen.busy,
        waits_in=seen.waits_in or "-",
        io_bytes=seen.io_bytes,
    )


def _stack(stack: Stack | str) -> str:
    return stack if isinstance(stack, str) else stack.text()

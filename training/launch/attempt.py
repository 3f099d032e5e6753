"""One start of all ranks, watched until the last one is gone."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from training import console, heartbeat, rundir
from training.errors import Exit
from training.host import process
from training.host.gpus import one_line
from training.launch import ended, spawn, team
from training.launch.line import SILENT, Line, Lost
from training.launch.output import Output
from training.launch.team import Team, is_script
from training.watch import death, serve
from training.watch.death import Death
from training.watch.finding import Finding
from training.watch.start import RanksWatch

POLL_S = 0.25
PEER_GRACE_S = 3.0  # what the others may still say after one has failed
STALL_S = 5.0  # after a wish to stop: ranks that make no progress for so long are killed
SAVING_S = 600.0  # so long may a part of a checkpoint take
SAVING = ("gather state", "checkpoint")  # phases of a rank that may take long, and must not be cut short
CLOSING_S = 30.0  # between the first rank's regular end and the last one's


@dataclass
class Outcome:
    """What became of an attempt. `ended` lists (rank or None, wait status as in Popen.returncode), first death first."""

    ended: list[tuple[int | None, int]] = field(default_factory=list)
    guilty: tuple[int | None, int] | None = None  # the first that failed
    here: tuple[int | None, int] | None = None  # the first that failed on this machine
    phases: dict[int, str] = field(default_factory=dict)  # rank → what it was doing when the first one failed
    death: Death | None = None  # what is known of the first rank that died
    finding: Finding | None = None  # the hang that ended it
    asked: Exit = Exit.DONE  # PREEMPTED or INTERRUPTED when a signal asked to stop
    killed: bool = False  # asked twice, or the ranks did not stop
    elsewhere: bool = False  # a rank of another machine failed first
    lost: Lost | None = None  # a machine that is gone or silent, when that ended it
    ours: bool = True  # our own training; False: somebody's script
    torn_down: bool = False  # a script had come to its end, and was aborted after it


class Attempt:
    """`token` marks every process of the launch (training.host.process)."""

    def __init__(self, run: rundir.RunDir, plan: dict[str, Any], team: Team, token: str, line: Line | None = None) -> None:
        self.run, self.plan, self.team, self.token, self.line, self.outcome = run, plan, team, token, line, Outcome()
        self._ours = self.outcome.ours = not is_script(plan)
        self._watch = RanksWatch(run, plan, team)
        self.each_pass: Callable[[], None] = lambda: None  # called a few times a second while ranks run
        self._asked_times = 0
        self._ended_nodes: set[int] = set()
        self._killing = False  # from now on deaths are our doing
        self._selector = selectors.DefaultSelector()
        self._alive: dict[int, spawn.Child] = {}  # by pidfd
        self._outputs: dict[int, Output] = {}  # by descriptor
        self._failed_at: float | None = None
        self._first_end: float | None = None
        self._asked_at: float | None = None

    def go(self) -> Outcome:
        """Start, watch, reap. Whatever happens here, no process of this attempt is left when it returns."""
        # Signals become bytes in a pipe, so that the loop below handles them like everything else.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        previous = signal.set_wakeup_fd(writer)
        self._selector.register(reader, selectors.EVENT_READ, self._on_signal)
        for node, wire in (self.line.wires if self.line else {}).items():
            self._selector.register(wire, selectors.EVENT_READ, functools.partial(self._on_line, node))
        try:
            self._start()
            judged = 0.0
            while self._alive:
                for key, _ in self._selector.select(POLL_S):
                    key.data(key.fd)
                if time.monotonic() - judged > POLL_S:  # not at each line of output: the ranks need the CPU
                    self._judge()
                    self.each_pass()
                    judged = time.monotonic()
        finally:
            for child in self._alive.values():
                child.signal_group(signal.SIGKILL)
                child.popen.wait()
            self._watch.close()
            self._sweep()
            with contextlib.suppress(OSError):
                for rank in self.team.ranks:
                    serve.address(self.run.ranks, rank).unlink(missing_ok=True)  # a folder with a socket can not be copied
            self._drain_rest()
            signal.set_wakeup_fd(previous)
            for number, handler in before.items():  # who was asked to stop does that now, however often he is asked
                signal.signal(number, handler if self.outcome.asked == Exit.DONE else signal.SIG_IGN)
            self._selector.close()
            os.close(reader)
            os.close(writer)
        return self.outcome

    def _start(self) -> None:
        for rank in self.team.ranks:
            for stale in (
                self.run.heartbeat(rank),
                *(self.run.ranks / f"rank{rank}.{end}" for end in ("error.json", "stacks", "ended", "sock")),
            ):
                stale.unlink(missing_ok=True)
        command = team.command(self.run, self.plan)
        if self.plan["launcher"]["value"] == "torchrun":
            children = [spawn.start_torchrun(self.team, command, self.token, self.run.ranks, ours=self._ours)]
        else:
            children = spawn.start_ranks(self.team, command, self.token, ours=self._ours, terminal=os.isatty(2))
        self.team.close()
        for child in children:
            path = self.run.ranks / "torchrun.log" if child.rank is None else self.run.rank_log(child.rank)
            output = Output(child.output, path, shown=child.rank in (None, self.team.ranks.start))
            self._alive[child.pidfd], self._outputs[child.output] = child, output
            self._selector.register(child.pidfd, selectors.EVENT_READ, self._on_end)
            self._selector.register(child.output, selectors.EVENT_READ, self._on_output)
        known = rundir.read_json(self.run.supervisor) or {}
        rundir.write_json(self.run.supervisor, known | {"ranks": [{"rank": c.rank, "pid": c.popen.pid} for c in children]})

    def _on_output(self, fd: int) -> None:
        self._watch.output()
        if not self._outputs[fd].drain():
            self._selector.unregister(fd)
            self._outputs.pop(fd).close()

    def _on_end(self, pidfd: int) -> None:
        child = self._alive.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        status = child.popen.wait()
        child.signal_group(signal.SIGKILL)  # what it left behind: data-loader workers, helpers
        now = time.monotonic()
        self._first_end = self._first_end or now
        self.outcome.ended.append((child.rank, status))
        if self._killing or self._regular(child, status):
            return
        self.outcome.here = self.outcome.here or (child.rank, status)
        if self.outcome.guilty is None:
            self.outcome.guilty = self.outcome.here
            self.outcome.phases = {b.rank: str(b) for b in self._beats()}
            self.outcome.torn_down = status == -signal.SIGABRT and (self.run.ranks / f"rank{child.rank}.ended").exists()
            self._tell_death(child, status)
            self._fail()

    def _tell_death(self, child: spawn.Child, status: int) -> None:
        """At once: the card comes when all the others are gone."""
        if self.outcome.torn_down or self.outcome.asked != Exit.DONE or (self._ours and status in (Exit.CONFIG, Exit.RESOURCES)):
            return
        if child.rank is None:
            console.error(f"{child.name} {ended.how(status)}")
            return
        known = self.outcome.death = death.explain(
            self.run, child.rank, status, [c.rank for c in self._alive.values() if c.rank is not None]
        )
        phase = self.outcome.phases.get(known.rank) if known.rank is not None else None
        at = f"; at {known.where}" if known.where else ""
        text = f"{known.label}{f' rank {known.rank}' if known.rank is not None else ''}{f' in {phase!r}' if phase else ''}: {known.how}{at}"
        console.error(f"{text}; ending the others" if self._alive else text)
        self.run.event("verdict", kind=known.kind, rank=known.rank, where=known.where, phase=phase, text=text)

    def _fail(self) -> None:
        self._failed_at = time.monotonic()
        if self.line:
            self.outcome.lost = self.outcome.lost or self.line.overdue()  # unless the rank says something better (verdict)
        if self.line and (not self.outcome.elsewhere or self.outcome.lost):
            rank, status = self.outcome.guilty or (None, 0)
            self.line.tell({"failed": {"rank": rank, "status": status}})

    def _on_line(self, node: int, fd: int) -> None:
        """What the supervisor of another machine says."""
        assert self.line
        for message in self.line.read(node):
            if isinstance(lost := message.get("gone"), Lost):
                self._selector.unregister(fd)
                self._lose(lost)
            elif "ended" in message:
                self._ended_nodes.add(node)
            else:
                self.line.failed = message.get("record") or self.line.failed
                self._failed_elsewhere()

    def _lose(self, lost: Lost) -> None:
        """A machine is not there any more. Is it only silent, our ranks wait for it and have nothing more to say."""
        if lost.node in self._ended_nodes or self._failed_at is not None:
            return
        console.error(lost.text)
        self.run.event("verdict", kind=lost.kind, rank=None, where=None, phase=None, text=lost.text)
        self.outcome.lost, self.outcome.phases = lost, {b.rank: str(b) for b in self._beats()}
        self._failed_elsewhere()
        if lost.kind == SILENT:
            self._kill()

    def _failed_elsewhere(self) -> None:
        if self.outcome.guilty is None:
            self.outcome.elsewhere, self.outcome.guilty = True, (None, 0)
            self._fail()

    def _beats(self) -> list[heartbeat.Beat]:
        return heartbeat.read_all(self.run.heartbeats, self.team.ranks)

    def _sweep(self) -> None:
        """What the ranks' own children have left, also in sessions of their own."""
        for pid, command in process.sweep(self.token).items():
            console.warning(f"left behind by a rank, ended: pid {pid}: {one_line(command)[:100]}")

    def _regular(self, child: spawn.Child, status: int) -> bool:
        """Did it end as it should? A status of 0 in the middle of the training is a failure too."""
        if status in (Exit.PREEMPTED, Exit.INTERRUPTED):
            return True
        beat = heartbeat.read(self.run.heartbeat(child.rank)) if child.rank is not None else None
        return status == 0 and (beat is None or beat.phase == heartbeat.FINISHED)

    def _on_signal(self, fd: int) -> None:
        for number in os.read(fd, 64):
            if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                continue
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self._asked_times += 1
            if self._asked_times > 1:
                self._insist(name)
                continue
            self.outcome.asked = Exit.INTERRUPTED if number == signal.SIGINT else Exit.PREEMPTED
            self._asked_at = time.monotonic()
            will = "finishing the current step and saving a checkpoint" if self._ours else "told the script to stop"
            console.warning(f"{name}: {will} (once more: stop now)")
            for child in self._alive.values():
                if child.rank is None:
                    child.signal_group(signal.SIGTERM)
                else:
                    child.signal(signal.Signals(number))

    def _insist(self, name: str) -> None:
        """Asked again: our ranks have nothing more to do, a script gets a moment for its own clean-up; the third time is the end."""
        self.outcome.killed = True
        if self._ours or self._asked_times > 2:
            console.warning(f"{name} again: the ranks are killed")
            self._kill()
            return
        console.warning(f"{name} again: stopping the ranks now (once more: kill them)")
        self._asked_at = time.monotonic()
        for child in self._alive.values():
            child.signal_group(signal.SIGTERM)

    def _judge(self) -> None:
        """Limits: peers of a failed rank, ranks that do not stop when asked, no progress at all."""
        now = time.monotonic()
        if self._failed_at is not None and now - self._failed_at > PEER_GRACE_S:
            self._kill()
        beats = self._beats()
        if self._asked_at is not None and now - self._asked_at > STALL_S and self._silent(beats):
            self.outcome.killed = True
            self._kill()
        finished = self._ours and all(b.phase == heartbeat.FINISHED for b in beats)  # a script tells nothing
        if self._first_end is not None and now - self._first_end > CLOSING_S and finished:
            self._kill()
        for lost in self.line.watch(min((b.age_s for b in beats if b.phase != heartbeat.FINISHED), default=0.0)) if self.line else []:
            self._lose(lost)
        # Whom do they all wait for? While another machine does not answer, it is not known that it is a rank.
        answered = self.line is None or not self.line.overdue()
        if self.outcome.guilty is None and self._asked_at is None and answered and (found := self._look()):
            self._hang(found)

    def _look(self) -> Finding | None:
        if not self._alive:
            return None
        started = {child.rank: child.popen.pid for child in self._alive.values()}
        return self._watch.look(started, {rank: status for rank, status in self.outcome.ended if rank is not None})

    def _silent(self, beats: list[heartbeat.Beat]) -> bool:
        """After a wish to stop: does nobody do anything about it? Whoever saves may take his time, and whoever has just finished
        needs a moment to leave. A script has no heartbeat: it is left alone until it is asked again."""
        if not beats:
            return self._ours or self._asked_times > 1
        if any(beat.phase in SAVING for beat in beats):
            return min(beat.age_s for beat in beats) > SAVING_S
        return all(beat.age_s > max(STALL_S, self._watch.patience_s(beat)) for beat in beats)

    def _hang(self, found: Finding) -> None:
        """Told at once, while the ranks are still there; nothing comes from them any more, so they are ended."""
        self.outcome.finding = found
        self.outcome.phases = {b.rank: str(b) for b in self._beats()}
        self.outcome.guilty = (found.rank, 0)
        console.error(found.sentence() + (f"; the others: {found.others()}" if found.waiting else ""))
        self._fail()
        self._kill()

    def _kill(self) -> None:
        self._killing = True
        if self.outcome.asked != Exit.DONE:
            self.outcome.killed = True
        for child in self._alive.values():
            child.signal_group(signal.SIGKILL)

    def _drain_rest(self) -> None:
        """Last words of children that have ended; a grandchild that kept the pipe open can not block this."""
        for fd, output in self._outputs.items():
            os.set_blocking(fd, False)
            while output.drain():
                pass
            output.close()
        self._outputs.clear()

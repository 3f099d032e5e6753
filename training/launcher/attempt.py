"""One start of all ranks, watched until the last one is gone."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from training.core import exit_status, heartbeat, log, phases, rundir
from training.core.errors import Exit
from training.core.failure_kinds import SILENT
from training.host import process
from training.host.cgroups import oom_kills
from training.host.gpus import one_line
from training.launcher import failure_report, local_ranks, others, spawn, stop_signals, timeouts
from training.launcher.json_socket import Message
from training.launcher.local_ranks import LocalRanks, is_script
from training.launcher.others import Others
from training.launcher.outcome import Outcome
from training.launcher.outputs import Outputs
from training.launcher.peer_link import LostPeer, PeerLink, is_order
from training.launcher.stop_signals import StopSignals
from training.trainer import flight_recorder_server
from training.watchdog import hang_dump, rank_exit
from training.watchdog.hang_report import HangFinding
from training.watchdog.start import RanksWatch

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import FailureRecord

POLL_S = 0.25


class Attempt:
    """`token` marks every process of the launch (training.host.process). `wanted`: signals that
    count before and after it, too."""

    def __init__(
        self,
        run: rundir.RunDir,
        plan: Plan,
        team: LocalRanks,
        token: str,
        line: PeerLink | None = None,
        wanted: StopSignals | None = None,
    ) -> None:
        self.run, self.plan, self.team, self.token, self.line, self.outcome = (
            run,
            plan,
            team,
            token,
            line,
            Outcome(),
        )
        self._wishes = wanted or StopSignals()
        self._ours = self.outcome.ours = not is_script(plan)
        self._watch = RanksWatch(run, plan, team.ranks, team.world_size)
        self._readings = heartbeat.Readings(run.heartbeats, team.ranks)
        self._gone = timeouts.Gone(float(plan["config"]["hang_timeout"]))
        # called a few times a second while ranks run
        self.each_pass: Callable[[], None] = lambda: None
        self._asked_times = self._signals = 0
        self._others = Others(line)
        self._killing = False  # from now on deaths are our doing
        self._selector = selectors.DefaultSelector()
        self._alive: dict[int, spawn.Child] = {}  # by pidfd
        self._outputs = Outputs(run, self._selector, self._watch.output)
        self._failed_at: float | None = None
        self._asked_at: float | None = None
        self._left: tuple[float, spawn.Child, int] | None = (
            None  # when a script's rank left as if asked to stop, and its status
        )
        self._killed_at: float | None = None
        self._said: set[str] = set()

    def go(self) -> Outcome:
        """Start, watch, reap. Whatever happens here, no process of this attempt that can be ended
        is left when it returns."""
        with self._wishes:
            self._selector.register(self._wishes.fd, selectors.EVENT_READ, self._on_signal)
            for node, wire in (self.line.wires if self.line else {}).items():
                self._selector.register(
                    wire, selectors.EVENT_READ, functools.partial(self._on_line, node)
                )
            try:
                self._start()
                for node, wire in list(self.line.wires.items()) if self.line else ():
                    self._on_line(node, wire.fileno())  # what came together with the word to start
                judged = 0.0
                while self._goes_on():
                    for key, _ in self._selector.select(POLL_S):
                        key.data(key.fd)
                    self._outputs.gather()
                    # not at each line of output: the ranks need the CPU
                    if time.monotonic() - judged > POLL_S:
                        self._judge()
                        self._safely("showing exceptions in threads", self._outputs.show_threads)
                        if not self.outcome.gone:
                            self._safely("noting how far the run is", self.each_pass)
                        judged = time.monotonic()
            finally:
                self._safely("ending the ranks", self._reap)
                self._safely("ending the watch", self._watch.close)
                self._safely("looking for what ranks have left behind", self._sweep)
                self._safely("removing sockets", self._remove_sockets)
                self._safely("reading what the ranks printed last", self._outputs.drain_rest)
                self._selector.close()
        return self.outcome

    def _goes_on(self) -> bool:
        if self._alive:
            return not self._blocked()
        over = self.line is None or self._failed_at is not None or self.outcome.killed
        return not over and self._others.wait(int(failure_report.exit_code(self.outcome)))

    def _safely(self, what: str, work: Callable[[], object]) -> None:
        """What only tells or tidies up must not end the run, nor keep from what comes after it.
        Said once."""
        try:
            work()
        except Exception as error:
            text = f"{what} has failed, and nothing else with it: {type(error).__name__}: {error}"
            if text not in self._said:
                self._said.add(text)
                log.warning(text)

    def _reap(self) -> None:
        for child in self._alive.values():
            child.signal_group(signal.SIGKILL)
        for child in self._alive.values():
            # it is blocked in the kernel, and that has been said
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.popen.wait(timeout=1.0 if self.outcome.blocked else timeouts.UNKILLABLE_S)

    def _blocked(self) -> bool:
        """Has SIGKILL not ended the ranks? The kernel ends nobody who waits for a dead disk or
        device: nor do we wait for them."""
        if self._killed_at is None or time.monotonic() - self._killed_at < timeouts.UNKILLABLE_S:
            return False
        self.outcome.blocked = "; ".join(
            timeouts.unkillable(child.name, child.popen.pid) for child in self._alive.values()
        )
        log.error(self.outcome.blocked)
        return True

    def _remove_sockets(self) -> None:
        for rank in self.team.ranks:
            # a folder with a socket can not be copied
            flight_recorder_server.address(self.run.ranks, rank).unlink(missing_ok=True)

    def _start(self) -> None:
        self.outcome.oom_kills = oom_kills()
        spawn.remove_stale(self.run, self.team)
        command = local_ranks.command(self.run, self.plan)
        if self.plan["launcher"]["value"] == "torchrun":
            children = [
                spawn.start_torchrun(
                    self.team, command, self.token, self.run.ranks, ours=self._ours
                )
            ]
        else:
            children = spawn.start_ranks(
                self.team, command, self.token, ours=self._ours, terminal=os.isatty(2)
            )
        self.team.close()
        for child in children:
            output = self._outputs.add(child, shown=child.rank in (None, self.team.ranks.start))
            self.outcome.log_from[output.path] = output.begins
            self._alive[child.pidfd] = child
            self._selector.register(child.pidfd, selectors.EVENT_READ, self._on_end)
        known = rundir.read_json(self.run.supervisor) or {}
        rundir.write_json(
            self.run.supervisor,
            known | {"ranks": [{"rank": c.rank, "pid": c.popen.pid} for c in children]},
        )

    def _on_end(self, pidfd: int) -> None:
        child = self._alive.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        status = child.popen.wait()
        child.signal_group(signal.SIGKILL)  # what it left behind: data-loader workers, helpers
        self.outcome.ended.append((child.rank, status))
        if not self._killing and not self._regular(child, status):
            self._rank_failed(child, status)

    def _rank_failed(self, child: spawn.Child, status: int) -> None:
        self._left = None
        if self.outcome.left is not None:
            return
        self.outcome.here = self.outcome.here or (child.rank, status)
        if self.outcome.guilty is None:
            self.outcome.guilty = self.outcome.here
            self._safely(
                "looking for a rank that left before",
                functools.partial(self._blame_who_left_before, child),
            )
            self.outcome.phases = {b.rank: str(b) for b in self._beats()}
            self.outcome.torn_down = (
                status == -signal.SIGABRT and (self.run.ranks / f"rank{child.rank}.ended").exists()
            )
            self._safely(
                "telling of the failure", functools.partial(self._tell_death, child, status)
            )
            self._fail()

    def _blame_who_left_before(self, child: spawn.Child) -> None:
        if self._ours or child.rank is None:
            return
        left = rank_exit.left_before(
            self.run, child.rank, self.outcome.ended, self.outcome.log_from
        )
        self.outcome.guilty = left or self.outcome.guilty

    def _tell_death(self, child: spawn.Child, status: int) -> None:
        """At once: the card comes when all the others are gone."""
        if (
            self.outcome.torn_down
            or self.outcome.asked != Exit.DONE
            or (self._ours and status in (Exit.CONFIG, Exit.RESOURCES))
        ):
            return
        if child.rank is None:
            self._error(f"{child.name} {exit_status.how(status)}")
            return
        others = [c.rank for c in self._alive.values() if c.rank is not None]
        rank = child.rank
        # another one, which left before
        if self.outcome.guilty and self.outcome.guilty[0] is not None:
            rank, status = self.outcome.guilty[0], self.outcome.guilty[1]
        known = self.outcome.death = rank_exit.explain(
            self.run, rank, status, others, self.outcome.log_from
        )
        phase = self.outcome.phases.get(known.rank) if known.rank is not None else None
        at = f"; at {known.where}" if known.where else ""
        who = f" rank {known.rank}" if known.rank is not None else ""
        text = f"{known.label}{who}{f' in {phase!r}' if phase else ''}: {known.how}{at}"
        self._error(f"{text}; ending the others" if self._alive else text)
        self.run.event(
            "verdict", kind=known.kind, rank=known.rank, where=known.where, phase=phase, text=text
        )

    def _error(self, text: str) -> None:
        """At once; where the ranks may be started again to the log only, since one message tells of
        the failure and the restart."""
        log.error(text, shown=not self.plan["retries"]["value"])

    def _fail(self) -> None:
        self._failed_at = time.monotonic()
        if self.line:
            # unless the rank says something better (verdict)
            self.outcome.lost = self.outcome.lost or self.line.overdue()
        # the others know only node 0
        if self.line and (not self.outcome.elsewhere or self.outcome.lost or self._others.first):
            rank, status = self.outcome.guilty or (None, 0)
            self.line.tell({"failed": {"rank": rank, "status": status}})

    def _on_line(self, node: int, fd: int) -> None:
        """What the supervisor of another machine says."""
        assert self.line
        messages = self.line.read(node)
        self.line.keep(node, [m for m in messages if is_order(m)])
        for message in messages:
            if isinstance(lost := message.get("gone"), LostPeer):
                self._selector.unregister(fd)
                self._lose(lost)
            elif "ended" in message:
                self._ended_elsewhere(node, message["ended"])
            elif "asked" in message:
                self._asked_elsewhere(node, message)
            else:
                self.line.failed = (
                    cast("FailureRecord | None", message.get("record")) or self.line.failed
                )
                self._failed_elsewhere()

    def _ended_elsewhere(self, node: int, status: object) -> None:
        self._others.ended[node] = code = status if isinstance(status, int) else int(Exit.DONE)
        self.outcome.ended.append((None, code))
        if not self._others.running():
            self._watch.elsewhere_ended()

    def _asked_elsewhere(self, node: int, message: Message) -> None:
        assert self.line
        # all machines of a job may get the signal themselves
        if (wish := others.asked(message)) and wish[1] > self._asked_times:
            if isinstance(rank := message.get("left"), int):
                self.outcome.left, self.outcome.killed, self._failed_at = (
                    rank,
                    True,
                    time.monotonic(),
                )
            self._wish(wish[0], f" on {self.line.name(node)}")

    def _lose(self, lost: LostPeer) -> None:
        """A machine is not there any more. Is it only silent, our ranks wait for it and have
        nothing more to say."""
        if lost.node in self._others.ended or self._failed_at is not None:
            return
        self._error(lost.text)
        self.run.event("verdict", kind=lost.kind, rank=None, where=None, phase=None, text=lost.text)
        self.outcome.lost, self.outcome.phases = lost, {b.rank: str(b) for b in self._beats()}
        self._failed_elsewhere()
        if lost.kind == SILENT:
            self._kill()

    def _failed_elsewhere(self) -> None:
        if self.outcome.guilty is None:
            self.outcome.elsewhere, self.outcome.guilty = True, (None, 0)
            self._fail()

    def _beats(self) -> list[heartbeat.HeartbeatRecord]:
        return self._readings.read()

    def _sweep(self) -> None:
        """What the ranks' own children have left, also in sessions of their own."""
        blocked = (
            {child.popen.pid for child in self._alive.values()} if self.outcome.blocked else set()
        )
        for pid, command in process.sweep(self.token).items():
            if pid not in blocked:
                log.warning(f"left behind by a rank, ended: pid {pid}: {one_line(command)[:100]}")

    def _regular(self, child: spawn.Child, status: int) -> bool:
        """Did it end as it should? A status of 0 in the middle of the training is a failure too."""
        beat = heartbeat.read(self.run.heartbeat(child.rank)) if child.rank is not None else None
        if self._ours and status in stop_signals.SIGNALS:
            if beat and beat.phase != heartbeat.FINISHED and self.outcome.asked == Exit.DONE:
                self._left_alone(child, status)
            return True
        if not self._ours and self.outcome.asked != Exit.DONE:
            return True  # a script that was asked to stop may end as it likes
        if not self._ours and status in stop_signals.SIGNALS:
            # all of its ranks may do so: _judge
            self._left = self._left or (
                time.monotonic(),
                child,
                status,
            )
            return True
        return status == 0 and (beat is None or beat.phase == heartbeat.FINISHED)

    def _left_alone(self, child: spawn.Child, status: int) -> None:
        """A rank of ours was asked to stop, and has left without the others: they are asked too,
        and what they can no longer do together is no failure."""
        self.outcome.left, self.outcome.killed, self._failed_at = child.rank, True, time.monotonic()
        self._wish(
            stop_signals.SIGNALS[status], f" to {child.name} alone, which {exit_status.how(status)}"
        )

    def _on_signal(self, fd: int) -> None:
        for number in self._wishes.read():
            self._signals += 1
            # else it is what another machine of the job has got and passed on
            if self._signals > self._asked_times:
                self._wish(number)

    def _wish(self, number: int, whose: str = "") -> None:
        """To stop, of the user or scheduler here, or on another machine."""
        name = f"{stop_signals.name(number)}{whose}"
        self._asked_times += 1
        self._others.pass_on(number, self._asked_times, self.outcome.left)
        if self._asked_times > 1:
            self._insist(name)
            return
        self.outcome.asked = stop_signals.code(number)
        self._asked_at = time.monotonic()
        will = (
            "finishing the current step and saving a checkpoint"
            if self._ours
            else "told the script to stop"
        )
        will = will if self.outcome.left is None else "the other ranks are stopped too"
        log.warning(f"{name}: {will} (once more: stop now)")
        for child in self._alive.values():
            if child.rank is None:
                child.signal_group(signal.SIGTERM)
            else:
                child.signal(signal.Signals(number))

    def _insist(self, name: str) -> None:
        """Asked again: our ranks have nothing more to do, a script gets a moment for its own
        clean-up; the third time is the end."""
        self.outcome.killed = True
        if self._ours or self._asked_times > 2:
            log.warning(f"{name} again: the ranks are killed")
            self._kill()
            return
        log.warning(f"{name} again: stopping the ranks now (once more: kill them)")
        self._asked_at = time.monotonic()
        for child in self._alive.values():
            child.signal_group(signal.SIGTERM)

    def _judge(self) -> None:
        """Limits: peers of a failed rank, ranks that do not stop when asked, or do not leave, no
        progress at all."""
        now = time.monotonic()
        if not self.outcome.gone and self.run.is_gone():
            self._lose_folder()
        if self.outcome.gone and self._ours:
            return
        if (
            self._left
            and now - self._left[0] > timeouts.PEER_GRACE_S
            and (self._alive or self._others.running())
            and not self._asked_times
        ):
            self._rank_failed(*self._left[1:])
        if self._failed_at is not None and now - self._failed_at > timeouts.grace_s(
            self.outcome.guilty
        ):
            self._kill()
        beats = self._beats()
        # A script tells nothing; of our own, all must have finished.
        if (
            self._ours
            and len(beats) == len(self.team.ranks)
            and all(b.phase == heartbeat.FINISHED for b in beats)
        ):
            self._close(beats)
        elif (
            self._asked_at is not None
            and now - self._asked_at > timeouts.STALL_S
            and self._silent(beats)
        ):
            self.outcome.killed = True
            self._kill()
        for lost in self.line.watch(self._still_s(beats)) if self.line else []:
            self._lose(lost)
        # Whom do they all wait for? While another machine does not answer, it is not known that it
        # is a rank.
        answered = self.line is None or not self.line.overdue()
        if (
            self.outcome.guilty is None
            and self._asked_at is None
            and answered
            and (found := self._look())
        ):
            self._hang(found)

    def _still_s(self, beats: list[heartbeat.HeartbeatRecord]) -> float:
        if self._ours and all(beat.phase == heartbeat.FINISHED for beat in beats):
            return self._others.still_s()
        return timeouts.still_s(beats, self._watch)

    def _lose_folder(self) -> None:
        """Our ranks could save nothing more. A script keeps its own files elsewhere and goes on."""
        self.outcome.gone = True
        if self._ours:
            log.error(f"the run directory {self.run.own} has disappeared; ending the ranks")
            self._kill()
        else:
            log.warning(
                f"the run directory {self.run.own} has disappeared: what the ranks print is not "
                f"kept any more"
            )

    def _look(self) -> HangFinding | None:
        if not self._alive:
            return None
        started = {child.rank: child.popen.pid for child in self._alive.values()}
        if found := self._watch.look(
            started, {rank: status for rank, status in self.outcome.ended if rank is not None}
        ):
            return found
        if not self._ours or None not in started:
            return None
        found = self._gone.look(
            [beat for beat in self._beats() if beat.rank not in self._readings.unread]
        )
        return hang_dump.keep(self.run, found, {}) if found else None

    def _silent(self, beats: list[heartbeat.HeartbeatRecord]) -> bool:
        """A script has no heartbeat: it is left alone until it is asked again."""
        working = [b for b in beats if b.phase != heartbeat.FINISHED]
        if (
            self._ours
            and working
            and self._others.running()
            and all(phases.waits(b.phase) for b in working)
        ):
            # another machine may be saving a checkpoint
            return min(b.age_s for b in working) > timeouts.SAVING_S
        return (
            timeouts.silent(beats, self.outcome.asked, self._watch)
            if beats
            else self._ours or self._asked_times > 1
        )

    def _close(self, beats: list[heartbeat.HeartbeatRecord]) -> None:
        """The work of all is done; something keeps a process. The run is what rank 0 has written of
        it."""
        since_s = min(b.age_s for b in beats)
        limit_s = timeouts.STALL_S if self.outcome.asked == Exit.INTERRUPTED else timeouts.CLOSING_S
        if self._killing or not self._alive or since_s <= limit_s:
            return
        names = ", ".join(
            [f"rank {b.rank}" for b in beats if not timeouts.has_left(b)]
            or [c.name for c in self._alive.values()]
        )
        why = "a thread that is no daemon, or what it does at exit"
        log.warning(
            f"{names}: finished since {since_s:.0f} s, and the process does not leave ({why}): "
            f"ended"
        )
        self.outcome.closed = Exit(
            (rundir.read_json(self.run.summary) or {}).get("exit_code", self.outcome.asked)
        )
        self._kill_all()

    def _hang(self, found: HangFinding) -> None:
        """Told at once, while the ranks are still there; nothing comes from them any more, so they
        are ended."""
        self.outcome.finding = found
        self.outcome.phases = {b.rank: str(b) for b in self._beats()}
        self.outcome.guilty = (found.rank, 0)
        self._error(found.sentence() + (f"; the others: {found.others()}" if found.waiting else ""))
        self._fail()
        self._kill()

    def _kill(self) -> None:
        if self.outcome.asked != Exit.DONE:
            self.outcome.killed = True
        self._kill_all()

    def _kill_all(self) -> None:
        """From now on deaths are our doing."""
        self._killing = True
        self._killed_at = self._killed_at or time.monotonic()
        for child in self._alive.values():
            child.signal_group(signal.SIGKILL)

"""One attempt: one start of all ranks of this machine, supervised until the last one has exited."""

from __future__ import annotations

import functools
import selectors
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from training.core import heartbeat, phases, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.host.process import STOP_SIGNALS
from training.launcher import (
    failure_report,
    kernel_evidence,
    local_ranks,
    stop_signals,
)
from training.launcher.attempt_limits import AttemptLimits
from training.launcher.attempt_state import AttemptState
from training.launcher.child import Child
from training.launcher.child_processes import ChildProcesses
from training.launcher.first_failure import FirstFailure
from training.launcher.local_ranks import LocalRanks, is_script
from training.launcher.other_ranks import OtherRanks
from training.launcher.others import Others
from training.launcher.outcome import Outcome
from training.launcher.outputs import Outputs
from training.launcher.peer_link import PeerLink
from training.launcher.peer_messages import PeerMessages
from training.launcher.stop_requests import StopRequests
from training.launcher.stop_signals import StopSignals
from training.watchdog.start import RanksWatch

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

POLL_S = 0.25


class Attempt:
    """`token` marks every process of the launch (training.host.process). `signals`: stop signals
    that count before and after the attempt too. `each_pass` is called a few times a second."""

    def __init__(
        self,
        run: rundir.RunDir,
        plan: Plan,
        team: LocalRanks,
        token: str,
        line: PeerLink | None = None,
        signals: StopSignals | None = None,
    ) -> None:
        self._signals = signals or StopSignals()
        self._selector = selectors.DefaultSelector()
        self.outcome = Outcome(ours=not is_script(plan), watched=local_ranks.watched(plan))
        self.state = AttemptState(
            run,
            plan,
            team,
            self.outcome,
            Others(line),
            RanksWatch(run, plan, team.ranks, team.world_size),
            heartbeat.Readings(run.heartbeats, team.ranks),
        )
        self.outcome.pids = self.state.watch.trained
        shown = local_ranks.shown(plan, team.ranks)
        others = None if self.outcome.ours or team.ranks.start not in shown else OtherRanks()
        self._outputs = Outputs(
            run, self._selector, self.state.watch.output, shown, team.ranks.start, others
        )
        self.outcome.in_threads = self._outputs.in_threads
        self.outcome.unwritten = self._outputs.unwritten
        self.children = ChildProcesses(
            self.state, self._selector, self._outputs, token, self._on_exit
        )
        self.failure = FirstFailure(self.state, self.children)
        self.stop = StopRequests(self.state, self.children, self.failure, self._signals)
        self._peers = PeerMessages(self.state, self._selector, self.failure, self.stop)
        self._limits = AttemptLimits(self.state, self.children, self.failure, self.stop)
        self.each_pass: Callable[[], None] = lambda: None

    def go(self) -> Outcome:
        """Start, supervise, reap. No process of this attempt that can be killed is left when it
        returns or raises."""
        with self._signals:
            self._selector.register(self._signals.fd, selectors.EVENT_READ, self.stop.on_signal)
            self._peers.register()
            try:
                self.children.start()
                self._peers.read_buffered()
                checked = 0.0
                while self._continues():
                    for key, _ in self._selector.select(self._outputs.patience_s(POLL_S)):
                        key.data(key.fd)
                    self._outputs.between()
                    # not at each line of output: the ranks need the CPU
                    if time.monotonic() - checked > POLL_S:
                        self._check()
                        checked = time.monotonic()
                self.failure.of_earlier()
            except BaseException:
                kernel_evidence.end(self.outcome)
                raise
            finally:
                best_effort = self.state.best_effort
                best_effort(msg("launcher.effort.reap"), self.children.reap)
                best_effort(msg("launcher.effort.stop_watch"), self.state.watch.close)
                best_effort(msg("launcher.effort.sweep"), self.children.sweep)
                best_effort(msg("launcher.effort.sockets"), self.children.remove_sockets)
                best_effort(msg("launcher.effort.drain"), self._outputs.drain_rest)
                show_others = functools.partial(self._outputs.show_last_of_others, self.outcome)
                best_effort(msg("launcher.effort.others"), show_others)
                self._selector.close()
        self.failure.forget_if_complete()
        if self.outcome.guilty is None:
            kernel_evidence.end(self.outcome)
        return self.outcome

    def ending(self) -> bool:
        """Has a rank of Duet's training completed its last step?"""
        return any(beat.phase in phases.AT_END for beat in self.state.beats())

    def waited_s(self) -> float:
        """For how long all ranks of this machine have waited for others, beyond what is usual."""
        return self._limits.waiting_s(self.state.beats())

    def _continues(self) -> bool:
        if self.children.alive:
            return not self.children.blocked()
        self.failure.of_late_exit()
        alone = self.state.link is None
        over = alone or self.outcome.failed_at is not None or self.outcome.killed
        return not over and self.state.others.wait(int(failure_report.exit_code(self.outcome)))

    def _check(self) -> None:
        self.children.follow_stop()
        self._limits.check()
        self.state.best_effort(msg("launcher.effort.threads"), self._outputs.show_threads)
        self.state.best_effort(msg("launcher.effort.unfinished"), self._outputs.show_unfinished)
        if self.outcome.failed_at is None:
            self.state.best_effort(msg("launcher.effort.others"), self._outputs.show_others)
        if self.outcome.watched:
            adopted = functools.partial(self.children.adopt, self.state.watch.adopted)
            self.state.best_effort(msg("launcher.effort.adopt"), adopted)
        if not self.outcome.gone:
            self.state.best_effort(msg("launcher.effort.progress"), self.each_pass)

    def _on_exit(self, child: Child, status: int) -> None:
        """Classify an exit that this process has not caused. Status 0 in the middle of the training
        is also a failure."""
        beat = (
            heartbeat.read(self.state.run.heartbeat(child.rank)) if child.rank is not None else None
        )
        finished = beat is None or beat.phase == heartbeat.FINISHED
        asked, stopped = self.outcome.asked != Exit.DONE, status in stop_signals.SIGNALS
        if self.outcome.ours and stopped:
            if not (finished or asked or self.outcome.resized):
                self.stop.from_rank(child, status)
        elif not self.outcome.ours and asked:
            pass  # a script that was asked to stop may exit with any status
        elif not self.outcome.ours and stopped:
            self.failure.of_stop_exit(child, status)
        elif self.outcome.ours and finished and beat and status < 0:
            if -status not in STOP_SIGNALS:  # else by a request while the interpreter ended
                self.failure.after_end(child, status)
            self.outcome.closed = self._limits.closed()
        elif status != 0 or not finished:
            self.failure.of_rank(child, status)

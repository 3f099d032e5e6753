"""Requests to stop a running attempt: by a signal here, on another machine, or to one rank."""

from __future__ import annotations

import functools
import signal
import time

from training.core import exit_status, log
from training.core.console import hurry
from training.core.messages import msg
from training.launcher import others, stop_signals
from training.launcher.attempt_state import AttemptState
from training.launcher.child import Child
from training.launcher.child_processes import ChildProcesses
from training.launcher.first_failure import FirstFailure
from training.launcher.json_socket import Message
from training.launcher.stop_signals import StopSignals


class StopRequests:
    """The first request asks the ranks to stop. The second one kills ranks of Duet's training and
    sends SIGTERM to a script; the third one kills the script. Each is passed on to the other
    machines."""

    def __init__(
        self,
        state: AttemptState,
        children: ChildProcesses,
        failure: FirstFailure,
        signals: StopSignals,
    ) -> None:
        self._state, self._children, self._stop_signals = state, children, signals
        self._failure = failure
        self.count = 0  # requests, of all machines together
        self._signals = 0  # received by this process
        # time of the last request that gives the ranks time to stop
        self.asked_at: float | None = None

    def on_signal(self, fd: int) -> None:
        """Stop signals of this process have arrived."""
        for number in self._stop_signals.read():
            if number in stop_signals.PASSED_ON:
                self._children.pass_on(number)
                continue
            self._signals += 1
            # a signal that every machine of the job gets may have been passed on before it arrives
            if self._signals > self.count:
                self._request(number)

    def for_other_ranks(self) -> None:
        """Duet's ranks save and exit, those of a script are ended: the supervisor starts them again
        with others. It is not a stop of the run: nothing hurries, and hangs are still detected."""
        self._state.outcome.resized = True
        if self._state.outcome.ours:
            self._children.ask_to_stop(signal.SIGTERM)
        else:
            self.asked_at = time.monotonic()
            self._children.killing = True  # whatever they exit with
            self._children.terminate()

    def from_peer(self, message: Message, name: str) -> None:
        """A request that another machine passes on. `name`: of that machine."""
        if (request := others.asked(message)) is None:
            return
        # every machine of a job may get the signal itself
        if request[1] > self.count:
            if isinstance(rank := message.get("left"), int):
                self._rank_left(rank)
            self._request(request[0], msg("launcher.stop.on_node", name=name))
        if message.get("raised") is True:
            self._failure.came_before_elsewhere(request[0])
            if self._state.others.first:  # the others are connected to this machine alone
                self._state.others.report_raised(request[0])

    def from_rank(self, child: Child, status: int) -> None:
        """A rank of Duet's training received a stop signal itself and exited without the others:
        they are asked to stop too, and what they cannot complete without it is not a failure."""
        self._rank_left(child.rank)
        self._request(
            stop_signals.SIGNALS[status],
            msg("launcher.stop.to_one", name=child.name, how=exit_status.how(status)),
        )

    def _rank_left(self, rank: int | None) -> None:
        outcome = self._state.outcome
        outcome.left, outcome.killed, outcome.failed_at = rank, True, time.monotonic()

    def _request(self, number: int, origin: str = "") -> None:
        hurry()
        outcome, now = self._state.outcome, time.time()
        name = f"{stop_signals.name(number)}{origin}"
        self.count += 1
        self._state.others.pass_on(number, self.count, outcome.left)
        if self.count > 1:
            self._insist(name)
            return
        outcome.asked = stop_signals.code(number)
        if outcome.failed_at is not None and outcome.left is None:
            outcome.late_stop = number
        if outcome.ours or not outcome.resized:  # else the time limit of its ranks runs already
            self.asked_at = time.monotonic()
        will = msg("launcher.stop.saving") if outcome.ours else msg("launcher.stop.asked_script")
        will = will if outcome.left is None else msg("launcher.stop.others_too")
        again = msg("launcher.stop.again") if stop_signals.insists(number) else ""
        log.warning(msg("launcher.stop.first", name=name, will=will, again=again))
        self._children.ask_to_stop(number)
        # last: the disk of the reports may be slow
        self._state.best_effort(
            msg("launcher.effort.report"), functools.partial(self._find_earlier, number, now)
        )

    def _find_earlier(self, number: int, asked: float) -> None:
        if self._failure.came_before(number, asked):
            self._state.others.report_raised(number)

    def after_hang(self, found: str) -> None:
        """The ranks of a script hang after the first request: as after a second one."""
        number = stop_signals.SIGNALS[int(self._state.outcome.asked)]
        self.count += 1
        self._state.others.pass_on(number, self.count, None)
        again = msg("launcher.stop.again_kill") if stop_signals.insists(number) else ""
        self._terminate(msg("launcher.stop.no_progress", found=found, again=again))

    def _insist(self, name: str) -> None:
        """The second or third request."""
        if self._state.outcome.ours or self.count > 2:
            log.warning(msg("launcher.stop.kill", name=name))
            self._children.kill()
            return
        again = msg("launcher.stop.again_kill")
        self._terminate(msg("launcher.stop.second", name=name, again=again))

    def _terminate(self, why: str) -> None:
        """A script gets time for its own clean-up once."""
        self._state.outcome.killed = True
        log.warning(why)
        self.asked_at = time.monotonic()
        self._children.terminate()

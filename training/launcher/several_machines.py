"""A run on several machines: when a rank fails anywhere, every machine stops, and node 0 decides
what to do next. With `--min_ranks` the run continues without a lost machine, and takes it back when
its launcher is started again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from training.core import log, manifest, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.launcher import endings, failure_report, fewer_ranks, seats, stop_signals
from training.launcher.attempt import Attempt
from training.launcher.coordinator import Coordinator
from training.launcher.json_socket import Message
from training.launcher.local_ranks import LocalRanks, is_script
from training.launcher.outcome import Outcome
from training.launcher.peer_link import PeerLink, RunEnded, Stopped
from training.launcher.post_run import PostRun
from training.launcher.recovery import Recovery
from training.launcher.restart import Restart, Team
from training.launcher.stop_signals import StopSignals
from training.trainer import prepared_cache

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import FailureRecord

T = TypeVar("T")


def train(run: rundir.RunDir, plan: Plan, ending: PostRun, line: PeerLink, token: str) -> int:
    """To the end of the run; the exit code of this machine."""
    node: _Node = (
        _First(run, plan, ending, line, token)
        if isinstance(line, Coordinator)
        else _Other(run, plan, ending, line, token)
    )
    code = int(Exit.TRAINING)
    with node.stack:
        try:
            while (ended := node.once()) is None:
                if prepared_cache.changed(run):
                    node.unless_asked(lambda: prepared_cache.prepare(run, plan))
            code = ended
        except RunEnded as over:
            code = over.code
            if node.begun and code in (Exit.PREEMPTED, Exit.INTERRUPTED):
                ranks = msg("launcher.end.node", ranks=run.ranks)
                log.warning(msg("launcher.end.node_stopped", how="", code=code, text=ranks))
            else:
                log.info(msg("launcher.nodes.run_ended"))
        except Stopped as asked:
            line.stop(asked.number)
            if not node.begun:
                raise
            code = node.recovery.stop(asked.number)
        except KeyboardInterrupt as signalled:  # before the first start
            line.stop(stop_signals.number_of(signalled))
            raise
        finally:
            line.dismiss(code)
    return code


class _Node(ABC):
    """One machine."""

    def __init__(
        self, run: rundir.RunDir, plan: Plan, ending: PostRun, line: PeerLink, token: str
    ) -> None:
        self.run, self.plan, self.ending, self.token = run, plan, ending, token
        self.signals, self.stack = StopSignals(), ExitStack()
        self.recovery = Recovery(run, plan, self.signals)
        self.begun = False

    @abstractmethod
    def once(self) -> int | None:
        """One start of the ranks. None: they are to be started again, else the exit code."""

    def unless_asked(self, work: Callable[[], T]) -> T:
        """Work between two attempts, which may wait for other machines. Raises Stopped: a stop
        signal has interrupted it."""
        found: list[T] = []
        number = self.signals.wait(0)
        if number is None and self.signals.unless_asked(lambda: found.append(work())):
            return found[0]
        number = number or self.signals.wait(0)
        assert number, "the signal that interrupted the work"
        raise Stopped(number)

    def _team(self, line: PeerLink) -> LocalRanks | None:
        """The ranks to start. Before the first start stop signals are the caller's, from then on
        none is lost."""
        if self.begun:
            return self.unless_asked(line.go)
        team = line.go()
        self.begun = self.ending.begun = True
        self.stack.enter_context(self.signals)
        return team

    def _failure(self, line: PeerLink, outcome: Outcome) -> FailureRecord:
        """The failure record for all machines, which failure.json gets."""
        record = line.settle(failure_report.of_node(outcome, self.run, self.plan))
        endings.keep_failure(self.run, record, self.plan["created"])
        return record


class _Other(_Node):
    """A machine other than the first."""

    def __init__(
        self, run: rundir.RunDir, plan: Plan, ending: PostRun, line: PeerLink, token: str
    ) -> None:
        super().__init__(run, plan, ending, line, token)
        self.line = line

    def once(self) -> int | None:
        team = self._team(self.line)
        if team is None:  # another machine was lost, or this one joins a running run
            order = self._order()
            if order is None:
                return int(Exit.TRAINING)
            self.recovery.follow(order, None)
            return None
        outcome = Attempt(self.run, self.plan, team, self.token, self.line, self.signals).go()
        if endings.folder_lost(self.run, self.plan, outcome):
            return int(Exit.TRAINING)
        code = failure_report.exit_code(outcome)
        if not outcome.guilty and not outcome.killed:
            if outcome.resized and (order := self._order()):
                self.recovery.follow(order, None)
                return None
            return endings.node_end(self.run, code, outcome)
        record = self._failure(self.line, outcome)
        if order := self._order():
            self.recovery.follow(order, record)
            return None
        if self.line.stopped:
            return int(self.line.stopped)
        endings.report_end(self.run, outcome, record, self.recovery.given_up)
        if "elastic" in self.plan and not self.line.there(0):
            log.warning(msg("launcher.nodes.left_out"))
        return int(record["exit_code"])

    def _order(self) -> Message | None:
        return self.unless_asked(lambda: self.line.decide(None))


class _First(_Node):
    """Node 0: decides for all machines."""

    def __init__(
        self, run: rundir.RunDir, plan: Plan, ending: PostRun, line: Coordinator, token: str
    ) -> None:
        super().__init__(run, plan, ending, line, token)
        self.line = line
        self._before = ""  # name of the newest checkpoint when the ranks were started
        self._more: Team | None = None  # of the next start

    def once(self) -> int | None:
        run, plan, recovery, line = self.run, self.plan, self.recovery, self.line
        team = self._team(line)
        if team is None:  # another machine was lost before the start
            outcome = Outcome(ours=not is_script(plan), guilty=(None, 0), elsewhere=True)
            outcome.lost = line.lost_peer
        else:
            outcome = self._attempt(Attempt(run, plan, team, self.token, line, self.signals))
        if endings.folder_lost(run, plan, outcome):
            return int(Exit.TRAINING)
        code = failure_report.exit_code(outcome)
        if not outcome.guilty and not outcome.killed:
            if self._grows(outcome, code):
                return None
            return endings.regular_end(run, plan, self.ending, outcome, recovery)
        record = self._failure(line, outcome)
        chosen = (
            recovery.choose(record, outcome, line)
            if endings.may_help(run, outcome, record)
            else None
        )
        order = line.decide(recovery.order(chosen) if chosen else None, int(recovery.stopped or 0))
        if chosen and order is not None:
            recovery.begin(chosen)
            return None
        if recovery.stopped:
            return int(recovery.stopped)
        endings.report_end(run, outcome, record, recovery.given_up)
        return int(record["exit_code"])

    def _attempt(self, attempt: Attempt) -> Outcome:
        self._before, self._more = self._newest(), None
        attempt.each_pass = lambda: self._look(attempt)
        return attempt.go()

    def _newest(self) -> str:
        saved = manifest.all_in(self.run.checkpoints)
        return saved[-1].name if saved else ""

    def _look(self, attempt: Attempt) -> None:
        """Called repeatedly while ranks run: is a lost machine back, and the next checkpoint
        written? Then the ranks are asked to save and exit. Those of a script are ended as soon as
        the machine is back, as by torchrun."""
        self.recovery.look()
        if "elastic" not in self.plan:
            return
        self.line.greet_late()
        outcome = attempt.outcome
        if self._more and not outcome.resized:  # the others got the message in the last turn
            attempt.stop.for_other_ranks()
            return
        if (
            not self.line.ready_again
            or not self.plan["config"].get("rejoin", True)  # a script has no such option
            or not self.recovery.trains
            or outcome.resized
            or outcome.failed_at is not None
            or outcome.asked != Exit.DONE
            or (outcome.ours and self._newest() == self._before)
        ):
            return
        lost = {one["seat"] for one in self.plan["elastic"]["lost"]}
        back = [s for s in seats.on(self.plan["elastic"], self.line.ready_again) if s in lost]
        team = fewer_ranks.choose(self.plan, (), back)
        # otherwise it replaces the next lost one
        if isinstance(team, Team) and len(team.seats) > self.plan["ranks"]:
            self._more = team
            self.line.send_all({"resize": True})

    def _grows(self, outcome: Outcome, code: int) -> bool:
        """After a start without a failure: are the ranks to be started again, because there are
        more?"""
        if not outcome.resized:
            return False
        team, self._more = self._more, None
        stopped = code == Exit.PREEMPTED if outcome.ours else code == Exit.DONE
        if not team or outcome.asked != Exit.DONE or not stopped:
            self.line.decide(None)  # the others wait for it
            return False
        names = fewer_ranks.names(self.plan, team.back)
        why = msg("launcher.rejoin.joined", names=names)
        change = msg("launcher.rejoin.with", names=names)
        label = fewer_ranks.label(self.plan, team, change)
        text = (
            msg("launcher.rejoin.restart", label=label)
            if outcome.ours
            else msg("launcher.rejoin.restart_script", label=label)
        )
        self.run.summary.unlink(missing_ok=True)  # of the stop
        self.line.decide(self.recovery.order(Restart(0, {}, why, team=team)))
        self.recovery.grow(team, why, text)
        log.info(text)
        return True

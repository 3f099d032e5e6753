"""One machine of several, from start to start of its ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from training.core import rundir
from training.launcher import continued_run, endings, failure_report
from training.launcher.local_ranks import LocalRanks, is_script
from training.launcher.outcome import Outcome
from training.launcher.peer_link import LostPeer, PeerLink, Stopped
from training.launcher.post_run import PostRun
from training.launcher.recovery import Recovery
from training.launcher.rejoin import Rejoin
from training.launcher.replica.receiver import ReplicaReceiver
from training.launcher.replica.sender import ReplicaSender
from training.launcher.stop_signals import StopSignals

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import FailureRecord

T = TypeVar("T")


@dataclass
class Launch:
    """What a machine keeps from start to start, whichever machine coordinates the run. `run`: as
    this machine writes it. `stack` ends what was begun."""

    run: rundir.RunDir
    plan: Plan
    ending: PostRun
    token: str
    recovery: Recovery = field(init=False)
    signals: StopSignals = field(default_factory=StopSignals)
    stack: ExitStack = field(default_factory=ExitStack)
    begun: bool = False

    def __post_init__(self) -> None:
        self.recovery = Recovery(self.run, self.plan, self.signals)


class Machine(ABC):
    """`next`: this machine after the last start, if its part in the run has changed. `copies`: of
    checkpoints, for a machine with its own disk."""

    def __init__(self, launch: Launch, copies: ReplicaSender | ReplicaReceiver) -> None:
        self.launch, self.copies = launch, copies
        self.next: Machine = self
        self.rejoin = Rejoin()
        launch.stack.callback(self.rejoin.close)
        launch.stack.callback(copies.close)

    @property
    @abstractmethod
    def line(self) -> PeerLink:
        """To the other machines."""

    @abstractmethod
    def once(self) -> int | None:
        """One start of the ranks. None: they are to be started again, else the exit code."""

    def unless_asked(self, work: Callable[[], T]) -> T:
        """Work between two attempts, which may wait for other machines. Raises Stopped: a stop
        signal has interrupted it."""
        found: list[T] = []
        signals = self.launch.signals
        number = signals.wait(0)
        if number is None and signals.unless_asked(lambda: found.append(work())):
            return found[0]
        number = number or signals.wait(0)
        assert number, "the signal that interrupted the work"
        raise Stopped(number)

    def _team(self) -> LocalRanks | None:
        """The ranks to start. Before the first start stop signals are the caller's, from then on
        none is lost."""
        launch = self.launch
        launch.ending.failure = None
        if launch.begun:
            team = self.unless_asked(self.line.go)
        else:
            team = self.line.go()
            launch.begun = launch.ending.begun = True
            launch.stack.enter_context(launch.signals)
        if team and "elastic" in launch.plan:
            continued_run.keep(launch.run, self.line)
        return team

    def _without_start(self, lost: LostPeer | None) -> Outcome:
        """The outcome where a machine was lost before the start of the ranks."""
        ours = not is_script(self.launch.plan)
        return Outcome(ours=ours, guilty=(None, 0), elsewhere=True, lost=lost)

    def _failure(self, outcome: Outcome) -> FailureRecord:
        """The failure record for all machines."""
        launch = self.launch
        return self.line.settle(failure_report.of_node(outcome, launch.run, launch.plan))

    def _keep(self, record: FailureRecord) -> None:
        self.launch.ending.failure = record
        endings.keep_failure(self.launch.run, record, self.launch.plan)

"""More ranks again: lost GPUs that work are used from the next checkpoint on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from training.core import log
from training.core.errors import Exit
from training.core.messages import msg
from training.launcher import fewer_ranks, replan
from training.launcher.attempt import Attempt
from training.launcher.outcome import Outcome
from training.launcher.recovery import Recovery
from training.launcher.rejoin import Rejoin, candidates, restart_text
from training.launcher.restart import Team
from training.launcher.saved import Saved

if TYPE_CHECKING:
    from types import TracebackType


class Growth:
    """For one launch on one machine. On exit the tests of GPUs are ended."""

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery
        self._rejoin = Rejoin()
        self._saved = Saved(recovery.run, recovery.plan)
        self._back: set[int] = set()  # planned numbers of lost ranks whose GPUs work again
        self._team: Team | None = None  # of the next start

    def __enter__(self) -> Growth:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rejoin.close()

    def attempt(self, attempt: Attempt) -> Outcome:
        """One start of the ranks. When a lost GPU works again, they are asked to save and exit, and
        those of a script are ended, as by torchrun."""
        self._rejoin.begin(self._saved.begin())
        self._back.clear()
        attempt.each_pass = lambda: self._look(attempt)
        return attempt.go()

    def _look(self, attempt: Attempt) -> None:
        self.recovery.look()
        plan = self.recovery.plan
        outcome = attempt.outcome
        ends = outcome.resized or outcome.asked != Exit.DONE or outcome.failed_at is not None
        if not candidates(plan) or not self.recovery.trains or ends or attempt.ending():
            return
        self._back.update(self._rejoin.look(plan, self._saved.newest()))
        if not self._back or not self._saved.rests:
            return
        back = tuple(sorted(self._back))
        self._back.clear()
        team = fewer_ranks.choose(plan, (), back)
        if not isinstance(team, Team):
            return
        log.info(msg("launcher.rejoin.back", names=fewer_ranks.names(plan, back)))
        if len(team.seats) > plan["ranks"]:
            self._team = team
            attempt.stop.for_other_ranks()
            return
        # it replaces the next lost one
        same = replace(team, seats=tuple(plan["elastic"]["seats"]))
        why = msg("launcher.rejoin.why", names=fewer_ranks.names(plan, back))
        replan.apply_team(self.recovery.run, plan, same, why)

    def grows(self, outcome: Outcome, code: int) -> bool:
        """After a start: are the ranks to be started again, because there are more?"""
        team, self._team = self._team, None
        if not team or outcome.guilty or outcome.asked != Exit.DONE:
            return False
        if outcome.ours and code != Exit.PREEMPTED:  # a script may exit with any status
            return False
        plan = self.recovery.plan
        names = fewer_ranks.names(plan, team.back)
        change = msg("launcher.rejoin.with", names=names)
        label = fewer_ranks.label(plan, team, change)
        text = restart_text(label, script=not outcome.ours)
        return self.recovery.grow(team, msg("launcher.rejoin.why", names=names), text)

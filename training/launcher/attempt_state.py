"""State that the parts of one attempt share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training.core import heartbeat, log, rundir
from training.core.jsonl import Record
from training.core.messages import msg
from training.diagnose import error_reports
from training.launcher.local_ranks import LocalRanks
from training.launcher.others import Others
from training.launcher.outcome import Outcome
from training.launcher.peer_link import PeerLink
from training.watchdog.start import RanksWatch

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


@dataclass
class AttemptState:
    """`outcome` is the result so far; every part writes its own facts into it."""

    run: rundir.RunDir
    plan: Plan
    team: LocalRanks
    outcome: Outcome
    others: Others
    watch: RanksWatch
    readings: heartbeat.Readings
    _warned: set[str] = field(default_factory=set)

    @property
    def link(self) -> PeerLink | None:
        """None on a single machine."""
        return self.others.line

    def beats(self) -> list[heartbeat.HeartbeatRecord]:
        """Last heartbeats of the ranks of this machine."""
        return self.readings.read()

    def phases(self) -> dict[int, str]:
        """Rank → its current phase, as text; of a rank that has reported an error, the phase of
        the error: rank 0 closes its trackers after that."""
        errors = error_reports.of_all(self.run, self.outcome.unwritten)
        failed_in = {error["rank"]: error["phase"] for error in errors}
        return {beat.rank: failed_in.get(beat.rank) or str(beat) for beat in self.beats()}

    def summary(self) -> Record:
        """What rank 0 has written at the end of this start; {} before that."""
        file = self.run.summary
        known = rundir.read_json(file) or {}
        return known if rundir.is_of_start(known, self.plan, file, self.plan["created"]) else {}

    def best_effort(self, what: str, work: Callable[[], object]) -> None:
        """Run work whose errors must not end the run: they are logged, each text once."""
        try:
            work()
        except Exception as error:
            text = msg("launcher.effort.failed", what=what, name=type(error).__name__, error=error)
            if text not in self._warned:
                self._warned.add(text)
                log.warning(text)

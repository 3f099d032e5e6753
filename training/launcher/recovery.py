"""Recovery after a failure: apply and record what training.launcher.recovery_policy decides, and
restart from the last verified checkpoint."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from training.config.fault_spec import ATTEMPT
from training.core import heartbeat, log, manifest, run_reader, rundir, standing
from training.core.console import hurry
from training.core.errors import Exit, UserError, unwritable
from training.core.messages import msg
from training.launcher import (
    end_record,
    fewer_ranks,
    rejoin,
    replan,
    restart_order,
    restart_text,
    script_figures,
    script_recovery,
    script_snapshot,
    seats,
    stop_signals,
)
from training.launcher.coordinator import Coordinator
from training.launcher.json_socket import Message
from training.launcher.local_ranks import is_script
from training.launcher.outcome import Outcome
from training.launcher.recovery_policy import CURES, remedy
from training.launcher.restart import Failure, GiveUp, Restart, Team
from training.launcher.resumption import Resumption
from training.launcher.stop_signals import StopSignals

if TYPE_CHECKING:
    from training.core.contracts.events import RestartFacts
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import SummaryRecord
    from training.core.contracts.verdict import FailureRecord
    from training.core.jsonl import Record


class Recovery:
    """For one launch. `signals`: stop signals between two attempts; without it they are noticed in
    a pause only."""

    def __init__(self, run: rundir.RunDir, plan: Plan, signals: StopSignals | None = None) -> None:
        self.run, self.plan, self._signals = run, plan, signals or StopSignals()
        # as in events.jsonl, with the step of the checkpoint that was loaded
        self.restarts: list[RestartFacts] = []
        self.stopped: Exit | None = None  # asked to stop between two attempts
        self._late_stop: int | None = None  # by this signal, before the last attempt had ended
        # why the last failure was not followed by a restart, where restarts were requested
        self.given_up = ""
        self.hand_over = False  # only this machine cannot continue the run
        self._failures: list[Failure] = []
        self._failed_at = 0.0
        self._resumption = Resumption(run)
        self._texts: list[str] = []  # the reason for each restart
        self._of_script = is_script(plan)
        self._snapshot: script_snapshot.Snapshot | None = None  # of a script, at the last failure
        self._snapshot_text = ""
        self._policy = script_recovery.remedy if self._of_script else remedy
        self._attempt = 1
        os.environ[ATTEMPT] = "1"

    def again(self, record: FailureRecord, outcome: Outcome) -> bool:
        """On one machine: are the ranks to be started again? If so, the plan (in place, and its
        file) is updated for the next start."""
        chosen = self.choose(record, outcome)
        if chosen is None or self.asked_to_stop(chosen.pause_s):
            return False
        return self.begin(chosen)

    def choose(
        self,
        record: FailureRecord,
        outcome: Outcome,
        line: Coordinator | None = None,
        wait: Callable[[str], bool] = lambda why: False,
    ) -> Restart | None:
        """The restart after a failure, logged, which begins after its pause; None: the run ends.
        `line`: to the other machines, some of which may be lost or back; `wait`: called with the
        reason where too few ranks are left, whether another machine has joined since."""
        # on a common disk those of other machines are by other clocks
        own = seats.ranks(self.plan)
        beats = [b for b in heartbeat.read_all(self.run.heartbeats) if b.rank in own]
        self._failed_at = max((b.wall_time for b in beats), default=record["time"])
        failure, chosen = self._decided(self._failure(record, outcome), outcome, line)
        while isinstance(chosen, GiveUp) and chosen.too_few and line and wait(chosen.reason):
            joined = {node for node in line.missing() if node in line.ready_again}
            failure = replace(failure, returned=tuple(joined))
            failure, chosen = self._decided(failure, outcome, line)
        if isinstance(chosen, GiveUp):
            self.hand_over = chosen.hand_over
            if chosen.reason:
                self.give_up(chosen.reason)
            return None
        changed = bool(chosen.changes or chosen.team or failure.returned)
        self._failures.append(replace(failure, changed=changed))
        self._report(record, failure, chosen)
        self._late_stop = outcome.late_stop
        return chosen

    def _decided(
        self, failure: Failure, outcome: Outcome, line: Coordinator | None
    ) -> tuple[Failure, Restart | GiveUp]:
        """The failure with its lost machines, and what follows."""
        missing = [n for n in line.missing() if n not in failure.returned] if line else []
        if line and "elastic" in self.plan:
            # one that was lost by this very failure joins after the next checkpoint
            back = tuple(rejoin.back(self.plan, line))
            failure = replace(failure, nodes=tuple(missing), back=back)
        asked = outcome.asked != Exit.DONE
        # after the failure: the restart ends as by a stop signal in its pause
        late = outcome.late_stop is not None and not (outcome.killed or outcome.forced)
        chosen = (
            self._policy(failure, self.plan, self._failures) if late or not asked else GiveUp("")
        )
        # the rank of a lost GPU may wait for it in the driver for ever
        if isinstance(chosen, Restart) and failure.blocked and not chosen.team:
            chosen = GiveUp(failure.blocked)
        if isinstance(chosen, Restart) and "elastic" in self.plan:
            chosen = fewer_ranks.with_machines(chosen, failure, self.plan)
        elif isinstance(chosen, Restart) and line and missing:
            chosen = GiveUp(msg("launcher.restart.unreachable", missing=line.names(missing)))
        # ranks and their logs would not start on a disk that is read-only by now
        if isinstance(chosen, Restart) and not os.access(self.run.own, os.W_OK):
            others = bool(line and "elastic" in self.plan and line.other_disks())
            text = msg("launcher.restart.unwritable", path=self.run.own)
            chosen = GiveUp(text, hand_over=others)
        return failure, GiveUp("") if asked and isinstance(chosen, GiveUp) else chosen

    def give_up(self, reason: str) -> None:
        """The run ends although a restart was requested."""
        self.given_up = (
            msg("launcher.restart.given_up", reason=reason)
            if self.restarts
            else msg("launcher.restart.not_restarted", reason=reason)
        )
        if self.run.own == self.run.path:  # else another machine writes the run
            self.run.event("given_up", text=self.given_up)

    @property
    def attempt(self) -> int:
        """Number of the start of the ranks, from 1."""
        return self._attempt

    def take_over(self, run: rundir.RunDir) -> None:
        """This machine writes the run from now on, with the restarts of the one before it."""
        self.run, self._resumption = run, Resumption(run)
        known = [r for r in rundir.read_records(run.events) if r["event"] == "restart"]
        # Those of this launch, by their numbers: the clocks of the machines may differ.
        latest = self._attempt
        for record in reversed(known):
            if not 1 < record["attempt"] <= latest:
                break
            latest = record["attempt"] - 1
            facts = {k: v for k, v in record.items() if k not in ("time", "event")}
            self.restarts.insert(0, cast("RestartFacts", facts))
            self._texts.insert(0, str(facts["text"]))

    def asked_to_stop(self, pause_s: float = 0.0) -> bool:
        """Between two attempts: has a stop signal arrived, or does one within `pause_s`? Then the
        run ends (`stopped`), and that is logged."""
        number, self._late_stop = self._late_stop, None
        if number is None:
            with self._signals:
                number = self._signals.wait(pause_s)
        if number is not None:
            self.stop(number)
        return number is not None

    def stop(self, number: int) -> int:
        """End the run (`stopped`) because of this stop signal between two attempts, which
        failure.json records; the exit code."""
        hurry()
        self.stopped, name, saved = stop_signals.code(number), stop_signals.name(number), 0
        # only node 0 has the checkpoints
        if self._of_script or self.run.own != self.run.path:
            text = msg("launcher.restart.script_stopped", name=name)
        else:
            saved = self._saved()
            text = msg("launcher.restart.stopped", name=name, saved=saved)
        text += fewer_ranks.at_end(self.plan)
        end_record.write(self.run, self.plan, self.stopped, saved, text)
        log.warning(msg("launcher.end.exit", text=text, code=int(self.stopped)))
        return int(self.stopped)

    def _saved(self) -> int:
        """Step of the newest checkpoint."""
        return manifest.newest_step(self.run.checkpoints)

    def begin(self, chosen: Restart) -> bool:
        """False: the plan cannot be written; it is as before, and the run ends (`given_up`)."""
        before = {name: self.plan["config"].get(name) for name in CURES}
        ranks = self.plan["ranks"]
        try:
            self._use(replan.after(self.plan, chosen))
        except UserError as error:
            self.give_up(str(error))
            return False
        changes = {
            name: [value, self.plan["config"][name]]
            for name, value in before.items()
            if name in self.plan["config"] and value != self.plan["config"][name]
        }
        self._note(self._failures[-1], changes, chosen.team, (ranks, self.plan["ranks"]))
        return True

    def order(self, chosen: Restart) -> Message:
        """The order for the other machines."""
        return restart_order.made(self.plan, chosen, self._attempt + 1)

    def follow(self, order: Message, record: FailureRecord | None) -> bool:
        """On a node other than 0: apply the order of node 0. False: this machine cannot
        (`given_up`)."""
        plan = restart_order.followed(self.plan, order)
        if order.get("team"):  # this machine may have joined later
            self._attempt = int(order["attempt"]) - 1
        try:
            self._use(plan)
        except UserError as error:
            self.give_up(str(error))
            return False
        headline = restart_text.headline(record) if record else str(order["why"])
        first = self._attempt == 1  # without machines that have not connected
        log.warning(headline if first else msg("launcher.restart.with_others", headline=headline))
        return True

    def _use(self, plan: Plan) -> None:
        """Make this the plan of this machine, in place and in its files, for the next attempt.
        Raises UserError, with the plan as it was, if it cannot be written."""
        try:
            if plan is not self.plan:
                replan.apply(self.run, self.plan, plan)
        except OSError as error:
            raise unwritable(self.run.own_plan, error) from error
        self._attempt += 1
        os.environ[ATTEMPT] = str(self._attempt)
        rundir.discard(self.run.failure)
        # That of an earlier start stays: it remains valid if this one ends before its first step.
        if standing.ends_of(self.run, cast("Record", self.plan), self.plan["created"])[0]:
            rundir.discard(self.run.summary)

    def _failure(self, record: FailureRecord, outcome: Outcome) -> Failure:
        saved = self._saved()
        if self._of_script:
            self._snapshot, self._snapshot_text = script_snapshot.look(self.plan)
        return Failure(
            record["cause"],
            record["kind"],
            record["rank"],
            record["status"],
            max(record["step"], saved),  # a rank that had not begun a step is at the checkpoint
            saved,
            record["phase"] or "",
            record["summary"],
            gone=tuple(record.get("lost_ranks", ())),
            suspect_gpu=record.get("suspect_gpu", False),
            worker=record.get("worker", False),
            oom_kill=record.get("oom_kill", False),
            spawns=record.get("spawns", False),
            occupied="occupied" in record,
            blocked=outcome.blocked or record.get("blocked", ""),
            snapshot=self._snapshot,
            printed=script_figures.last_steps(self.run) if self._of_script else (),
        )

    def _report(self, record: FailureRecord, failure: Failure, chosen: Restart) -> None:
        """Log the failure and the restart in one message; failure.json gets it as its advice."""
        retries = self.plan["retries"]["value"]
        text = (
            msg(
                "launcher.restart.script",
                count=restart_text.count(chosen, retries),
                pause=restart_text.pause(chosen),
                changes=restart_text.changes(chosen),
                snapshot=self._snapshot_text,
            )
            if self._of_script
            else restart_text.restart(failure, chosen, retries)
        )
        with contextlib.suppress(OSError):
            rundir.write_json(self.run.failure, {**record, "advice": [text]})
        log.warning(f"{restart_text.headline(record)}; {text}")

    def _note(
        self,
        failure: Failure,
        changes: dict[str, list[Any]],
        team: Team | None,
        ranks: tuple[int, int],
    ) -> None:
        changed = [f"{name} {before} → {after}" for name, (before, after) in changes.items()]
        if team:
            changed.insert(0, fewer_ranks.shown(self.plan, team, ranks))
        facts: RestartFacts = {
            "attempt": self._attempt,
            "cause": failure.cause,
            "kind": failure.kind,
            "rank": failure.rank,
            "step": failure.step,
            "resumes_at": failure.saved,
            "steps_lost": failure.lost,
            "seconds_lost": time.time() - self._failed_at,
            "changes": changes,
            "text": failure.summary
            if self._of_script
            else ", ".join(
                [msg("launcher.restart.event", failure=failure, step=failure.saved), *changed]
            ),
        }
        if team:
            facts["ranks"], facts["lost"] = list(ranks), list(team.lost)
            if team.size is not None:  # whether a script keeps its batch is unknown
                facts["expected_slowdown"] = fewer_ranks.slower(*ranks)
        self._add(facts, failure.summary if self._of_script else str(failure), ranks)

    def _add(self, facts: RestartFacts, text: str, ranks: tuple[int, int]) -> None:
        self.run.event("restart", **facts)
        self.restarts.append(facts)
        self._texts.append(text)
        if not self._of_script:  # no heartbeat
            self._resumption.begin(facts, self._failed_at, ranks)

    def grow(self, team: Team, why: str, text: str) -> bool:
        """A restart without a failure, with more ranks; logged, as `text`. False: the plan cannot
        be written; it is as before, and the run ends."""
        saved, before = self._saved(), self.plan["ranks"]
        self._failed_at = time.time()
        try:
            self._use(replan.with_team(self.plan, team, why))
        except UserError as error:
            self.give_up(str(error))
            log.error(self.given_up)
            return False
        # the ranks have other numbers now: a failure is not compared with an earlier one
        self._failures[-1:] = [replace(last, changed=True) for last in self._failures[-1:]]
        ranks = (before, self.plan["ranks"])
        facts: RestartFacts = {
            "attempt": self._attempt,
            "cause": "none",
            "kind": rundir.ASKED,
            "rank": None,
            "step": saved,
            "resumes_at": saved,
            "steps_lost": 0,
            "seconds_lost": 0.0,
            "changes": {},
            "text": text,
            "ranks": list(ranks),
            "back": list(team.back),
            "expected_slowdown": fewer_ranks.slower(*ranks),
        }
        self._add(facts, why, ranks)
        log.info(text)
        return True

    @property
    def trains(self) -> bool:
        """Whether the ranks have trained since the last restart."""
        return self._resumption.trains

    def look(self) -> None:
        """Called repeatedly while ranks run."""
        self._resumption.look()

    def finish(self) -> str:
        """After the last attempt: a summary of the restarts, which summary.json keeps too; ''
        without any."""
        self.look()
        if not self.restarts and not fewer_ranks.at_end(self.plan):
            return ""
        if known := run_reader.read_summary(self.run.summary):
            more: SummaryRecord = {**known, "restarts": self.restarts}
            if "elastic" in self.plan:
                more["lost"] = self.plan["elastic"]["lost"]
            rundir.keep_json(self.run.summary, more)
        after = restart_text.after(self._texts) if self.restarts else ""
        return after + fewer_ranks.at_end(self.plan)

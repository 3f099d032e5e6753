"""Recovery after a failure: apply and record what training.launcher.recovery_policy decides, and
restart from the last verified checkpoint."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from training.config.fault_spec import ATTEMPT
from training.core import heartbeat, log, manifest, run_reader, rundir, units
from training.core.errors import Exit
from training.core.messages import msg
from training.launcher import script_recovery, script_snapshot, stop_signals
from training.launcher.json_socket import Message
from training.launcher.local_ranks import is_script
from training.launcher.outcome import Outcome
from training.launcher.recovery_policy import (
    BY_ITSELF,
    CURES,
    Failure,
    GiveUp,
    Restart,
    changed_plan,
    remedy,
)
from training.launcher.stop_signals import StopSignals

if TYPE_CHECKING:
    from training.core.contracts.events import RestartFacts
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import FailureRecord

SHOWN = 3  # failures in the last line


class Recovery:
    """For one launch. `signals`: stop signals between two attempts; without it they are noticed in
    a pause only."""

    def __init__(self, run: rundir.RunDir, plan: Plan, signals: StopSignals | None = None) -> None:
        self.run, self.plan, self._signals = run, plan, signals or StopSignals()
        self.restarts: list[RestartFacts] = []  # as in events.jsonl
        self.stopped: Exit | None = None  # asked to stop between two attempts
        # why the last failure was not followed by a restart, where restarts were requested
        self.given_up = ""
        self._failures: list[Failure] = []
        self._failed_at = 0.0
        self._waits = False  # waits for the first step after a restart
        self._of_script = is_script(plan)
        self._policy = script_recovery.remedy if self._of_script else remedy
        self._attempt = 1
        os.environ[ATTEMPT] = "1"

    def again(self, record: FailureRecord, outcome: Outcome) -> bool:
        """On one machine: are the ranks to be started again? If so, the plan (in place, and its
        file) is updated for the next start."""
        chosen = self.choose(record, outcome)
        if chosen is not None:
            self.begin(chosen)
        return chosen is not None

    def choose(self, record: FailureRecord, outcome: Outcome, missing: str = "") -> Restart | None:
        """The restart after a failure, logged; None: the run ends (`stopped`: because of a stop
        signal). `missing`: machines that cannot take part."""
        beats = heartbeat.read_all(self.run.heartbeats)
        self._failed_at = max((b.wall_time for b in beats), default=record["time"])
        failure = self._failure(record)
        chosen = (
            self._policy(failure, self.plan, self._failures)
            if outcome.asked == Exit.DONE
            else GiveUp("")
        )
        if isinstance(chosen, Restart) and outcome.blocked:
            chosen = GiveUp(outcome.blocked)
        if isinstance(chosen, Restart) and missing:
            chosen = GiveUp(msg("launcher.restart.unreachable", missing=missing))
        if isinstance(chosen, Restart) and failure.saved and (apart := self._nodes_apart()):
            chosen = GiveUp(msg("launcher.restart.no_shared_disk", nodes=apart))
        if isinstance(chosen, GiveUp):
            if chosen.reason:
                self.given_up = (
                    msg("launcher.restart.given_up", reason=chosen.reason)
                    if self._failures
                    else msg("launcher.restart.not_restarted", reason=chosen.reason)
                )
                self.run.event("given_up", text=self.given_up)
            return None
        self._failures.append(replace(failure, changed=bool(chosen.changes)))
        self._report(record, failure, chosen)
        return None if self.asked_to_stop(chosen.pause_s) else chosen

    def asked_to_stop(self, pause_s: float = 0.0) -> bool:
        """Between two attempts: has a stop signal arrived, or does one within `pause_s`? Then the
        run ends (`stopped`), and that is logged."""
        with self._signals:
            number = self._signals.wait(pause_s)
        if number is None:
            return False
        self.run.failure.unlink(missing_ok=True)  # the run ended for another reason
        self.stopped = stop_signals.code(number)
        name = stop_signals.name(number)
        log.warning(
            msg("launcher.restart.script_stopped", name=name, code=int(self.stopped))
            if self._of_script
            else msg(
                "launcher.restart.stopped", name=name, saved=self._saved(), code=int(self.stopped)
            )
        )
        return True

    def _saved(self) -> int:
        """Step of the newest checkpoint."""
        return int((manifest.newest(self.run.checkpoints) or {"step": 0})["step"])

    def _nodes_apart(self) -> str:
        """Machines whose plan is not next to this one's: they have another disk."""
        plans = {
            n: rundir.read_json(rundir.RunDir(self.run.path, n).own_plan)
            for n in range(1, self.plan["place"]["nnodes"])
        }
        return ", ".join(
            msg("launcher.node", node=n)
            for n, plan in plans.items()
            if (plan or {}).get("launch") != self.plan["launch"]
        )

    def begin(self, chosen: Restart) -> None:
        changes = {
            name: [self.plan["config"][name], value] for name, value in chosen.changes.items()
        }
        self._change(chosen.changes, chosen.why)
        self._note(self._failures[-1], changes)

    def follow(self, order: Message, record: FailureRecord) -> None:
        """On a node other than 0: apply the order of node 0. It comes from a network: only fields
        that may change are changed."""
        self._change(
            {name: order["changes"][name] for name in CURES if name in order["changes"]},
            str(order["why"]),
        )
        log.warning(msg("launcher.restart.with_others", headline=_headline(record)))

    def _change(self, changes: FieldValues, why: str) -> None:
        """Update the plan of this machine, in place and in its files, for the next attempt."""
        self._attempt += 1
        os.environ[ATTEMPT] = str(self._attempt)
        self.run.failure.unlink(missing_ok=True)
        if changes:
            self.plan.update(changed_plan(self.plan, changes, why))
            # that of node 0, where all machines share a disk
            seen = run_reader.read_plan(self.run.plan) or self.plan
            for path in (
                {self.run.own_plan, self.run.plan}
                if seen["place"] == self.plan["place"]
                else {self.run.own_plan}
            ):
                rundir.write_json(path, self.plan)

    def _failure(self, record: FailureRecord) -> Failure:
        saved = self._saved()
        return Failure(
            record["cause"],
            record["kind"],
            record["rank"],
            record["status"],
            max(record["step"], saved),  # a rank that had not begun a step is at the checkpoint
            saved,
            record["phase"] or "",
            record["summary"],
        )

    def _report(self, record: FailureRecord, failure: Failure, chosen: Restart) -> None:
        """Log the failure and the restart in one message; failure.json gets it as its advice."""
        count = (
            msg(
                "launcher.restart.count",
                number=chosen.number,
                retries=self.plan["retries"]["value"],
            )
            if chosen.number
            else ""
        )
        origin = (
            msg("launcher.restart.from_step", step=failure.saved)
            if failure.saved
            else msg("launcher.restart.from_beginning")
        )
        pause = msg("launcher.restart.pause", pause_s=chosen.pause_s) if chosen.pause_s else ""
        changes = msg("launcher.restart.changes", label=chosen.label) if chosen.label else ""
        text = (
            msg("launcher.restart.script", count=count, pause=pause, snapshot=self._snapshot())
            if self._of_script
            else msg(
                "launcher.restart.text",
                origin=origin,
                count=count,
                pause=pause,
                steps=_steps(failure.lost),
                changes=changes,
            )
        )
        with contextlib.suppress(OSError):
            rundir.write_json(self.run.failure, {**record, "advice": [text]})
        log.warning(f"{_headline(record)}; {text}")

    def _snapshot(self) -> str:
        """What the script has saved in this launch, as far as it is recognised."""
        command, script = self.plan["command"], self.plan["script"]
        found = script_snapshot.newest(command["cwd"], script["args"], self.plan["created"])
        return str(found) if found else msg("launcher.snapshot.none")

    def _note(self, failure: Failure, changes: dict[str, list[Any]]) -> None:
        changed = [f"{name} {before} → {after}" for name, (before, after) in changes.items()]
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
        self.run.event("restart", **facts)
        self.restarts.append(facts)
        self._waits = not self._of_script  # no heartbeat

    def look(self) -> None:
        """Called repeatedly while ranks run: records when they train again after a restart."""
        beat = heartbeat.read(self.run.heartbeat(0)) if self._waits else None
        if (
            beat is None
            or not beat.first_step
            or (beat.step == beat.first_step and beat.phase in heartbeat.STEP_PHASES)
        ):
            return
        self._waits = False
        seconds = beat.wall_time - self._failed_at
        log.info(msg("launcher.restart.resumed", seconds=seconds))
        self.run.event("recovered", attempt=self._attempt, step=beat.first_step, seconds=seconds)

    def finish(self) -> str:
        """After the last attempt: a summary of the restarts, which summary.json keeps too; ''
        without any."""
        self.look()
        if not self.restarts:
            return ""
        if known := run_reader.read_summary(self.run.summary):
            rundir.write_json(self.run.summary, {**known, "restarts": self.restarts})
        texts = (f.summary if self._of_script else str(f) for f in self._failures)
        count, kinds = len(self.restarts), Counter(texts)
        shown = [
            msg("launcher.restart.times", text=text, times=times) if times > 1 else text
            for text, times in kinds.items()
        ]
        restarts, failures = units.plural(count, "restart"), "; ".join(shown[-SHOWN:])
        return (
            msg("launcher.restart.after_last", restarts=restarts, failures=failures)
            if len(kinds) > SHOWN
            else msg("launcher.restart.after", restarts=restarts, failures=failures)
        )


def _headline(record: FailureRecord) -> str:
    """A failure in one line: rank, phase, cause, place."""
    cause = "" if record["cause"] in BY_ITSELF else f"{record['cause']}: "
    where = msg("launcher.failure.at", where=record["where"]) if record["where"] else ""
    what = f"{cause}{record['summary']}{where}"
    if record["rank"] is None:
        return what
    node = msg("launcher.failure.on_node", node=record["node"]) if "node" in record else ""
    phase = msg("launcher.failure.in_phase", phase=record["phase"]) if record["phase"] else ""
    return msg("launcher.failure.headline", rank=record["rank"], node=node, phase=phase, what=what)


def _steps(count: int) -> str:
    return units.plural(count, "step")

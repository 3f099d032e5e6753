"""Everything about a run at one moment as one plain dict, which --json prints and every screen
shows."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from training.core import last_resume, rundir, standing
from training.core.jsonl import (
    Record,
    Tail,
    dig,
    items,
    mtime,
    number,
    read_object,
    text,
    whole,
)
from training.core.messages import msg
from training.core.tail import tail
from training.monitor import alerts, host_stats, launches, rank_states, run_figures
from training.monitor.history import History
from training.monitor.run_figures import CURVE_POINTS
from training.monitor.run_status import (
    ENDED,
    FAILED,
    FINISHED,
    RUNNING,
    STARTING,
    STOPPED,
    RunEvidence,
    ended_at,
    judge,
    script_of,
)
from training.monitor.script_ranks import ScriptRanks
from training.plan.script_words import RUN, WATCH, WATCHING

if TYPE_CHECKING:
    from training.core.contracts.kinds import RunStatus
    from training.core.contracts.state import FiguresState, RunsState, RunState, WarningState
    from training.core.last_resume import LastResume
    from training.diagnose.log_parsers.log_metrics import LogMetrics, ScriptFigures

SCHEMA_VERSION = 2
GPU_PATIENCE_S = 2.0
LOG_LINES, WARNINGS = 20, 20
NOTABLE = ("warning", "restart", "pace", "verdict", "takeover", "given_up")  # kinds of events


class StateSource(Protocol):
    """Source of states for a screen: a run, a log, or all runs. `patience_s`: longest wait for the
    GPU driver."""

    def read(self, patience_s: float = GPU_PATIENCE_S) -> RunState | RunsState: ...


class RunWatch:
    """Reads one run repeatedly; each read covers only what is new since the last one."""

    def __init__(
        self, run: rundir.RunDir, log: Path | None = None, shared: host_stats.Shared | None = None
    ) -> None:
        self.run, self.log = run, log
        self._history, self._events = History(run.metrics), Tail(run.events)
        self._ranks, self._script_ranks = rank_states.RankStates(run), ScriptRanks(run)
        self._warnings: deque[WarningState] = deque(maxlen=WARNINGS)
        self._restarts: list[float] = []
        self._warned = 0
        self._first_event: float | None = None  # unix s
        self._total: int | None = None  # steps, from the event of the last start
        self._epochs: int | None = None  # from the same event
        self._resumed: LastResume | None = None
        self._clock: tuple[float, launches.RunClock] | None = None  # of the launch at this time
        self._script: ScriptFigures | None = None
        self._machine = shared or host_stats.Shared()
        self.plan: Record | None = None  # as of the last read, like the next
        self.elsewhere: str | None = None  # another machine that started the run

    def read_all(self) -> RunState:
        """Like `read`, for a single read: searches very long files completely."""
        self._history.update()
        self._history.complete()
        return self.read()

    def read(self, patience_s: float = GPU_PATIENCE_S) -> RunState:
        """State of the run now. `patience_s`: longest wait for the GPU driver."""
        now, run = time.time(), self.run
        plan = self.plan = read_object(standing.plan_file(run))
        self._machine.ask(_planned(plan))
        since = number(dig(plan, "created")) or mtime(run.plan) or 0.0
        # Processes first: whatever a process wrote before it ended is then in the files read below.
        supervisor = standing.supervisor_of(run, plan or {})
        self.elsewhere = standing.other_host(plan, supervisor)
        ranks = self._ranks.read(plan, supervisor, since)
        listed = rank_states.processes(supervisor)
        alive = rank_states.supervised(run, plan, supervisor)
        self._history.update()
        self._read_events()
        self._history.discard(self._resumed)
        printed = self._printed(plan)

        since = max([since, *self._restarts[-1:]])
        summary, failure = standing.ends_of(run, plan or {}, since)
        checkpoint = run_figures.newest_checkpoint(run)
        evidence = RunEvidence(
            run=run,
            plan=plan,
            supervisor=supervisor,
            ranks=ranks,
            since=since,
            last=self._history.last,
            summary=summary,
            failure=failure,
            alive=any(alive),
            resumable=checkpoint is not None,
            printed=printed is not None,
        )
        state, reason = judge(evidence)
        self._ranks.mark_late(ranks, plan, active=state in (STARTING, RUNNING))
        rank_states.add_recorded(ranks, self._history)
        watched = text(dig(plan, "launcher", "value")) == WATCH  # its plan has no number of ranks
        script = text(dig(plan, "command", "script"))
        started = number(dig(plan, "created")) or number(supervisor.get("started"))
        end = failure if state == FAILED or not summary else summary
        ended = ended_at(state, evidence, end) if state in ENDED else None
        log = self.log or standing.log_file(run, plan)
        # not those of another machine
        own = (whole(known.get("pid")) for known in listed[: len(alive)])
        family = {p for p in (*own, *(r["pid"] for r in ranks if r["alive"] is not None)) if p}
        gpus, host = self._machine.answer(patience_s, run.path)
        on_gpus = host_stats.gpu_records(gpus, family, _planned(plan))
        if script_of(plan):
            self._script_ranks.add(ranks, printed, on_gpus)
        took = self._run_clock(plan, started).seconds(ended or now) if started else None
        seen: RunState = {
            "schema_version": SCHEMA_VERSION,
            "time_unix_s": now,
            "run": {
                "kind": "run",
                "source": printed.source if printed else None,
                "name": run.name,
                "dir": str(run.path),
                "script": WATCHING if watched and script == RUN else script,
                "program": script_of(plan),
                "task": text(dig(plan, "task", "name")),
                "ranks": (not watched and whole(dig(plan, "ranks"))) or len(ranks) or None,
                "device": text(dig(plan, "device", "value")),
                "precision": text(dig(plan, "precision", "value")),
                "state": state,
                "reason": reason,
                "exit_code": whole(dig(end, "exit_code")) if ended else None,
                "restarts": len(self._restarts),
                "warnings": self._warned,
                "first_event_unix_s": self._first_event,
                "started_unix_s": started,
                "ended_unix_s": ended,
                "supervisor_pid": whole(supervisor.get("pid")),
                "supervisor_alive": alive[0] if alive else None,
            },
            **(
                self._of_script(printed, state, took)
                if printed
                else self._of_records(plan, state, since, took, summary)
            ),
            "ranks": ranks,
            "gpus": on_gpus,
            "gpus_reason": gpus.reason,
            "system": host,
            # the report has those of earlier launches
            "warnings": [w for w in self._warnings if (w["time_unix_s"] or now) >= (started or 0)],
            "log": {
                "file": str(log) if log else None,
                "last_lines": tail(log, LOG_LINES) if log else [],
            },
            "checkpoint": checkpoint,
            "summary": summary if end is summary and state in (FINISHED, STOPPED) else None,
            "failure": failure if state == FAILED else None,
            "alerts": [],
        }
        if items(dig(plan, "elastic", "lost")) and (
            all_ranks := whole(dig(plan, "elastic", "ranks"))
        ):
            seen["run"]["planned_ranks"] = all_ranks
        if (seen["training"]["last_step_unix_s"] or since) < since:
            seen["training"]["last_step_unix_s"] = None  # of an earlier start
        if alerts.no_step_s(seen) is not None:
            seen["progress"]["eta_s"] = None  # unknown while no step completes
        seen["alerts"] = alerts.active_alerts(seen)
        return seen

    def _run_clock(self, plan: Record | None, launched: float) -> launches.RunClock:
        """Made again only after new events, since it reads all of them."""
        if self._clock is None or self._clock[0] != launched:
            self._clock = launched, launches.run_clock(self.run, plan, launched)
        return self._clock[1]

    def _printed(self, plan: Record | None) -> LogMetrics | None:
        """Figures that a user script has printed; None for a task, which keeps records."""
        if script_of(plan) is None:
            return None
        if self._script is None:
            from training.diagnose.log_parsers.log_metrics import ScriptFigures

            self._script = ScriptFigures(self.run.ranks)
        return self._script.read()

    def _of_script(self, printed: LogMetrics, state: RunStatus, took: float | None) -> FiguresState:
        progress = printed.progress(running=state == RUNNING)
        return {
            "progress": progress
            if progress["scope"] == "epoch"
            else {**progress, "elapsed_s": took},
            "training": printed.training(),
            "loss_curve": printed.loss_curve(CURVE_POINTS),
            "speed_curve": {"points": []},
        }

    def _of_records(
        self,
        plan: Record | None,
        state: RunStatus,
        since: float,
        took: float | None,
        summary: Record | None,
    ) -> FiguresState:
        loss_curve, speed_curve = run_figures.curves(self._history)
        return {
            "progress": run_figures.progress(
                self.run,
                self._history,
                plan,
                state,
                since=since,
                elapsed_s=took,
                summary=summary,
                planned=(self._total, self._epochs),
            ),
            "training": run_figures.training(self.run, self._history, since),
            "loss_curve": loss_curve,
            "speed_curve": speed_curve,
        }

    def _read_events(self) -> None:
        events, fresh = self._events.read()
        if fresh:
            self._warnings.clear()
            self._restarts.clear()
            self._warned, self._total, self._epochs, self._resumed = 0, None, None, None
            self._first_event = None
        if events or fresh:
            self._clock = None
        for event in events:
            kind, message = event.get("event"), text(event.get("text"))
            self._first_event = self._first_event or number(event.get("time"))
            if kind == "restart":
                self._restarts.append(number(event.get("time")) or 0.0)
                message = message or msg(
                    "monitor.event.restarted",
                    cause=text(event.get("cause")) or msg("monitor.event.a_failure"),
                    step=event.get("step"),
                )
            self._warned += kind == "warning"
            self._resumed = last_resume.after(self._resumed, event)
            if kind == "start" and "total_steps" in event:  # 0: no limit, as after a resume
                self._total = whole(event["total_steps"]) or None
                self._epochs = whole(event.get("epochs")) or None
            if kind in NOTABLE or (kind == "recovered" and message):
                self._warnings.append(
                    {"time_unix_s": number(event.get("time")), "text": message or str(kind)}
                )


def _planned(plan: Record | None) -> set[str]:
    """UUIDs of the GPUs in the plan."""
    return {uuid for g in items(dig(plan, "gpus")) if (uuid := text(dig(g, "uuid")))}

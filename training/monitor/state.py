"""Everything about a run at one moment, as one plain dict: the object that --json prints and every
screen shows."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from training.core import heartbeat, metric_units, rundir, standing
from training.core.course import median, percentile
from training.core.errors import UserError
from training.core.jsonl import (
    Record,
    Tail,
    dig,
    items,
    last_lines,
    mtime,
    number,
    read_object,
    text,
    whole,
)
from training.core.next_command import next_command
from training.core.run_reader import as_plan
from training.monitor import alerts, host_stats
from training.monitor.history import History

if TYPE_CHECKING:
    from training.core.contracts.kinds import RunStatus
    from training.core.contracts.state import (
        CheckpointState,
        FiguresState,
        ProgressState,
        RankState,
        RunsState,
        RunState,
        TrainingState,
        WarningState,
    )
    from training.diagnose.log_parsers.log_metrics import LogMetrics, ScriptFigures

SCHEMA_VERSION = 2
STARTING: Final = "starting"
RUNNING: Final = "running"
FINISHED: Final = "finished"
STOPPED: Final = "stopped"
FAILED: Final = "failed"
DIED: Final = "died"
ENDED = (FINISHED, STOPPED, FAILED, DIED)
STARTING_S = 60.0  # a start without any sign of a process for longer than this gets a word
LATE_S = 30.0  # a heartbeat older than this is marked
GPU_PATIENCE_S = 2.0
CURVE_POINTS, LOG_LINES, WARNINGS = 240, 20, 20


class StateSource(Protocol):
    """What can be looked at again and again: a run, a log, all runs. `patience_s`: how long the GPU
    driver may keep it waiting."""

    def read(self, patience_s: float = GPU_PATIENCE_S) -> RunState | RunsState: ...


class RunWatch:
    """Looks at one run again and again; keeps what was read, so that a look costs only what is
    new."""

    def __init__(
        self, run: rundir.RunDir, log: Path | None = None, shared: host_stats.Shared | None = None
    ) -> None:
        self.run, self.log = run, log
        self._history, self._events = History(run.metrics), Tail(run.events)
        self._warnings: deque[WarningState] = deque(maxlen=WARNINGS)
        self._restarts: list[float] = []
        self._beats: dict[int, heartbeat.HeartbeatRecord] = {}  # the last of each rank
        self._warned = 0
        self._total: int | None = None  # steps, as the newest start has said
        self._epochs: int | None = None  # the same
        self._script: ScriptFigures | None = None
        self._machine = shared or host_stats.Shared()
        self.plan: Record | None = None  # as of the last look

    def read_all(self) -> RunState:
        """The only look: very long files are searched to their end."""
        self._history.update()
        self._history.complete()
        return self.read()

    def read(self, patience_s: float = GPU_PATIENCE_S) -> RunState:
        """One look; `patience_s`: how long the GPU driver may keep it waiting."""
        now, run = time.time(), self.run
        self._machine.ask()
        plan = self.plan = read_object(standing.plan_file(run))
        since = number(dig(plan, "created")) or mtime(run.plan) or 0.0
        # Processes first: what they wrote before they ended is then certainly in the files that are
        # read below.
        supervisor = read_object(run.supervisor) or {}
        if (number(supervisor.get("started")) or 0.0) < since:  # of an earlier start of this run
            supervisor = {}
        ranks = self._ranks(plan, supervisor, since)
        # Of torchrun's ranks it knows none, only torchrun: an entry without a rank.
        listed = [
            whole(supervisor.get("pid")),
            *(whole(dig(r, "pid")) for r in items(supervisor.get("ranks"))),
        ]
        alive = [host_stats.alive(pid, mtime(run.supervisor) or now) for pid in listed]
        self._history.update()
        self._read_events()
        told = self._told(plan)

        since = max([since, *self._restarts[-1:]])
        summary, failure = (
            read_object(p) if rundir.written_since(p, since) else None
            for p in (run.summary, run.failure)
        )
        state, reason = self._judge(
            plan, supervisor, ranks, any(alive), since, (summary, failure), told is not None
        )
        for rank in ranks:
            rank["late"] = (
                state in (STARTING, RUNNING)
                and (rank["beat_age_s"] or 0) > LATE_S
                and rank["phase"] != heartbeat.FINISHED
            )
        started = number(dig(plan, "created")) or number(supervisor.get("started"))
        end = failure if state == FAILED or (state == STOPPED and not summary) else summary
        ended = self._end(state, end, ranks) if state in ENDED else None
        log = self.log or (Path(name) if (name := text(dig(plan, "log_file"))) else None)
        family = {pid for pid in (*listed, *(r["pid"] for r in ranks)) if pid}
        gpus, host = self._machine.answer(patience_s, run.path)
        planned = {uuid for g in items(dig(plan, "gpus")) if (uuid := text(dig(g, "uuid")))}
        self._add_shares(ranks)
        took = (ended or now) - started if started else None
        seen: RunState = {
            "schema_version": SCHEMA_VERSION,
            "time_unix_s": now,
            "run": {
                "kind": "run",
                "source": told.source if told else None,
                "name": run.name,
                "dir": str(run.path),
                "script": text(dig(plan, "command", "script")),
                "program": script_of(plan),
                "task": text(dig(plan, "task", "name")),
                "ranks": whole(dig(plan, "ranks")) or len(ranks) or None,
                "device": text(dig(plan, "device", "value")),
                "precision": text(dig(plan, "precision", "value")),
                "state": state,
                "reason": reason,
                "exit_code": whole(dig(end, "exit_code")) if ended else None,
                "restarts": len(self._restarts),
                "warnings": self._warned,
                "started_unix_s": started,
                "ended_unix_s": ended,
                "supervisor_pid": whole(supervisor.get("pid")),
                "supervisor_alive": alive[0] if supervisor else None,
            },
            **(
                self._of_script(told, state, took)
                if told
                else self._of_records(plan, state, since, took, summary)
            ),
            "ranks": ranks,
            "gpus": host_stats.gpu_records(gpus, family, planned),
            "gpus_reason": gpus.reason,
            "system": host,
            "warnings": list(self._warnings),
            "log": {"file": str(log) if log else None, "last_lines": last_lines(log, LOG_LINES)},
            "checkpoint": self._checkpoint(),
            "summary": summary if end is summary and state in (FINISHED, STOPPED) else None,
            "failure": failure if state == FAILED else None,
            "alerts": [],
        }
        if alerts.no_step_s(seen) is not None:
            seen["progress"]["eta_s"] = None  # nobody knows
        seen["alerts"] = alerts.active_alerts(seen)
        return seen

    def _told(self, plan: Record | None) -> LogMetrics | None:
        """What somebody's own script has printed of its training; a task of ours keeps records."""
        if script_of(plan) is None:
            return None
        if self._script is None:
            from training.diagnose.log_parsers.log_metrics import ScriptFigures

            self._script = ScriptFigures(self.run.ranks)
        return self._script.read()

    def _of_script(self, told: LogMetrics, state: RunStatus, took: float | None) -> FiguresState:
        progress = told.progress(running=state == RUNNING)
        return {
            "progress": progress
            if progress["scope"] == "epoch"
            else {**progress, "elapsed_s": took},
            "training": told.training(),
            "loss_curve": told.loss_curve(CURVE_POINTS),
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
        speed = metric_units.SPEEDS[
            metric_units.as_samples(metric_units.counted(self._history.last))
        ]
        return {
            "progress": self._progress(plan, state, since, took, summary),
            "training": self._training(since),
            "loss_curve": {
                "points": [{"step": s, "loss": v} for s, v in self._history.curve(CURVE_POINTS)]
            },
            "speed_curve": {
                "points": [
                    {"step": s, speed: v} for s, v in self._history.speed_curve(CURVE_POINTS)
                ]
            },
        }

    def _add_shares(self, ranks: list[RankState]) -> None:
        """What rank 0 recorded of every rank."""
        own, memory = self._history.of_ranks("compute_ms"), self._history.of_ranks("memory_bytes")
        for rank in ranks:
            number = rank["rank"]
            rank["compute_ms_median"] = own[number] if number < len(own) else None
            rank["memory_bytes"] = memory[number] if number < len(memory) else None

    def _read_events(self) -> None:
        events, fresh = self._events.read()
        if fresh:
            self._warnings.clear()
            self._restarts.clear()
            self._warned, self._total, self._epochs = 0, None, None
        for event in events:
            kind, said = event.get("event"), text(event.get("text"))
            if kind == "restart":
                self._restarts.append(number(event.get("time")) or 0.0)
                said = (
                    said
                    or f"restarted after {text(event.get('cause')) or 'a failure'} at step "
                    f"{event.get('step')}"
                )
            self._warned += kind == "warning"
            self._total = whole(event.get("total_steps")) or self._total
            self._epochs = whole(event.get("epochs")) or self._epochs
            if kind in ("warning", "restart", "verdict", "given_up"):
                self._warnings.append(
                    {"time_unix_s": number(event.get("time")), "text": said or str(kind)}
                )

    def _ranks(self, plan: Record | None, supervisor: Record, since: float) -> list[RankState]:
        """One entry a rank, also for those that have not said anything yet; beats of an earlier
        start do not count."""
        # one that cannot be read now is not absent
        self._beats |= {b.rank: b for b in heartbeat.read_all(self.run.heartbeats)}
        beats = {rank: beat for rank, beat in self._beats.items() if beat.wall_time >= since}
        pids = {whole(dig(r, "rank")): whole(dig(r, "pid")) for r in items(supervisor.get("ranks"))}
        numbers = {
            *range(min(whole(dig(plan, "ranks")) or 0, 4096)),
            *beats,
            *(r for r in pids if r is not None),
        }
        out: list[RankState] = []
        for rank in sorted(numbers):
            beat, pid = beats.get(rank), pids.get(rank)
            if beat and pid is None:
                pid = beat.pid
            seen = mtime(self.run.supervisor) if rank in pids else beat.wall_time if beat else None
            living = host_stats.alive(pid, seen or time.time())
            age = None
            # the monotonic clock is that of one boot: of no use for a run before the last one
            if beat:
                age = (
                    beat.age_s
                    if living and beat.monotonic_ns <= time.monotonic_ns()
                    else max(0.0, time.time() - beat.wall_time)
                )
            out.append(
                {
                    "rank": rank,
                    "pid": pid,
                    "alive": living if pid else None,
                    "epoch": beat.epoch if beat else None,
                    "step": beat.step if beat else None,
                    "phase": beat.phase if beat else None,
                    "doing": str(beat) if beat else None,
                    "beat_age_s": age,
                    "beat_unix_s": beat.wall_time if beat else None,
                }
            )
        return out

    def _judge(
        self,
        plan: Record | None,
        supervisor: Record,
        ranks: list[RankState],
        living: bool,
        since: float,
        ends: tuple[Record | None, Record | None],
        told: bool,
    ) -> tuple[RunStatus, str | None]:
        """The state, and why where that is not plain. `told`: a script has printed figures."""
        summary, failure = ends
        if failure and (
            not summary or (mtime(self.run.failure) or 0) >= (mtime(self.run.summary) or 0)
        ):
            if failure.get("kind") == rundir.ASKED:
                return STOPPED, text(failure.get("summary"))
            where = f" on rank {failure['rank']}" if whole(failure.get("rank")) is not None else ""
            return (
                FAILED,
                f"{text(failure.get('cause')) or 'unknown cause'}{where}: "
                f"{text(failure.get('summary')) or 'no summary'}",
            )
        if summary:
            stopped = text(summary.get("status")) == STOPPED
            return (STOPPED, f"on request{self._go_on(plan)}") if stopped else (FINISHED, None)
        if not self.run.path.is_dir():
            return DIED, "the run directory is gone"
        stepped = (number(self._history.last.get("time")) or -1.0) >= since
        if living or any(r["alive"] for r in ranks):
            # A script has no heartbeat: it runs when it is there.
            begun = (
                stepped or told or any(r["alive"] if script_of(plan) else r["step"] for r in ranks)
            )
            return (
                RUNNING if begun else STARTING,
                None if plan else "plan.json is missing or not whole",
            )
        if supervisor or any(r["pid"] for r in ranks):
            again = self._go_on(plan) if self._checkpoint() else ""
            who = (
                f"the supervisor (pid {supervisor.get('pid')}) and every rank are"
                if supervisor
                else "every rank is"
            )
            return DIED, f"{who} gone, and nothing says how the run ended{again}"
        if plan is None or stepped:
            return DIED, "nothing says which process it is" + (
                "" if plan else "; plan.json is missing or not whole"
            )
        # Preparing a large corpus takes hours before there is any rank, so silence proves nothing.
        return (
            STARTING,
            "no rank yet: preparing the data, or it never started (see the log)"
            if time.time() - since > STARTING_S
            else None,
        )

    def _go_on(self, plan: Record | None) -> str:
        """The command that resumes it; a script's state is its own."""
        try:
            return (
                f"; to resume: {next_command(as_plan(plan, self.run.plan), self.run)}"
                if plan and script_of(plan) is None
                else ""
            )
        except (
            KeyError,
            TypeError,
            AttributeError,
            UserError,
        ):
            # a plan that is not whole, or of a later version
            return ""

    def _end(self, state: RunStatus, end: Record | None, ranks: list[RankState]) -> float | None:
        """When an ended run ended; of a run that died, its last sign of life. `end`: its last file,
        which may be a copy."""
        if state != DIED:
            of_failure = state == FAILED or not self.run.summary.exists()
            return number(dig(end, "time")) or mtime(
                self.run.failure if of_failure else self.run.summary
            )
        signs = [
            number(self._history.last.get("time")),
            mtime(self.run.supervisor),
            *(r["beat_unix_s"] for r in ranks),
        ]
        return max((s for s in signs if s), default=None)

    def _progress(
        self,
        plan: Record | None,
        state: RunStatus,
        since: float,
        elapsed: float | None,
        summary: Record | None,
    ) -> ProgressState:
        data = read_object(standing.data_file(self.run))
        total = (
            whole(dig(data, "total_steps"))
            or self._total
            or whole(dig(plan, "config", "num_iterations"))
            or None
        )
        step = whole(self._history.last.get("step")) or 0
        if state == FINISHED and whole(dig(summary, "steps")) == step:
            total = step  # a resume that came to nothing had planned more
        pace = self._history.seconds_per_step(since)
        return {
            "step": None if script_of(plan) else step,
            "total_steps": total,
            "percent": min(100.0, 100 * step / total) if total else None,
            "epoch": whole(self._history.last.get("epoch")),
            "epochs": whole(dig(data, "epochs")) or self._epochs,
            "elapsed_s": elapsed if elapsed is not None and elapsed >= 0 else None,
            "eta_s": (total - step) * pace
            if total and step < total and pace is not None and state == RUNNING
            else None,
        }

    def _training(self, since: float) -> TrainingState:
        history, last = self._history, self._history.last
        unit = metric_units.counted(last)
        kind = metric_units.as_samples(unit)
        count, speed = (
            metric_units.so_far(last),
            median(history.of_last_steps(f"{unit}{metric_units.PER_S}")),
        )
        tokens, evaluation = kind == metric_units.TOKENS, history.evaluation()
        loss, times = number(last.get("loss")), history.of_last_steps("step_ms")
        return {
            "loss": loss,
            "loss_unit": metric_units.loss_unit(last),
            "bytes_per_token": number(dig(read_object(self.run.data), "bytes_per_token")),
            "loss_is_finite": None if loss is None else math.isfinite(loss),
            "eval_name": evaluation["eval_name"],
            "eval_unit": evaluation["eval_unit"],
            "eval_last": evaluation["eval_last"],
            "eval_best": evaluation["eval_best"],
            "eval_best_step": evaluation["eval_best_step"],
            "lr": number(last.get("lr")),
            "grad_norm": number(last.get("grad_norm")),
            "unit": unit,
            "tokens": count if tokens else None,
            "samples": None if tokens else count,
            "tokens_per_s": speed if tokens else None,
            "samples_per_s": None if tokens else speed,
            "mfu": median(history.of_last_steps("mfu")),
            "memory_bytes": max(
                (m for m in history.of_ranks("memory_bytes") if m is not None), default=None
            ),
            "step_ms_median": median(times),
            "step_ms_p95": percentile(times, 95),
            "steps_measured": history.measured(since),
            "last_step_unix_s": number(last.get("time")),
        }

    def _checkpoint(self) -> CheckpointState | None:
        """The newest one: folders named step_* are whole."""
        found = max(self.run.checkpoints.glob("step_*"), default=None)
        if found is None:
            return None
        step = found.name.removeprefix("step_")
        return {
            "path": str(found),
            "step": int(step) if step.isdecimal() else None,
            "time_unix_s": mtime(found),
        }


def script_of(plan: Mapping[str, object] | None) -> str | None:
    """Somebody's own, under our launcher; None for a task of ours."""
    return text(dig(plan, "script", "path"))


def finite(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not know: null."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

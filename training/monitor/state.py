"""Everything about a run at one moment, as one plain dict: the object that --json prints and every screen shows."""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path
from typing import Any

from training import heartbeat, rundir
from training.monitor import machine
from training.monitor.history import History, median, percentile
from training.monitor.records import Tail, dig, items, last_lines, number, read_object, text, whole

SCHEMA_VERSION = 1
STARTING, RUNNING, FINISHED, FAILED, DIED = "starting", "running", "finished", "failed", "died"
ENDED = (FINISHED, FAILED, DIED)
STARTING_S = 60.0  # a start without any sign of a process for longer than this gets a word
LATE_S = 30.0  # a heartbeat older than this is marked
MTIME_SLACK_S = 0.05  # file times come from a coarser clock than time.time()
GPU_PATIENCE_S = 2.0
CURVE_POINTS, LOG_LINES, WARNINGS = 240, 20, 20
State = dict[str, Any]


class Watch:
    """Looks at one run again and again; keeps what was read, so that a look costs only what is new."""

    def __init__(self, run: rundir.RunDir, log: Path | None = None) -> None:
        self.run, self.log = run, log
        self._history, self._events = History(run.metrics), Tail(run.events)
        self._warnings: deque[dict[str, Any]] = deque(maxlen=WARNINGS)
        self._restarts: list[float] = []
        self._host, self._gpus = machine.Host(), machine.Gpus()

    def read(self, patience_s: float = GPU_PATIENCE_S) -> State:
        """One look; `patience_s`: how long the GPU driver may keep it waiting."""
        now, run = time.time(), self.run
        self._gpus.ask()
        plan = read_object(run.plan)
        since = number(dig(plan, "created")) or _mtime(run.plan) or 0.0
        # Processes first: what they wrote before they ended is then certainly in the files that are read below.
        supervisor = read_object(run.supervisor) or {}
        if (number(supervisor.get("started")) or 0.0) < since:  # of an earlier start of this run
            supervisor = {}
        ranks = self._ranks(plan, supervisor, since)
        # Of torchrun's ranks it knows none, only torchrun: an entry without a rank.
        listed = [whole(supervisor.get("pid")), *(whole(dig(r, "pid")) for r in items(supervisor.get("ranks")))]
        alive = [machine.alive(pid, _mtime(run.supervisor) or now) for pid in listed]
        self._history.update()
        self._read_events()

        since = max([since, *self._restarts[-1:]])
        summary, failure = (read_object(p) if (_mtime(p) or -1.0) + MTIME_SLACK_S >= since else None for p in (run.summary, run.failure))
        state, reason = self._judge(plan, supervisor, ranks, any(alive), since, (summary, failure))
        for rank in ranks:
            rank["late"] = state in (STARTING, RUNNING) and (rank["beat_age_s"] or 0) > LATE_S and rank["phase"] != heartbeat.FINISHED
        started = number(dig(plan, "created")) or number(supervisor.get("started"))
        ended = self._end(state, ranks) if state in ENDED else None
        log = self.log or (Path(name) if (name := text(dig(plan, "log_file"))) else None)
        family = {pid for pid in (*listed, *(r["pid"] for r in ranks)) if pid}
        gpus = self._gpus.answer(patience_s)
        planned = {uuid for g in items(dig(plan, "gpus")) if (uuid := text(dig(g, "uuid")))}
        return {
            "schema_version": SCHEMA_VERSION,
            "time_unix_s": now,
            "run": {
                "name": text(dig(plan, "run_name")) or run.name,
                "dir": str(run.path),
                "script": text(dig(plan, "command", "script")),
                "ranks": whole(dig(plan, "ranks")) or len(ranks) or None,
                "device": text(dig(plan, "device", "value")),
                "precision": text(dig(plan, "precision", "value")),
                "state": state,
                "reason": reason,
                "restarts": len(self._restarts),
                "started_unix_s": started,
                "ended_unix_s": ended,
                "supervisor_pid": whole(supervisor.get("pid")),
                "supervisor_alive": alive[0] if supervisor else None,
            },
            "progress": self._progress(plan, state, since, (ended or now) - started if started else None),
            "training": self._training(),
            "loss_curve": {"points": [{"step": s, "loss_nats_per_token": v} for s, v in self._history.curve(CURVE_POINTS)]},
            "ranks": ranks,
            "gpus": machine.gpu_records(gpus, family, planned),
            "gpus_reason": gpus.reason,
            "system": self._host.look(run.path),
            "warnings": list(self._warnings),
            "log": {"file": str(log) if log else None, "last_lines": last_lines(log, LOG_LINES)},
            "checkpoint": self._checkpoint(summary),
            "summary": summary if state == FINISHED else None,
            "failure": failure if state == FAILED else None,
        }

    def _read_events(self) -> None:
        events, fresh = self._events.read()
        if fresh:
            self._warnings.clear()
            self._restarts.clear()
        for event in events:
            kind, said = event.get("event"), text(event.get("text"))
            if kind == "restart":
                self._restarts.append(number(event.get("time")) or 0.0)
                said = said or f"restarted after {text(event.get('cause')) or 'a failure'} at step {event.get('step')}"
            if kind in ("warning", "restart", "verdict", "given_up"):
                self._warnings.append({"time_unix_s": number(event.get("time")), "text": said or str(kind)})

    def _ranks(self, plan: State | None, supervisor: State, since: float) -> list[dict[str, Any]]:
        """One entry a rank, also for those that have not said anything yet; beats of an earlier start do not count."""
        beats = {b.rank: b for b in heartbeat.read_all(self.run.heartbeats) if b.wall_time >= since}
        pids = {whole(dig(r, "rank")): whole(dig(r, "pid")) for r in items(supervisor.get("ranks"))}
        numbers = {*range(min(whole(dig(plan, "ranks")) or 0, 4096)), *beats, *(r for r in pids if r is not None)}
        out = []
        for rank in sorted(numbers):
            beat, pid = beats.get(rank), pids.get(rank)
            if beat and pid is None:
                pid = beat.pid
            seen = _mtime(self.run.supervisor) if rank in pids else beat.wall_time if beat else None
            living = machine.alive(pid, seen or time.time())
            age = None
            if beat:  # the monotonic clock is that of one boot: of no use for a run before the last one
                age = beat.age_s if living and beat.monotonic_ns <= time.monotonic_ns() else max(0.0, time.time() - beat.wall_time)
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
        plan: State | None,
        supervisor: State,
        ranks: list[dict[str, Any]],
        living: bool,
        since: float,
        ends: tuple[State | None, State | None],
    ) -> tuple[str, str | None]:
        """The state, and why where that is not plain."""
        summary, failure = ends
        if failure and (not summary or (_mtime(self.run.failure) or 0) >= (_mtime(self.run.summary) or 0)):
            where = f" on rank {failure['rank']}" if whole(failure.get("rank")) is not None else ""
            return FAILED, f"{text(failure.get('cause')) or 'unknown cause'}{where}: {text(failure.get('summary')) or 'no summary'}"
        if summary:
            return FINISHED, text(summary.get("status"))
        if not self.run.path.is_dir():
            return DIED, "the run directory is gone"
        stepped = (number(self._history.last.get("time")) or -1.0) >= since
        if living or any(r["alive"] for r in ranks):
            return (
                RUNNING if stepped or any(r["step"] for r in ranks) else STARTING
            ), None if plan else "plan.json is missing or not whole"
        if supervisor or any(r["pid"] for r in ranks):
            who = f"the supervisor (pid {supervisor.get('pid')}) and every rank are" if supervisor else "every rank is"
            return DIED, f"{who} gone, and nothing says how the run ended"
        if plan is None or stepped:
            return DIED, "nothing says which process it is" + ("" if plan else "; plan.json is missing or not whole")
        # Preparing a large corpus takes hours before there is any rank, so silence proves nothing.
        return STARTING, "no rank yet: preparing the data, or it never started (see the log)" if time.time() - since > STARTING_S else None

    def _end(self, state: str, ranks: list[dict[str, Any]]) -> float | None:
        """When an ended run ended; of a run that died, its last sign of life."""
        if state in (FINISHED, FAILED):
            return _mtime(self.run.summary if state == FINISHED else self.run.failure)
        signs = [number(self._history.last.get("time")), _mtime(self.run.supervisor), *(r["beat_unix_s"] for r in ranks)]
        return max((s for s in signs if s), default=None)

    def _progress(self, plan: State | None, state: str, since: float, elapsed: float | None) -> State:
        data = read_object(self.run.data)
        total = whole(dig(data, "total_steps")) or whole(dig(plan, "config", "num_iterations")) or None
        step = whole(self._history.last.get("step")) or 0
        pace = self._history.seconds_per_step(since)
        return {
            "step": step,
            "total_steps": total,
            "percent": min(100.0, 100 * step / total) if total else None,
            "epoch": whole(self._history.last.get("epoch")),
            "epochs": whole(dig(data, "epochs")),
            "elapsed_s": max(0.0, elapsed) if elapsed is not None else None,
            "eta_s": max(0, total - step) * pace if total and pace is not None and state == RUNNING else None,
        }

    def _training(self) -> State:
        history, last = self._history, self._history.last
        loss, best, times = number(last.get("loss")), history.best(), history.of_last_steps("step_ms")
        return {
            "loss_nats_per_token": loss,
            "loss_is_finite": None if loss is None else math.isfinite(loss),
            "val_bpb_last": number(history.newest_evaluation().get("val_bpb")),
            "val_bpb_best": best[1] if best else None,
            "val_bpb_best_step": best[0] if best else None,
            "lr": number(last.get("lr")),
            "grad_norm": number(last.get("grad_norm")),
            "tokens": whole(last.get("tokens")),
            "tokens_per_s": median(history.of_last_steps("tokens_per_s")),
            "step_ms_median": median(times),
            "step_ms_p95": percentile(times, 95),
            "last_step_unix_s": number(last.get("time")),
        }

    def _checkpoint(self, summary: State | None) -> str | None:
        """The newest one: folders named step_* are whole."""
        found = max(self.run.checkpoints.glob("step_*"), default=None)
        return str(found) if found else text(dig(summary, "checkpoint"))


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def finite(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not know: null."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Facts of many runs, from the few files of each that are read in constant time: plan, summary or
failure, events, the last metrics. Whatever is in the folder, nothing raises."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from training.core import evaluations, find_run, json_text, jsonl, metric_units, standing
from training.core.course import median
from training.core.jsonl import Record, dig, mtime, number, read_object, text, whole
from training.core.last_resume import LastResume
from training.core.messages import msg
from training.core.read_backwards import backwards
from training.core.rundir import RunDir
from training.core.sweep_dir import SWEEPS
from training.monitor import launches, run_settings
from training.monitor.run_status import (
    DIED,
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
    state_word,
)

if TYPE_CHECKING:
    from training.core.contracts.kinds import RunStatus

# Folders without a readable run.
DAMAGED: Final = "damaged"  # files of a run, but no readable plan
EMPTY: Final = "empty"
FOREIGN: Final = "foreign"  # other files only
STATES = (STARTING, RUNNING, FINISHED, STOPPED, FAILED, DIED, DAMAGED, EMPTY, FOREIGN)
LIVE = (STARTING, RUNNING)
TAIL = 1 << 14  # bytes of metrics.jsonl that are read first
STEPS = 20  # whose speed is that of a run without a summary
_WORDS: dict[str, str] = {
    DAMAGED: msg("monitor.runs.damaged"),
    EMPTY: msg("monitor.runs.empty"),
    FOREIGN: msg("monitor.runs.foreign"),
}


@dataclass
class RunFacts:
    """A folder of experiments/. None: unknown."""

    run: RunDir
    state: str  # one of STATES
    reason: str | None = None
    task: str | None = None
    step: int | None = None
    # Best evaluation, in `loss_unit`; the training loss if there is none.
    loss: float | None = None
    loss_name: str | None = None  # val_bpb, …; 'loss': of the training
    loss_unit: str | None = None
    best_step: int | None = None  # of the best evaluation
    data: tuple[str | None, float | None] = (None, None)  # metric_units.data_basis
    speed: float | None = None  # all ranks together
    unit: str | None = None  # of the speed: tokens, samples, …
    started: float | None = None  # unix s
    seconds: float | None = None  # until the end, or until now
    ranks: int | None = None
    bytes: int = 0  # on disk
    config: Record = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def age_s(self) -> float | None:
        return None if self.started is None else max(0.0, time.time() - self.started)


def word(state: str) -> str:
    """The state as it is shown."""
    return _WORDS[state] if state in _WORDS else state_word(state)  # type: ignore[arg-type]


def read_all(experiments: Path) -> list[RunFacts]:
    """Every folder of `experiments`, the newest first; hidden ones and files are not runs. Raises
    OSError if the folder cannot be read."""
    runs = [run for run in map(read, find_run.folders(experiments)) if not _is_sweeps(run)]
    return sorted(runs, key=lambda r: (-(r.started or 0.0), r.name))


def _is_sweeps(run: RunFacts) -> bool:
    """The folder of the sweeps, which has no run's files."""
    return run.name == SWEEPS and run.state in (FOREIGN, EMPTY)


def option_names(experiments: Path) -> set[str]:
    """All keys in the configurations of the runs; none if the folder cannot be read."""
    try:
        plans = [read_object(_plan_file(RunDir(path))) for path in find_run.folders(experiments)]
    except OSError:
        return set()
    return {name for plan in plans if plan for name in run_settings.settings(plan)}


def read(path: Path) -> RunFacts:
    """One run."""
    run = RunDir(path)
    size = size_on_disk(path)
    if not find_run.is_run(run):
        return RunFacts(run, EMPTY if _is_empty(path) else FOREIGN, started=mtime(path), bytes=size)
    plan = read_object(_plan_file(run))
    if plan is None:
        started = mtime(run.plan) or mtime(path)
        return RunFacts(run, DAMAGED, msg("monitor.runs.no_plan"), started=started, bytes=size)
    found = _of_plan(run, plan)
    found.bytes = size
    return found


def _plan_file(run: RunDir) -> Path:
    try:
        return standing.plan_file(run)
    except (TypeError, ValueError, OverflowError):  # a plan with other contents
        return run.plan


def _of_plan(run: RunDir, plan: Record) -> RunFacts:
    created = number(plan.get("created")) or mtime(run.plan) or 0.0
    evaluated, restarted, resumed = evaluations.read(run.events)
    since = max(created, restarted)
    summary, failure = standing.ends_of(run, plan, since)
    printed = dig(summary or failure, "figures")  # of a user script
    complete = printed or (summary if summary and "loss_end" in summary else None)
    if isinstance(complete, dict) and not (resumed and resumed.discards_end(complete)):
        steps = [complete]
    else:
        steps = _last_steps(run.metrics, resumed)
    last = steps[0] if steps else {}
    state, reason, ended = _state(run, plan, since, summary, failure, last)
    best = _best(evaluated) or _printed_best(last)
    loss, name, unit = best[:3] if best else _training_loss(run, last)
    until = time.time() if ended is None else ended
    return RunFacts(
        run=run,
        state=state,
        reason=reason,
        task=_task(plan),
        step=whole(last.get("steps", last.get("step"))),
        loss=loss,
        loss_name=name,
        loss_unit=unit,
        best_step=best[3] if best else None,
        data=metric_units.data_basis(plan, name or ""),
        # a single step may take twice as long as the others
        speed=median(sorted(s for s in map(metric_units.speed, steps) if s is not None)),
        unit=metric_units.counted(last),
        ranks=whole(plan.get("ranks")),
        started=created,
        seconds=launches.run_clock(run, plan, created).seconds(until),
        config=run_settings.settings(plan),
    )


def _state(
    run: RunDir,
    plan: Record,
    since: float,
    summary: Record | None,
    failure: Record | None,
    last: Record,
) -> tuple[RunStatus, str | None, float | None]:
    """(state, reason, when it ended)."""
    supervisor = standing.supervisor_of(run, plan)
    ranks, alive = [], False
    if not summary and not failure:
        # loads psutil, which takes as long as reading many ended runs
        from training.monitor import rank_states

        ranks = rank_states.RankStates(run).read(plan, supervisor, since)
        alive = any(rank_states.supervised(run, plan, supervisor))
    evidence = RunEvidence(
        run=run,
        plan=plan,
        supervisor=supervisor,
        ranks=ranks,
        since=since,
        last=last,
        summary=summary,
        failure=failure,
        alive=alive,
        resumable=False,
        printed=False,
    )
    state, reason = judge(evidence)
    end = failure if state == FAILED or not summary else summary
    return state, reason, ended_at(state, evidence, end) if state in ENDED else None


def _best(evaluated: dict[int, Record]) -> tuple[float, str, str | None, int] | None:
    """(value, name, unit, step) of the best evaluation."""
    newest = evaluated[max(evaluated)] if evaluated else {}
    name = next(iter(metric_units.scores(newest)), "")
    found = [
        (value, step)
        for step, record in evaluated.items()
        if (value := number(record.get(name))) is not None and math.isfinite(value)
    ]
    if not found:
        return None
    choose = max if metric_units.higher_is_better(name) else min
    value, step = choose(found, key=lambda pair: pair[0])
    return value, name, metric_units.score_unit(name), step


def _printed_best(last: Record) -> tuple[float, str, str | None, int | None] | None:
    """The same of a user script, from its summary."""
    value, name = number(last.get("eval")), text(last.get("eval_name"))
    if value is None or name is None or not math.isfinite(value):
        return None
    return value, name, text(last.get("eval_unit")), whole(last.get("eval_step"))


def _training_loss(run: RunDir, last: Record) -> tuple[float | None, str | None, str | None]:
    """(value, name, unit) of the last training loss, in bits per byte where that is known."""
    value = number(last.get("loss_end", last.get("loss")))
    if value is None:
        return None, None, None
    if "bytes_per_token" not in last:
        density = number(dig(read_object(run.data), "bytes_per_token"))
        last = {**last, "bytes_per_token": density}
    factor, unit = metric_units.display(last)
    return value * factor, "loss", unit


def _last_steps(file: Path, resumed: LastResume | None) -> list[Record]:
    """Up to STEPS of the last steps in metrics.jsonl, the newest first, without those that the last
    resume has discarded."""
    found = _steps_at_end(file)
    if not resumed or not found or not resumed.discards(found[0]):
        return found
    kept = (r for r in backwards(file) if "loss" in r and "step" in r and not resumed.discards(r))
    return list(islice(kept, STEPS))


def _steps_at_end(file: Path) -> list[Record]:
    found = list[Record]()
    size = TAIL
    try:
        with file.open("rb") as metrics:
            length = os.fstat(metrics.fileno()).st_size
            while True:
                metrics.seek(max(0, length - size))
                for line in reversed(metrics.read().split(b"\n")):
                    if b'"loss"' in line and (record := jsonl.parse(line)) and "step" in record:
                        found.append(record)
                        if len(found) == STEPS:
                            return found
                if found or size >= min(length, 64 * TAIL):
                    return found
                size *= 8
    except OSError:
        return found


def _task(plan: Record) -> str | None:
    if (script := script_of(plan)) is not None:
        return Path(script).name
    return text(dig(plan, "task", "name")) or text(dig(plan, "config", "task"))


def _is_empty(path: Path) -> bool:
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is None
    except OSError:
        return False


def size_on_disk(path: Path) -> int:
    """Bytes that deleting the folder would free; what links point to does not count."""
    blocks = 0
    folders = [os.fspath(path)]
    if path.is_symlink():
        return 0
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    blocks += entry.stat(follow_symlinks=False).st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:  # removed meanwhile, or not readable
            continue
    return blocks * 512


def record(found: RunFacts) -> Record:
    """The run as in --json."""
    return {
        "name": found.name,
        "dir": str(found.run.path),
        "state": found.state,
        "reason": found.reason,
        "task": found.task,
        "step": found.step,
        "loss": found.loss,
        "loss_name": found.loss_name,
        "loss_unit": found.loss_unit,
        "best_step": found.best_step,
        "speed": found.speed,
        "unit": found.unit,
        "started_unix_s": found.started,
        "seconds": found.seconds,
        "bytes": found.bytes,
        "config": found.config,
    }


def as_json(runs: list[RunFacts]) -> str:
    return json_text.answer({"schema_version": 1, "runs": [record(run) for run in runs]})

"""Content of a notification: title, one line of text, and facts (docs/notify.md)."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from training.core import cause_ids, evaluations, find_run, manifest, run_reader, rundir
from training.core.errors import Exit
from training.core.jsonl import Record, read_figures
from training.core.messages import msg
from training.core.plain_text import one_line
from training.core.read_backwards import backwards
from training.core.redact import masked
from training.core.units import plural, significant
from training.diagnose import exception_cause as causes
from training.trainer import summary

if TYPE_CHECKING:
    from training.core.contracts.kinds import NotifyStatus
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import NotificationRecord, SummaryRecord
    from training.core.contracts.verdict import FailureRecord

FINISHED: Final = "finished"
FAILED: Final = "failed"
STOPPED: Final = "stopped"
PREEMPTED: Final = "preempted"
LEFT: Final = "left"
WORDS = {
    FINISHED: msg("launcher.notify.finished"),
    FAILED: msg("launcher.notify.failed"),
    STOPPED: msg("launcher.notify.stopped"),
    PREEMPTED: msg("launcher.notify.preempted"),
    LEFT: msg("launcher.notify.left"),
}
BY_CODE: dict[int, NotifyStatus] = {
    Exit.DONE: FINISHED,
    Exit.INTERRUPTED: STOPPED,
    Exit.PREEMPTED: PREEMPTED,
}
TEXT = 500  # characters


def payload(
    run: rundir.RunDir,
    plan: Plan,
    code: int,
    *,
    begun: bool,
    left: bool = False,
    why: str = "",
    known: FailureRecord | None = None,
    restarts: int = 0,
    seconds: float = 0.0,
) -> NotificationRecord:
    """Facts without secrets, because they leave this machine. Unless `begun`, the run directory has
    no records of this launch. `left`: as in PostRun. `why`: the text shown to the user where no
    rank has ended the run. `known`: the failure, whose file may be missing (a full disk) or seem to
    be from an earlier start (a clock that was set back). `restarts`, `seconds`: of this launch."""
    done = _of_this_start(run.summary, plan) if begun else {}
    failure = _failure(run, plan, known) if begun and not why else {}
    printed = (done or failure).get("figures") or {}  # by a user script
    # a command's own status may be that of Duet's LEFT
    status: NotifyStatus = LEFT if left else BY_CODE.get(code, FAILED)
    if failure.get("torn_down"):
        status = FINISHED
    elif failure.get("kind") == rundir.ASKED:
        status = PREEMPTED if failure["cause"] == cause_ids.PREEMPTED else STOPPED
    failure = failure if status == FAILED or not done else {}
    step, evaluation = _last(run) if begun else ({}, {})
    cause = failure.get("cause") if status == FAILED else None
    text = why or _text(run, plan, done, failure, status)
    return {
        "name": run.name,
        "status": status,
        "exit_code": code,
        "title": f"{run.name} {WORDS[status]}: {cause}" if cause else f"{run.name} {WORDS[status]}",
        "text": _clean(msg("launcher.notify.exit", text=text, code=code) if code else text),
        "cause": cause,
        "rank": failure.get("rank") if status == FAILED else None,
        "advice": [_clean(one) for one in failure.get("advice", [])],
        "steps": done.get("steps", step.get("step", printed.get("step"))),
        "loss": step.get("loss", printed.get("loss")),
        "eval": {name: value for name, value in evaluation.items() if name.startswith("val_")}
        or _printed_eval(printed)
        or None,
        "seconds": round(seconds, 1),
        "restarts": restarts,
        "host": socket.gethostname(),
        "run_dir": str(run.path) if find_run.exists(run.plan) else None,
        "report": str(run.report)
        if begun and rundir.written_since(run.report, plan["created"])
        else None,
        "log": plan.get("log_file"),
    }


def _of_this_start(path: Path, plan: Plan) -> Record:
    """The record, unless it is from an earlier start of the run."""
    record = read_figures(path) or {}
    return record if rundir.is_of_start(record, plan, path, plan["created"]) else {}


def _failure(run: rundir.RunDir, plan: Plan, known: FailureRecord | None) -> Record:
    """The supervisor's failure record; without one, the error report of rank 0."""
    if failure := _of_this_start(run.failure, plan) or dict(known or {}):
        return failure
    own = run_reader.read_rank_error(run.rank_error(0))
    if own is None:
        return {}
    return {
        "cause": causes.of_error(own),
        "kind": "",
        "rank": 0,
        "summary": f"{own['type']}: {own['message']}",
        "step": None,
    }


def _text(run: rundir.RunDir, plan: Plan, done: Record, failure: Record, status: str) -> str:
    if failure:
        if failure.get("rank") is None or status != FAILED:
            return str(failure["summary"])
        return msg("launcher.notify.rank", rank=failure["rank"], summary=failure["summary"])
    if "loss_last" in done:
        whole = cast("SummaryRecord", done)
        text = msg(
            "launcher.notify.trained",
            trained=summary.trained(whole, plan),
            learnt=summary.learnt(whole),
        )
        if status == FINISHED:
            return text
        return msg("launcher.notify.stopped_at", step=done["steps"], text=text)
    if done:  # a user script
        took = [plural(done["ranks"], "rank"), f"{done['seconds']:.1f} s"]
        return ", ".join(took + _printed_words(done.get("figures") or {}))
    saved_step = int((manifest.newest(run.checkpoints) or {"step": 0})["step"])
    return (
        msg("launcher.notify.saved", step=saved_step)
        if saved_step
        else msg("launcher.notify.no_checkpoint")
    )


def _printed_eval(printed: Record) -> dict[str, float]:
    name, value = printed.get("eval_name"), printed.get("eval")
    return {} if name is None or value is None else {name: value}


def _printed_words(printed: Record) -> list[str]:
    step, loss = printed.get("step"), printed.get("loss")
    words = [] if step is None else [msg("launcher.notify.step", step=step)]
    figures = ({} if loss is None else {"loss": loss}) | _printed_eval(printed)
    return words + [f"{name} {significant(value)}" for name, value in figures.items()]


def _last(run: rundir.RunDir) -> tuple[Record, Record]:
    """The last recorded step and the last evaluation; empty without any."""
    evaluated, _, resumed = evaluations.read(run.events)
    steps = (record for record in backwards(run.metrics) if "loss" in record)
    step = next((one for one in steps if not (resumed and resumed.discards(one))), {})
    return step, evaluated[max(evaluated)] if evaluated else {}


def _clean(text: str) -> str:
    text = one_line(masked(" ".join(text.split())))
    return text if len(text) <= TEXT else f"{text[: TEXT - 1]}…"

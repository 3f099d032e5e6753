"""Summary of a finished run in one screen, from summary.json; shown by the supervisor or, without
one, by rank 0."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

from training import tasks
from training.core import metric_units, run_reader, rundir, units
from training.core.messages import msg
from training.core.next_command import known_as, next_command
from training.core.plain_text import one_line
from training.core.project import typed
from training.plan.finished import longer
from training.tasks.memory import gib

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import SummaryRecord


def render(run: rundir.RunDir, plan: Plan) -> str:
    """What was trained and how well, a sample, where the files are, the next command. Empty without
    a summary."""
    s = run_reader.read_summary(run.summary)
    if s is None:
        return ""
    more = {} if s["status"] == "stopped" else longer(plan["config"], s["steps"])
    lines = [
        msg("trainer.summary.model", model=_model(plan), millions=units.millions(s["parameters"])),
        msg("trainer.summary.trained", trained=trained(s, plan)),
    ]
    if math.isfinite(s["step_ms"]):  # else no step is recorded
        lines += [
            msg("trainer.summary.loss", learnt=learnt(s)),
            msg("trainer.summary.speed", rate=_rate(s), step_ms=s["step_ms"], use=_use(s)),
            _memory(s, plan),
        ]
    if sample := s.get("sample"):
        body = sample.rstrip().splitlines()[:12]
        lines += [
            msg("trainer.summary.sample"),
            *(f"    │ {one_line(line)[:100]}" for line in body),
        ]
    lines += [
        msg("trainer.summary.run", path=run.path),
        f"           {_contents(run, s['checkpoint'])}",
        msg("trainer.summary.report", report=run.report)
        if rundir.written_since(run.report, plan["created"])
        else "",
        msg("trainer.summary.log", log_file=plan["log_file"]) if plan.get("log_file") else "",
        typed(
            msg(
                "trainer.summary.monitor",
                name=shlex.quote(known_as(plan, run) if _default_place(plan) else str(run.path)),
            )
        ),
        msg("trainer.summary.resume", command=next_command(plan, run, **more)),
    ]
    return "\n".join(f"  {line}" for line in lines if line) + "\n"


def _model(plan: Plan) -> str:
    return tasks.spec_of(plan).model_name(plan["config"])


def trained(s: SummaryRecord, plan: Plan) -> str:
    unit, count, name = metric_units.counted(s), metric_units.so_far(s), metric_units.data(plan)
    amount = (
        units.millions(count)
        if count is not None and unit == metric_units.TOKENS
        else units.count(count)
    )
    data = (
        msg("trainer.summary.data_of", amount=amount, unit=unit, name=name)
        if name
        else f"{amount} {unit}"
    )
    steps, skipped = units.plural(s["steps"], "step"), s.get("skipped_steps")
    return msg(
        "trainer.summary.done",
        steps=msg("trainer.summary.skipped", steps=steps, skipped=skipped) if skipped else steps,
        data=data,
        when=_when(s),
        ranks=plan["ranks"],
        device=plan["device"]["value"],
    )


def learnt(s: SummaryRecord) -> str:
    """Loss and validation, in one unit."""
    if metric_units.counted(s) != metric_units.TOKENS:
        scores = ", ".join(metric_units.courses(s))
    elif s.get("val_bpb_last") is not None:
        ends = s["val_bpb_first"], s["val_bpb_last"]
        shown = " → ".join(units.decimal(value, places=3) for value in ends)
        scores = f"{shown} {metric_units.BITS}"
    else:
        scores = ""
    course = metric_units.course(s)
    return msg("trainer.summary.validation", course=course, scores=scores) if scores else course


def _when(s: SummaryRecord) -> str:
    """Duration; for a resumed run, that of its last part."""
    begun = s.get("begun_at", 0)
    if begun >= s["steps"]:
        return msg("trainer.summary.all_before")
    took = _duration(s["seconds"])
    return (
        msg("trainer.summary.steps_in", steps=units.steps(begun + 1, s["steps"]), took=took)
        if begun
        else msg("trainer.summary.took", took=took)
    )


def _rate(s: SummaryRecord) -> str:
    rate = metric_units.speed(s)
    return (
        msg("trainer.summary.rate", amount=units.amount(rate), unit=metric_units.counted(s))
        if rate is not None
        else ""
    )


def _use(s: SummaryRecord) -> str:
    """MFU, if the GPU's peak is known, and energy, if its driver measures it."""
    mfu, joules = s.get("mfu"), s.get("joules_per_unit")
    use = msg("trainer.summary.mfu", percent=units.percent(100 * mfu)) if mfu is not None else ""
    if joules is None:
        return use
    unit = metric_units.one(metric_units.counted(s))
    return use + msg("trainer.summary.energy", joules=units.joules(joules), unit=unit)


def _memory(s: SummaryRecord, plan: Plan) -> str:
    """Measured and estimated memory of a GPU, both without the CUDA context."""
    peak, planned = s.get("memory_bytes"), plan.get("memory")
    if plan["device"]["value"] != "cuda" or not peak or not planned:
        return ""
    estimated = planned["total_bytes"] - planned["context_bytes"]
    text = msg("trainer.summary.memory", peak=gib(peak), estimated=gib(estimated))
    if "reported_memory" in plan:
        text = msg("trainer.summary.memory_reported", text=text, reported=plan["reported_memory"])
    return text


def _contents(run: rundir.RunDir, checkpoint: str) -> str:
    files, folders = (
        (run.plan, run.metrics, run.checkpoints / checkpoint),
        (run.samples, run.tensorboard, run.wandb, run.profile, run.ranks),
    )
    parts = dict.fromkeys(files, "") | dict.fromkeys(folders, "/")
    return ", ".join(
        f"{path.relative_to(run.path)}{slash}" for path, slash in parts.items() if path.exists()
    )


def _default_place(plan: Plan) -> bool:
    return bool(plan["origins"]["out_dir"] == "default")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        msg("trainer.summary.hours", hours=hours, minutes=minutes)
        if hours
        else msg("trainer.summary.minutes", minutes=minutes, rest=rest)
        if minutes
        else f"{seconds:.1f} s"
    )

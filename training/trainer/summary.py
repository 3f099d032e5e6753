"""Summary of a finished run in one screen, from summary.json; shown by the supervisor or, without
one, by rank 0."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from training import tasks
from training.core import metric_units, run_reader, rundir, units
from training.core.next_command import next_command
from training.core.project import typed
from training.plan.finished import longer

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
        f"Model      {_model(plan)}, {units.millions(s['parameters'])} parameters",
        f"Trained    {trained(s, plan)}",
        f"Loss       {learnt(s)}",
        f"Speed      {_rate(s)}{s['step_ms']:.1f} ms per step{_use(s)} (medians)",
    ]
    if sample := s.get("sample"):
        body = sample.rstrip().splitlines()[:12]
        lines += ["Sample", *(f"    │ {line[:100]}" for line in body)]
    lines += [
        f"Run        {run.path}",
        f"           {_contents(run, s['checkpoint'])}",
        f"Report     {run.report}" if run.report.exists() else "",
        f"Log        {plan['log_file']}" if plan.get("log_file") else "",
        typed(
            f"Monitor    ./monitor_training.sh "
            f"--run={shlex.quote(run.name if _default_place(plan) else str(run.path))}"
        ),
        f"Resume     {next_command(plan, run, **more)}",
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
    data = f"{amount} {unit} of {name}" if name else f"{amount} {unit}"
    return (
        f"{units.plural(s['steps'], 'step')}, {data}{_when(s)}, {plan['ranks']} × "
        f"{plan['device']['value']}"
    )


def learnt(s: SummaryRecord) -> str:
    """Loss and validation, in one unit."""
    if metric_units.counted(s) != metric_units.TOKENS:
        scores = ", ".join(metric_units.courses(s))
    elif s.get("val_bpb_last") is not None:
        scores = f"{s['val_bpb_first']:.3f} → {s['val_bpb_last']:.3f} {metric_units.BITS}"
    else:
        scores = ""
    course = metric_units.course(s)
    return f"{course}; validation {scores}" if scores else course


def _when(s: SummaryRecord) -> str:
    """Duration; for a resumed run, that of its last part."""
    begun = s.get("begun_at", 0)
    if begun >= s["steps"]:
        return ", all of them before this start"
    took = _duration(s["seconds"])
    return f", steps {begun + 1} to {s['steps']} in {took}" if begun else f" in {took}"


def _rate(s: SummaryRecord) -> str:
    rate = metric_units.speed(s)
    return f"{units.amount(rate)} {metric_units.counted(s)}/s, " if rate is not None else ""


def _use(s: SummaryRecord) -> str:
    """MFU, if the GPU's peak is known."""
    mfu = s.get("mfu")
    return f", {100 * mfu:.1f} % of the GPU's arithmetic (MFU)" if mfu is not None else ""


def _contents(run: rundir.RunDir, checkpoint: str) -> str:
    files, folders = (
        (run.plan, run.metrics, run.checkpoints / checkpoint),
        (run.samples, run.tensorboard, run.wandb, run.ranks),
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
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {rest} s"
        if minutes
        else f"{seconds:.1f} s"
    )

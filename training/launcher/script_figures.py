"""Figures of a user script, from its output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.core import rundir
from training.launcher.local_ranks import is_script

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import PrintedFigures
    from training.core.contracts.verdict import FailureRecord
    from training.diagnose.log_parsers.log_metrics import LogMetrics


def printed(run: rundir.RunDir) -> LogMetrics | None:
    """None if no rank has printed any. Read after the ranks have ended: never in the way of their
    output. In a single pass, as the monitor's first one: only parts of a long log."""
    from training.diagnose.log_parsers.log_metrics import ScriptFigures

    return ScriptFigures(run.ranks).read()


def last_steps(run: rundir.RunDir) -> tuple[int, ...]:
    """The last two steps that the script has printed, or fewer."""
    found = printed(run)
    return tuple(sorted({record["step"] for record in found.records()})[-2:]) if found else ()


def add(record: FailureRecord, run: rundir.RunDir, plan: Plan) -> None:
    """Adds the figures of a user script to the record of its failure."""
    if is_script(plan) and (found := printed(run)):
        record["figures"] = final(found)


def final(printed: LogMetrics) -> PrintedFigures:
    progress, training, records = printed.progress(running=False), printed.training(), []
    if progress["scope"] == "epoch":
        records = printed.records()  # their steps are those of the run
    best = training["eval_best"]
    figures: PrintedFigures = {
        "step": records[-1]["step"] if records else progress["step"],
        "loss": training["loss"],
        "loss_unit": training["loss_unit"],
        "eval_name": training["eval_name"],
        "eval_unit": training["eval_unit"],
        "eval": training["eval_last"] if best is None else best,
        "eval_step": training["eval_best_step"],
    }
    if training["tokens_per_s_of"] != "device":  # else of one rank
        figures["tokens_per_s"] = training["tokens_per_s"]
    if training["samples_per_s"] is not None:
        figures["samples_per_s"] = training["samples_per_s"]
    return figures

"""Final figures of a user script, from its output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.core import rundir

if TYPE_CHECKING:
    from training.core.contracts.run_files import PrintedFigures


def read(run: rundir.RunDir) -> PrintedFigures | None:
    """None if no rank has printed any. In a single pass, as the monitor's first one: only parts of
    a long log."""
    from training.diagnose.log_parsers.log_metrics import ScriptFigures

    printed = ScriptFigures(run.ranks).read()
    if printed is None:
        return None
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

"""Expected time of a run, from its time limit or from earlier runs of the same size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from training import tasks
from training.config.schema import FIELDS
from training.core import json_text
from training.core.jsonl import Record
from training.monitor import run_settings
from training.monitor.runs import facts

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

# Fields of other groups do not change the time of a step.
GROUPS = ("model", "batch", "compute")
SAME = {name for name, field in FIELDS.items() if field.metadata["group"] in GROUPS} - {
    "seed",
    "init_from",
}
# These change no time either; the groups of a user's own options are unknown.
OF_OPTIMIZER = {"lr", "weight_decay"} | {
    name for name, field in tasks.everything().items() if field.metadata["group"] == "optimizer"
}


class Expected:
    """Reads the runs of a folder once."""

    def __init__(self, experiments: Path) -> None:
        try:
            runs = facts.read_all(experiments)
        except OSError:  # before the first run
            runs = []
        self._speeds: dict[str, float] = {}
        for run in runs:  # the newest first
            if run.speed and run.config:
                self._speeds.setdefault(_key(run.config, run.ranks), run.speed)

    def seconds(self, plan: Plan) -> float | None:
        """None: unknown. Without evaluations, checkpoints and start-up."""
        config = plan["config"]
        times = [float(config["max_time"])] if config.get("max_time") else []
        settings = json_text.as_stored(run_settings.fields({**plan}))
        speed = self._speeds.get(_key(settings, plan["ranks"]))
        if speed and config.get("num_iterations") and config.get("total_batch_size"):
            times.append(config["num_iterations"] * config["total_batch_size"] / speed)
        return min(times) if times else None


def _key(settings: Record, ranks: int | None) -> str:
    """Any other option of a task's own may change the time."""
    same = {
        name: value
        for name, value in settings.items()
        if name in SAME or not (name in FIELDS or name in OF_OPTIMIZER)
    }
    return repr((ranks, sorted(same.items())))

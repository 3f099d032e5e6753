"""Whether a run to resume is finished under the requested configuration, read from its files."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training import tasks
from training.config.schema import Config
from training.core import manifest, rundir, standing
from training.core.messages import msg

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import Plan

LIMITS = ("num_iterations", "num_epochs", "max_time")
# Fields that determine the number of steps of an epoch.
EPOCH = ("total_batch_size", "max_seq_len", "data", "text_field", "tokenizer", "vocab_size")


@dataclass(frozen=True)
class Finished:
    """The end that a run has reached."""

    steps: int
    at: float  # unix s
    longer: dict[str, float]  # flags that train for twice as long

    def sentence(self) -> str:
        return msg(
            "plan.state.finished",
            steps=self.steps,
            time=time.strftime("%Y-%m-%d %H:%M", time.localtime(self.at)),
        )


def find(
    run: rundir.RunDir, before: FieldValues, config: Config, options: FieldValues
) -> Finished | None:
    """None: the run was stopped or failed, or this configuration trains it for longer. `options`:
    of the task. `before`: fields and options of the run, with its paths as they are here."""
    plan, summary = standing.read_plan(run), standing.ends(run)[0]
    if (
        plan is None
        or summary is None
        or summary.get("status") != "done"
        or not isinstance(summary.get("steps"), int)
    ):
        return None
    steps = summary["steps"]
    if not _reached(run, plan, before, config, options, steps):
        return None
    limits = {name: getattr(config, name) for name in LIMITS}
    if share := config.tokens_per_param:
        limits["tokens_per_param"] = max(share, plan["config"].get("tokens_per_param", 0.0))
    if config.max_time:
        limits["max_time"] = max(config.max_time, math.ceil(_used_s(run)))
    return Finished(steps, float(summary.get("time", 0.0)), longer(limits, steps))


def longer(config: FieldValues, steps: int) -> dict[str, float]:
    """The limits that end a run, doubled; whole numbers as such."""
    limits = {
        name: 2 * max(config[name], steps if name == "num_iterations" else 1)
        for name in LIMITS
        if config.get(name)
    }
    if "num_iterations" in limits and (share := config.get("tokens_per_param")):
        factor = limits.pop("num_iterations") / config["num_iterations"]  # which follow from it
        limits["tokens_per_param"] = float(f"{factor * share:.3g}")
    limits = limits or {"num_iterations": 2 * steps}
    return {name: int(value) if value == int(value) else value for name, value in limits.items()}


def _reached(
    run: rundir.RunDir,
    plan: Plan,
    before: FieldValues,
    config: Config,
    options: FieldValues,
    steps: int,
) -> bool:
    if config.num_iterations and steps >= config.num_iterations:
        return True
    if config.max_time and _used_s(run) >= config.max_time:
        return True
    same = all(before[n] == getattr(config, n) for n in EPOCH if n in before)
    same &= all(options.get(name) == before[name] for name in tasks.task_of(plan)["options"])
    if all(before.get(name, 0) == getattr(config, name) for name in LIMITS):
        return same  # the same limits
    # the rest of a change of the time is known only during the run
    if not same or ((config.num_iterations or config.max_time) and not config.num_epochs):
        return False
    saved, per_epoch = manifest.newest(run.checkpoints), _steps_per_epoch(run)
    if saved is None or not per_epoch:
        return False
    more = max(1, config.num_epochs) - saved["epoch"]  # this epoch and later ones
    per_step = config.total_batch_size // tasks.spec_of(plan).seq_len(config)
    return more < 1 or (more == 1 and per_epoch * per_step - saved["used"] < per_step)


def _used_s(run: rundir.RunDir) -> float:
    """Of --max_time, up to the newest checkpoint."""
    saved = manifest.newest(run.checkpoints)
    return saved.get("used_s", 0.0) if saved else 0.0


def _steps_per_epoch(run: rundir.RunDir) -> int:
    """As recorded by the newest start; 0: unknown."""
    starts = [
        record.get("steps_per_epoch")
        for record in rundir.read_records(run.events)
        if record.get("event") == "start"
    ]
    return starts[-1] if starts and isinstance(starts[-1], int) else 0


def config_of(plan: Plan | None) -> Path | None:
    """The config file of a run."""
    if plan is None:
        return None
    name, folder = plan.get("config_file"), (plan.get("command") or {}).get("cwd") or ""
    return Path(folder, name).resolve() if isinstance(name, str) else None

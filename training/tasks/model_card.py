"""README.md of an exported model: use, data, training, licence."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import training
from training import tasks
from training.config import flags
from training.config.schema import FIELDS
from training.core import metric_units, redact, run_reader, units
from training.core.messages import msg
from training.core.project import published
from training.core.recorded_steps import RecordedSteps
from training.tasks import own_modules
from training.tasks.weights import HUB

if TYPE_CHECKING:
    from training.tasks.trained import Trained

ROWS = 12  # of the curve
# besides the group `launch`, flags that do not affect the model
OF_THE_USER = ("notify", "out_dir", "log_dir")


def text(model: Trained, form: str) -> str:
    """Without home folders, names of users and hosts, and secrets: it will be published."""
    weights = model.weights
    parts = [
        "---\n"
        f"license: # {msg('tasks.card.license')}\n"
        f"library_name: {'transformers' if form == HUB else 'duet'}\n"
        "tags: [duet]\n"
        "---",
        f"# {weights.name}",
        msg(
            "tasks.card.model",
            model=model.describe(),
            step=weights.step,
            version=training.__version__,
        ),
        *([msg("tasks.card.averaged", decay=weights.facts["ema"])] if weights.averaged else []),
        f"## {msg('tasks.card.use')}",
        f"```python\n{model.usage(form)}\n```",
        *_code(model),
        *_data(model),
        f"## {msg('tasks.card.training')}",
        *_curve(model),
        *_command(model),
        f"## {msg('tasks.card.license_title')}",
        msg("tasks.card.license_open"),
    ]
    return redact.Anonymous()("\n\n".join(parts) + "\n")


def _code(model: Trained) -> list[str]:
    file = model.weights.task_file
    names = [f"`{inner}`" for inner in own_modules.files(file)] if file else []
    return [msg("tasks.card.code", files=", ".join(names))] if names else []


def _data(model: Trained) -> list[str]:
    run = model.weights.run
    data = run_reader.read_data(run.data) if run else None
    if not data or "documents" not in data:
        return []
    sentence = msg(
        "tasks.card.data",
        name=data["name"],
        documents=units.plural(data["documents"], "document"),
        train=units.count(data["train_tokens"]),
        val=units.count(data["val_tokens"]),
        tokenizer=data["tokenizer"],
    )
    return [f"## {msg('tasks.card.data_title')}", sentence]


def _curve(model: Trained) -> list[str]:
    """The final loss, and a table of the loss and the validation scores."""
    weights = model.weights
    if weights.run is None:
        return [msg("tasks.card.no_curve", step=weights.step)]
    recorded = RecordedSteps(weights.run, weights.step, ())
    steps, losses, evals = recorded.steps, recorded.losses, recorded.evaluations
    if recorded.last is None or not steps:
        return [msg("tasks.card.no_curve", step=weights.step)]
    unit = metric_units.counted(recorded.last)
    amount = units.count(metric_units.so_far(recorded.last) or 0)
    last = evals[max(evals)] if evals else {}
    names = [name for name in last if name.startswith(metric_units.EVALUATION)]
    scores = {"loss": losses[-1], **{name: last[name] for name in names}}
    final = ", ".join(f"{name} {units.decimal(value)}" for name, value in scores.items())
    out = [msg("tasks.card.final", step=weights.step, amount=amount, unit=unit, scores=final)]
    shown = sorted(evals) or steps
    shown = sorted({shown[round(n * (len(shown) - 1) / (ROWS - 1))] for n in range(ROWS)})
    rows = ["| step | " + " | ".join(["loss", *names]) + " |", "|---" * (len(names) + 2) + "|"]
    for step in shown:
        values = [losses[_nearest(steps, step)], *(evals.get(step, {}).get(name) for name in names)]
        rows.append(f"| {step} | " + " | ".join(units.decimal(value) for value in values) + " |")
    return [*out, "\n".join(rows)]


def _nearest(steps: Sequence[int], step: int) -> int:
    """The place of the nearest one in ascending steps."""
    at = bisect_left(steps, step)
    return min(range(max(0, at - 1), min(len(steps), at + 1)), key=lambda n: abs(steps[n] - step))


def _command(model: Trained) -> list[str]:
    command = model.weights.plan.get("command")
    if not command:
        return []
    args = list(command["args"])
    for name, start, stop in reversed(flags.parse(args, tasks.everything()).places):
        if name in OF_THE_USER or (name in FIELDS and FIELDS[name].metadata["group"] == "launch"):
            del args[start:stop]
    shown = redact.Anonymous().command(f"./{command['script']}", args)
    return [f"```bash\n{published(shown)}\n```"]

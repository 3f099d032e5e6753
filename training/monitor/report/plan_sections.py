"""Sections of a page from the plan of the run: configuration, data, machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field
from typing import Any

from training import tasks
from training.config.batch import Batch
from training.config.origin import DEFAULT, shown
from training.config.schema import FIELDS
from training.core import messages, redact, units
from training.core.check_names import check_title
from training.core.jsonl import Record, dig, items, number, text, whole
from training.core.messages import msg
from training.core.units import GIB, count
from training.monitor import run_settings
from training.monitor.report.html import Html, join, table, tag
from training.monitor.report.page import code, folded
from training.monitor.report.run import Run, value_of
from training.plan.cli_args import command
from training.tasks.memory import SAVINGS, gib

DECISIONS = (  # of the plan, that concern machine and software
    *("device", "precision", "tf32", "compile"),
    *("gradient_compression", "launcher", "retries"),
)


def configuration(run: Run) -> Html | None:
    origins, fields = run.plan.get("origins"), _fields(run)
    settings = run_settings.fields(run.plan)  # the command has the arguments of a user script
    if not settings:
        return None
    known: Record = origins if isinstance(origins, dict) else {}
    rows = {
        n: _setting(
            n, value, str(known.get(n, msg("monitor.report.sections.unknown"))), fields.get(n)
        )
        for n, value in settings.items()
    }
    folds = _defaults(run, fields)
    changed = [row for name, row in rows.items() if name not in folds]
    rest = [row for name, row in rows.items() if name in folds]
    head = (
        msg("monitor.report.column.field"),
        msg("monitor.report.column.value"),
        msg("monitor.report.column.origin"),
        {"": msg("monitor.report.column.description"), "class_": "what"},
    )
    return join(
        [
            table(head, changed)
            if changed
            else tag("p", msg("monitor.report.sections.all_defaults")),
            folded(units.plural(len(rest), "default"), table(head, rest)) if rest else None,
            _command(run),
        ]
    )


def _defaults(run: Run, fields: Mapping[str, Field[Any]]) -> set[str]:
    """Settings that are defaults: by their origin, or kept by a resume with the default's value."""
    kept = {
        messages.templates("config")["config.origin.file"][language].format(
            origin=messages.templates("plan")["plan.resume.origin"][language].format(
                name=run.plan.get("run_name")
            )
        )
        for language in messages.LANGUAGES
    }
    return {
        name
        for name, value in run.settings.items()
        if (origin := text(dig(run.plan, "origins", name))) == DEFAULT
        or (origin in kept and name in fields and value == fields[name].default)
    }


def _fields(run: Run) -> Mapping[str, Field[Any]]:
    """Schema of the fields; unknown for options of a user's task."""
    task, own = run.plan.get("task"), dig(run.plan, "task", "options")
    spec = tasks.BUILT_IN.get(text(dig(task, "name")) or "") if dig(task, "file") is None else None
    return {
        name: field
        for name, field in FIELDS.items()
        if not isinstance(own, dict) or name not in own
    } | dict(spec.own if spec else {})


def _setting(name: str, value: object, origin: str, field: Field[Any] | None) -> list[object]:
    meaning = str(field.metadata["help"]) if field else ""
    unit = str(field.metadata["unit"]) if field else ""
    description = f"{meaning} ({unit})" if unit and meaning else meaning
    return [
        name,
        code(plain(value)),
        # plan.json has the plain word, which shown() does not translate
        {"": shown(DEFAULT if origin == DEFAULT else origin), "class_": "from"},
        {"": description, "class_": "from what"},
    ]


def plain(value: object) -> str:
    """A value of a configuration, as one would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


def _command(run: Run) -> Html | None:
    script = text(dig(run.plan, "command", "script"))
    if script is None:
        return None
    args = redact.words(map(str, items(dig(run.plan, "command", "args"))))
    # a browser breaks a line after any hyphen: --compile=0 would be `--` and `compile=0`
    whole_words = (
        part for word in command(script, args).split(" ") for part in (tag("span", word), " ")
    )
    return tag(
        "p", msg("monitor.report.sections.started_by"), tag("code", *whole_words, class_="words")
    )


def data(run: Run) -> Html | None:
    """The data, and the composition of a batch."""
    rows: list[Sequence[object]] = []
    batch = run.plan.get("batch")
    if isinstance(batch, dict):
        try:
            rows.append([msg("monitor.report.data.batch"), Batch(**batch).sentence(run.counted)])
        except TypeError:  # of another version
            rows.append(
                [msg("monitor.report.data.batch"), ", ".join(f"{k} {v}" for k, v in batch.items())]
            )
    for plan_key in ("device_batch_size", *SAVINGS):
        if (value := value_of(run.plan, plan_key)) is not None:
            rows.append([plan_key, f"{value}: {dig(run.plan, plan_key, 'reason')}"])
    source = run.plan.get("data")
    if isinstance(source, dict):
        size = number(source.get("bytes"))
        name, files = source.get("name"), units.plural(whole(source.get("files")) or 0, "file")
        amount = (
            msg("monitor.report.data.files", name=name, files=files)
            if size is None
            else msg(
                "monitor.report.data.files_size", name=name, files=files, size=units.size(size)
            )
        )
        rows.append([msg("monitor.report.data.data"), amount])
    words = (
        ("documents", msg("monitor.report.data.documents")),
        ("train_tokens", msg("monitor.report.data.training_tokens")),
        ("val_tokens", msg("monitor.report.data.validation_tokens")),
    )
    rows += [
        [word, count(number(run.data.get(key)))]
        for key, word in words
        if number(run.data.get(key)) is not None
    ]
    words = (
        ("total_steps", msg("monitor.report.data.total_steps")),
        ("steps_per_epoch", msg("monitor.report.data.steps_per_epoch")),
        ("epochs", msg("monitor.report.data.epochs")),
    )
    rows += [
        [word, f"{value:,}"]
        for key, word in words
        if (value := whole(run.data.get(key)))  # 0: no limit
    ]
    if not run.data and run.metrics.steps and (total := run.state["progress"]["total_steps"]):
        rows.append([msg("monitor.report.data.total_steps"), f"{total:,}"])
    parameters = number(run.summary.get("parameters"))
    if parameters:
        rows.append([msg("monitor.report.data.parameters"), count(parameters)])
    total, needed, free = (
        whole(dig(run.plan, "memory", f"{name}_bytes")) for name in ("total", "needed", "free")
    )
    if total is not None and needed is not None:
        estimate = msg("monitor.report.data.memory", total=gib(total), needed=gib(needed))
        if free is not None:
            estimate = msg("monitor.report.data.memory_free", estimate=estimate, free=gib(free))
        rows.append([msg("monitor.report.data.estimated_memory", memory=run.memory_word), estimate])
    return table((), rows) if rows else None


def environment(run: Run) -> Html | None:
    rows = list(facts(run).items())
    parts: list[object] = [table((), rows) if rows else None]
    variables = [v for v in items(run.plan.get("variables")) if isinstance(v, dict)]
    if variables:
        lines = [
            [
                str(v.get("name")),
                code(v.get("value")),
                *({"": v.get(key), "class_": "from"} for key in ("origin", "why")),
            ]
            for v in variables
        ]
        parts.append(
            folded(
                msg(
                    "monitor.report.machine.variables",
                    variables=units.plural(len(variables), "environment variable"),
                ),
                table(
                    (
                        msg("monitor.report.column.name"),
                        msg("monitor.report.column.value"),
                        "",
                        msg("monitor.report.column.why"),
                    ),
                    lines,
                ),
            )
        )
    return join(parts) if rows or variables else None


def facts(run: Run) -> dict[str, str]:
    """Machine and software from the plan, name → value; the comparison of runs uses these."""
    plan, out = run.plan, {}
    for key, name in (
        ("ranks", msg("monitor.report.machine.ranks")),
        ("torch", "torch"),
        ("driver", msg("monitor.report.machine.driver")),
    ):
        if plan.get(key) is not None:
            out[name] = str(plan[key])
    for key in DECISIONS:
        if (value := value_of(plan, key)) is not None:
            reason = dig(plan, key, "reason")
            out[key] = f"{plain(value)}: {reason}" if reason else plain(value)
    deterministic = dig(plan, "config", "deterministic")
    if deterministic is not None and not run.script:
        out["deterministic"] = plain(deterministic)
    for i, gpu in enumerate(g for g in items(plan.get("gpus")) if isinstance(g, dict)):
        size = number(gpu.get("total_bytes"))
        out[f"GPU {gpu.get('index', i)}"] = f"{gpu.get('name')}" + (
            f", {size / GIB:.0f} GiB" if size else ""
        )
    nodes = whole(dig(plan, "place", "nnodes"))
    if nodes and nodes > 1:
        out[msg("monitor.report.machine.machines")] = str(nodes)
    out |= {
        check_title(str(c.get("name"))): str(c.get("text"))
        for c in run.checks
        if c.get("name") in ("CPU", "host memory")
    }
    return out

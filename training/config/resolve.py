"""Merge of all sources: flag > environment > resumed run > config file > default; every value is
converted, range-checked and has an origin."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from training.config import secrets
from training.config.convert import as_text, convert, shown
from training.config.flags import CommandLine
from training.config.loader import Values
from training.config.origin import DEFAULT, FILE, FLAG, VARIABLE, Origin
from training.config.schema import FIELDS, Config, Known, describe
from training.core import messages
from training.core.errors import Problem

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues

PREFIX = "DUET_"
# Variables with the prefix that are not fields: internal communication and tests.
INTERNAL = {
    *("DUET_ROOT", "DUET_PYTHON", "DUET_RUN_DIR", "DUET_LOG_FILE", "DUET_STORE_FD"),
    *("DUET_SCRIPT", "DUET_SUPERVISED", "DUET_TOKEN", "DUET_ATTEMPT"),
}


@dataclass
class Resolved:
    config: Config
    origins: dict[str, str]  # field → origin of its value
    problems: list[Problem] = field(default_factory=list)
    options: FieldValues = field(default_factory=dict)  # task-specific fields


def resolve(
    line: CommandLine,
    file: Values,
    environ: Mapping[str, str],
    resumed: Values | None = None,
    fields: Known = FIELDS,
) -> Resolved:
    """The configuration, with all problems of all sources; an invalid field keeps its default.
    `fields`: those of the task."""
    problems: list[Problem] = []
    values: FieldValues = {}
    origins = dict.fromkeys(fields, DEFAULT)
    problems += [_unknown_key(name, *file[name], fields) for name in file if name not in fields]
    problems += _unknown_variables(environ, fields)
    for name in fields:
        found = _lookup(name, fields, line, file, environ, resumed or {})
        if found is None:
            continue
        raw, origin, is_text = found
        value, problem = convert(name, raw, is_text, fields)
        if problem is not None:
            problems.append(_wrong_value(name, raw, origin, problem, fields))
        else:
            values[name], origins[name] = value, origin
    # Fields that the task does not have keep their defaults and are not in the plan.
    origins = dict.fromkeys(FIELDS, DEFAULT) | origins
    config = Config(
        **{name: value for name, value in values.items() if fields[name] is FIELDS.get(name)}
    )
    options = {
        name: values.get(name, f.default) for name, f in fields.items() if f is not FIELDS.get(name)
    }
    config.use_dummy_wandb = config.use_dummy_wandb or config.wandb_run == "dummy"
    if config.persistent_workers and config.num_workers == 0:
        problems.append(
            Problem(
                "config.workers_conflict",
                f"persistent_workers is on ({origins['persistent_workers']}) but num_workers is 0 "
                f"({origins['num_workers']})",
                "at least 1 worker with persistent_workers",
                ["--num_workers=2", "--persistent_workers=false"],
                "persistent_workers",
            )
        )
    problems += secrets.problems(config.notify, origins["notify"])
    if (
        isinstance(config.activation_checkpointing, int)
        and config.activation_checkpointing > config.depth
    ):
        problems.append(
            Problem(
                "config.checkpointing_depth",
                f"activation_checkpointing is {config.activation_checkpointing} "
                f"({origins['activation_checkpointing']}), "
                f"but depth is {config.depth} ({origins['depth']})",
                f"at most {config.depth} (blocks), auto or none",
                [f"--activation_checkpointing={config.depth}", "--activation_checkpointing=auto"],
                "activation_checkpointing",
            )
        )
    if config.warmup_ratio + config.warmdown_ratio > 1:
        problems.append(
            Problem(
                "config.schedule_ratios",
                f"warmup_ratio {config.warmup_ratio} ({origins['warmup_ratio']}) + warmdown_ratio "
                f"{config.warmdown_ratio} "
                f"({origins['warmdown_ratio']}) exceeds 1",
                "a sum of at most 1",
                field="warmup_ratio",
            )
        )
    return Resolved(config, origins, problems, options)


def _lookup(
    name: str,
    fields: Known,
    line: CommandLine,
    file: Values,
    environ: Mapping[str, str],
    resumed: Values,
) -> tuple[Any, Origin, bool] | None:
    """(value, origin, whether it is text to parse) from the source with the highest precedence;
    None: the default."""
    if name in line.flags:
        text, typed = line.flags[name]
        return text, Origin(f"from {typed} on the command line", FLAG, typed), True
    for variable in (PREFIX + name.upper(), fields[name].metadata["env"]):
        if variable and variable not in INTERNAL and environ.get(variable):
            return (
                environ[variable],
                Origin(f"from {variable} in the environment", VARIABLE, variable),
                True,
            )
    for source in (resumed, file):
        if name in source:
            value, origin = source[name]
            return value, Origin(f"from {origin}", FILE), False
    return None


def _unknown_variables(environ: Mapping[str, str], fields: Known) -> list[Problem]:
    known = [PREFIX + name.upper() for name in {**FIELDS, **fields}]
    out = []
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in {*known, *INTERNAL, messages.VARIABLE}:
            out.append(_unknown_variable(variable, environ[variable], fields))
    return out


def _unknown_key(name: str, raw: Any, origin: str, fields: Known) -> Problem:
    """The problem of an unknown key in a config file."""
    from training.config import meant

    if name in FIELDS:
        return Problem(
            "field.other_task",
            f"{name} is a field of {FIELDS['task'].default}, which is not the task ({origin})",
            "",
            [f"delete the line   # {origin}"],
        )
    found = meant.name(name, as_text(raw), fields)
    fixes = [
        meant.line(changes, origin, fields)
        for changes in found.changes
        if changes and all(n in fields for n in changes)
    ]
    why = f": {found.why}" if found.why else ""
    return Problem(
        "field.unknown",
        f"{name} is not a known field ({origin}){why}",
        found.allowed or "a field listed by --help",
        fixes,
    )


def _unknown_variable(variable: str, text: str, fields: Known) -> Problem:
    from training.config import meant

    found = meant.name(variable.removeprefix(PREFIX).lower(), text, fields)
    fixes = [
        f"unset {variable}; export "
        + " ".join(f"{PREFIX}{n.upper()}={shlex.quote(v)}" for n, v in changes.items())
        for changes in found.changes
        if changes and all(n in fields for n in changes)
    ]
    why = f": {found.why}" if found.why else ""
    return Problem(
        "environment.unknown_field",
        f"{variable} is set in the environment but matches no field{why}",
        found.allowed,
        [*fixes, f"unset {variable}"],
    )


def _wrong_value(name: str, raw: Any, origin: Origin, problem: str, fields: Known) -> Problem:
    from training.config import meant

    near, note = meant.value(name, raw, fields)
    if origin.source == FLAG:
        fixes = [f"--{name}={shlex.quote(v)}" for v in near]
    elif origin.source == VARIABLE:
        fixes = [f"export {origin.name}={shlex.quote(v)}" for v in near]
    else:
        fixes = [meant.line({name: v}, origin, fields) for v in near]
    what = f"{name} is {shown(raw)} ({origin}){problem}" + (f": {note}" if note else "")
    return Problem("field.value", what, describe(name, fields), fixes, name)

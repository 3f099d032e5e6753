"""Merge of all sources: flag > environment > resumed run > config file > default; every value is
converted, range-checked and has an origin."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
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
from training.core.messages import msg
from training.core.project import DOCTOR, PROBLEMS, STARTED_AS

if TYPE_CHECKING:
    from training.config.translate import Sizes
    from training.core.contracts.kinds import FieldValues

PREFIX = "DUET_"
RESTARTED = "DUET_RESTARTED"  # torchrun has started this rank again: DUET_RESUME is not the user's
# Variables with the prefix that are not fields: internal communication and tests.
INTERNAL = {
    *("DUET_ROOT", "DUET_PYTHON", "DUET_RUN_DIR", "DUET_LOG_FILE", "DUET_STORE_FD"),
    *("DUET_SCRIPT", "DUET_SUPERVISED", "DUET_TOKEN", "DUET_ATTEMPT", "DUET_NODE", "DUET_JOINS"),
    *("DUET_AGENT", "DUET_OWN_DATA", "DUET_ACTIVE", RESTARTED, DOCTOR, PROBLEMS, STARTED_AS),
}

# Kubernetes sets these in every pod for each Service of the namespace, as for one named duet-…:
# DUET_…_SERVICE_HOST, DUET_…_PORT=tcp://10.0.0.1:80, DUET_…_PORT_80_TCP_ADDR.
_OF_SERVICE = re.compile(
    r"\w+(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT_\d+_[A-Z]+(_\w+)?)=|\w+_PORT=(tcp|udp|sctp)://"
)


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
    ranks: int = 0,
) -> Resolved:
    """The configuration, with all problems of all sources; an invalid field keeps its default.
    `fields`: those of the task; `ranks`: on this machine, 0 if unknown."""
    problems: list[Problem] = []
    values: FieldValues = {}
    origins = dict.fromkeys(fields, DEFAULT)
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
    problems = [*_unknown_keys(file, config, ranks, fields, origins["task"]), *problems]
    options = {
        name: values.get(name, f.default) for name, f in fields.items() if f is not FIELDS.get(name)
    }
    config.use_dummy_wandb = config.use_dummy_wandb or config.wandb_run == "dummy"
    if config.persistent_workers and config.num_workers == 0:
        problems.append(
            Problem(
                "config.workers_conflict",
                msg(
                    "config.resolve.workers_conflict",
                    workers_origin=origins["persistent_workers"],
                    number_origin=origins["num_workers"],
                ),
                msg("config.resolve.one_worker"),
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
                msg(
                    "config.resolve.checkpointing_depth",
                    blocks=config.activation_checkpointing,
                    blocks_origin=origins["activation_checkpointing"],
                    depth=config.depth,
                    depth_origin=origins["depth"],
                ),
                msg("config.resolve.at_most_blocks", depth=config.depth),
                [f"--activation_checkpointing={config.depth}", "--activation_checkpointing=auto"],
                "activation_checkpointing",
            )
        )
    if config.warmup_ratio + config.warmdown_ratio > 1:
        problems.append(
            Problem(
                "config.schedule_ratios",
                msg(
                    "config.resolve.schedule_ratios",
                    warmup=config.warmup_ratio,
                    warmup_origin=origins["warmup_ratio"],
                    warmdown=config.warmdown_ratio,
                    warmdown_origin=origins["warmdown_ratio"],
                ),
                msg("config.resolve.sum_at_most_1"),
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
        return text, Origin(msg("config.origin.flag", typed=typed), FLAG, typed), True
    if variable := variable_of(name, fields, environ):
        shown_as = msg("config.origin.variable", variable=variable)
        return environ[variable], Origin(shown_as, VARIABLE, variable), True
    for source in (resumed, file):
        if name in source:
            value, origin = source[name]
            return value, Origin(msg("config.origin.file", origin=origin), FILE, origin), False
    return None


def variable_of(name: str, fields: Known, environ: Mapping[str, str]) -> str | None:
    """The variable that sets a field, unless a flag does."""
    for variable in (PREFIX + name.upper(), fields[name].metadata["env"]):
        own = variable in INTERNAL or variable == messages.VARIABLE
        if variable and not own and environ.get(variable) and not _is_of_service(variable, environ):
            return str(variable)
    return None


def command_origins(
    names: Iterable[str], line: CommandLine, environ: Mapping[str, str]
) -> dict[str, Origin]:
    """The origins of those fields that a flag or variable sets."""
    found = {name: _lookup(name, FIELDS, line, {}, environ, {}) for name in names}
    return {name: one[1] for name, one in found.items() if one}


def _unknown_variables(environ: Mapping[str, str], fields: Known) -> list[Problem]:
    known = {PREFIX + name.upper() for name in {**FIELDS, **fields}}
    known |= {*INTERNAL, messages.VARIABLE}
    out = []
    for variable in sorted(environ):
        own = variable.startswith(PREFIX) and not _is_of_service(variable, environ)
        if own and variable not in known:
            out.append(_unknown_variable(variable, environ[variable], fields))
    return out


def _is_of_service(variable: str, environ: Mapping[str, str]) -> bool:
    return _OF_SERVICE.match(f"{variable}={environ[variable]}") is not None


def _unknown_keys(
    file: Values, config: Config, ranks: int, fields: Known, task_origin: str
) -> list[Problem]:
    """The problems of unknown keys in a config file."""
    unknown = [name for name in file if name not in fields]
    if not unknown:
        return []
    from training.config import meant

    sizes = meant.sizes_of(config, ranks, fields)
    task = f"{config.task} ({task_origin})"
    return [_unknown_key(name, *file[name], fields, sizes, task) for name in unknown]


def _unknown_key(
    name: str, raw: Any, origin: str, fields: Known, sizes: Sizes, now: str
) -> Problem:
    from training.config import foreign_names, meant

    if name in FIELDS:
        return Problem(
            "field.other_task",
            msg(
                "config.resolve.other_task",
                name=name,
                task=FIELDS["task"].default,
                origin=origin,
                now=now,
            ),
            "",
            [msg("config.resolve.delete_line", origin=origin)],
        )
    found = meant.Meant()
    if name not in foreign_names.ONLY_FLAGS:
        found = meant.name(name, as_text(raw), fields, sizes)
    fixes = [
        meant.line(meant.that_divides(changes, meant.with_changes(sizes, changes)), origin, fields)
        for changes in found.changes
        if changes and all(n in fields for n in changes)
    ]
    why = msg("config.resolve.because", why=found.why) if found.why else ""
    return Problem(
        "field.unknown",
        msg("config.resolve.unknown_key", name=name, origin=origin, why=why),
        found.allowed or msg("config.resolve.listed_by_help"),
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
    why = msg("config.resolve.because", why=found.why) if found.why else ""
    return Problem(
        "environment.unknown_field",
        msg("config.resolve.unknown_variable", variable=variable, why=why),
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
        fixes = [meant.line({name: v}, origin.name, fields) for v in near]
    what = msg(
        "config.resolve.wrong_value", name=name, raw=shown(raw), origin=origin, problem=problem
    ) + (msg("config.resolve.because", why=note) if note else "")
    return Problem("field.value", what, describe(name, fields), fixes, name)

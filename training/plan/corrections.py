"""Suggested fixes as whole commands: the user's command with every known error corrected."""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Iterable
from dataclasses import replace

from training.config import batch, flags, meant
from training.config.foreign_names import row_of
from training.config.schema import FIELDS, Known
from training.config.translate import RANKS, Changes, Sizes
from training.core import rundir
from training.core.errors import Problem
from training.core.jsonl import mtime
from training.core.messages import msg
from training.core.project import LAUNCH_SCRIPT
from training.plan.cli_args import SCRIPTS, ParsedArgs, command, is_config, is_number, takes_ranks
from training.tasks import DEFAULT, everything

_VARIABLE = re.compile(r"[A-Z][A-Z_]*=")


def problems(
    asked: ParsedArgs,
    script: str,
    args: list[str],
    others: list[Problem],
    ranks: int = 0,
    nnodes: int = 0,
) -> list[Problem]:
    """The problem of every unknown flag, then `others`. A suggestion of flags alone becomes the
    whole command, with the unknown flags and invalid values of the other problems corrected too,
    unless one of them has no suggestion: that command would fail again. `ranks`: on each of
    `nnodes` machines; 0: unknown."""
    found, sizes = names(
        asked.line.unknown, asked.kind.fields, _sizes(asked, ranks, nnodes), asked.line.flags
    )
    every: Changes = {}
    for one in found.values():
        every |= one.changes[0] if one.changes else {}
    if not asked.typed and takes_ranks(script):
        every = {RANKS: "2"} | every

    unsolved = any(not p.fixes for p in others)
    firsts = [(as_changes(p.fixes[0], asked.kind.fields) or {}) if p.fixes else {} for p in others]

    def whole(changes: Changes, without: int | None = None) -> str:
        if unsolved:
            return _flags_alone(changes)
        first: Changes = {}
        for number, one in enumerate(firsts):
            first |= one if number != without else {}
        return _whole(asked, script, args, first | every | changes, sizes)

    out = [
        unknown(
            u,
            m,
            asked.kind.fields,
            [whole(c) for c in m.changes] or [f"{_program(script)} --help"],
            f"{asked.resolved.config.task} ({asked.resolved.origins['task']})",
        )
        for u, m in found.items()
    ]
    for number, problem in enumerate(others):
        fixes = [(fix, as_changes(fix, asked.kind.fields)) for fix in problem.fixes]
        if problem.code == "flag.twice":
            fixes = [(fix, _last_value(changes or {}, firsts, others)) for fix, changes in fixes]
            fixes = [(fix, changes) for fix, changes in fixes if changes]
        full = [fix if changes is None else whole(changes, number) for fix, changes in fixes]
        out.append(replace(problem, fixes=list(dict.fromkeys(full))))
    return out


def later(script: str, args: list[str], fields: Known, found: list[Problem]) -> list[Problem]:
    """Problems of a request that was valid so far: suggestions of flags alone become the command
    with these flags."""

    def whole(fix: str) -> str:
        changes = as_changes(fix, fields)
        if changes is None or any(name.isupper() for name in changes):
            return fix
        given = {n: None if n in flags.SWITCHES and not v else v for n, v in changes.items()}
        return command(script, args, **given)

    return [replace(problem, fixes=[whole(fix) for fix in problem.fixes]) for problem in found]


def names(
    unknown: Iterable[flags.Unknown], fields: Known, sizes: Sizes, given: Container[str] = ()
) -> tuple[dict[flags.Unknown, meant.Meant], Sizes]:
    """What each unknown flag means, in the order of the command line, and the sizes after all of
    them. Flags whose translation depends on sizes are translated last. `given`: the known flags."""
    actions = tuple(n for n in flags.ACTIONS if n in flags.SWITCHES)
    found: dict[flags.Unknown, meant.Meant] = {}
    in_order = list(unknown)
    for one in sorted(in_order, key=lambda u: bool((row := row_of(u.name)) and row.sized)):
        found[one] = meant.name(one.name, one.text, fields, sizes, actions, "--", given)
        if found[one].changes:
            sizes = meant.with_changes(sizes, found[one].changes[0])
    return {one: found[one] for one in in_order}, sizes


def unknown(
    one: flags.Unknown, found: meant.Meant, fields: Known, fixes: list[str], task: str
) -> Problem:
    """The problem of one unknown flag. `task`: the present one and its origin."""
    if one.name in FIELDS and one.name not in fields:
        return Problem(
            "field.other_task",
            msg("plan.flag.other_task", typed=one.typed, task=DEFAULT.name, now=task),
            "",
            fixes,
        )
    what = (
        msg("plan.flag.unknown_because", typed=one.typed, why=found.why)
        if found.why
        else msg("plan.flag.unknown", typed=one.typed)
    )
    dashes = msg("plan.flag.two_dashes") if not one.typed.startswith("--") else ""
    return Problem("flag.unknown", what, found.allowed or dashes, fixes)


def as_changes(fix: str, fields: Known) -> Changes | None:
    """A suggestion of flags alone (after variables, with N=2 for the number of processes) as
    changes; None for any other."""
    try:
        words = shlex.split(fix)
    except ValueError:
        return None
    changes: Changes = {}
    for word in words:
        name, equals, text = word.partition("=")
        if _VARIABLE.match(word):
            changes[name] = text
        elif (
            word.startswith("--")
            and name[2:] in (*fields, *flags.ACTIONS)
            and (equals or name[2:] in flags.SWITCHES)
            and "…" not in word
        ):
            changes[name[2:]] = text
        else:
            return None
    return (
        changes
        if any(word.startswith("--") or word.startswith(f"{RANKS}=") for word in words)
        else None
    )


def _last_value(typed: Changes, firsts: list[Changes], others: list[Problem]) -> Changes:
    """The last value of a flag given twice, or the suggestion for it; {} for an invalid one
    without a suggestion."""
    if any(p.field in typed and not p.fixes for p in others):
        return {}
    return typed | {name: first[name] for first in firsts for name in typed if name in first}


def _flags_alone(changes: Changes) -> str:
    variables = [f"{n}={shlex.quote(v)}" for n, v in changes.items() if n.isupper()]
    return " ".join(
        [*variables, meant.flags_of({n: v for n, v in changes.items() if not n.isupper()})]
    )


def _program(script: str) -> str:
    return "./" + (LAUNCH_SCRIPT if script not in SCRIPTS or not script.endswith(".sh") else script)


def _sizes(asked: ParsedArgs, ranks: int, nnodes: int) -> Sizes:
    plans = sorted(
        asked.experiments.glob("*/plan.json"), key=lambda p: (mtime(p) or 0.0, p), reverse=True
    )
    runs = tuple(plan.parent.name for plan in plans if rundir.read_json(plan))
    return meant.sizes_of(asked.resolved.config, ranks, asked.kind.fields, runs, nnodes)


def _whole(asked: ParsedArgs, script: str, args: list[str], changes: Changes, sizes: Sizes) -> str:
    out = {i for one in asked.line.unknown for i in range(one.start, one.stop)}
    words = [word for i, word in enumerate(args) if i not in out]
    changes = dict(changes)
    changes |= _repair(asked, meant.with_changes(sizes, changes), changes)
    order = [RANKS, *asked.kind.fields]
    changes = {
        n: changes[n]
        for n in sorted(changes, key=lambda n: order.index(n) if n in order else len(order))
    }
    variables = [
        f"{n}={shlex.quote(changes.pop(n))}" for n in list(changes) if n.isupper() and n != RANKS
    ]
    number = changes.pop(RANKS, None)
    if number is not None:
        words = _without_number(script, words)
    if number is not None and SCRIPTS.get(script) != int(number):
        script, words = LAUNCH_SCRIPT, _with_ranks(script, words, number)
    return " ".join(
        [
            *variables,
            command(
                script,
                words,
                **{n: None if n in flags.SWITCHES and not v else v for n, v in changes.items()},
            ),
        ]
    )


def _without_number(script: str, words: list[str]) -> list[str]:
    """Without a number of processes in another place than the first argument of launch_train.sh."""
    at = flags.parse(words, everything()).positional_at[takes_ranks(script) :]
    return [word for i, word in enumerate(words) if i not in at or not is_number(word)]


def _with_ranks(script: str, words: list[str], number: str) -> list[str]:
    at = flags.parse(words, everything()).positional_at if takes_ranks(script) else []
    if at and not is_config(words[at[0]]):
        return [*words[: at[0]], number, *words[at[0] + 1 :]]
    return [number, *words]


def _repair(asked: ParsedArgs, sizes: Sizes, changes: Changes) -> Changes:
    """A total batch size that divides, where the changes make one necessary, and a limit above
    it."""
    config, origins = asked.resolved.config, asked.resolved.origins
    each = changes.get("device_batch_size", config.device_batch_size)
    if asked.bad({"device_batch_size", "total_batch_size", "max_seq_len"} - changes.keys()):
        return {}
    if (
        asked.kind.total_follows
        and origins["total_batch_size"] == "default"
        and "total_batch_size" not in changes
    ):
        return {}
    seq_len = asked.kind.seq_len(replace(config, max_seq_len=sizes.max_seq_len))
    size, total = 1 if each == "auto" else sizes.device_batch_size, sizes.total_batch_size
    repaired: Changes = {}
    if not batch.split(size, seq_len, sizes.all_ranks, total):
        total = batch.repairs(size, seq_len, sizes.all_ranks, total)[0][1]
        repaired["total_batch_size"] = str(total)
    most = int(changes.get("max_total_batch_size", config.max_total_batch_size))
    if 0 < most < total:
        repaired["max_total_batch_size"] = str(2 * total)
    return repaired

"""`./launch_train.sh N --script main.py -- ARGS`: a torchrun-style user script, unchanged, under
Duet's launcher.

The script gets the environment, checks, per-rank logs, clean-up, exit codes and failure card. Flags
of Duet's own training do not apply.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config import flags, resolve
from training.config.schema import FIELDS
from training.config.translate import RANKS, Changes
from training.core import suggest
from training.core.errors import Problem, UserError
from training.host.placement import RANK
from training.plan.cli_args import SCRIPTS, command, folder, number_of_ranks
from training.plan.request import LaunchRequest, common, count, place_of, run_name
from training.plan.script_words import SEPARATOR, USED, split

if TYPE_CHECKING:
    from training.core.contracts.plan import ScriptRecord

SCRIPT = "launch_train.sh"
ALLOWED = "the script's own arguments after --"


@dataclass(kw_only=True)
class ScriptLaunchRequest(LaunchRequest):
    """A checked request to start a script."""

    runs: Script

    @property
    def base_name(self) -> str:
        return Path(self.runs.path).stem

    def command(self, **changes: Any) -> str:
        return command_of(self.script, self.args, **changes)

    def command_with(self, ranks: int) -> str:
        own = split(self.args)[0]
        at = next(i for i in range(len(own)) if flags.parse(own[: i + 1]).positional)
        return replace(self, args=[*self.args[:at], str(ranks), *self.args[at + 1 :]]).command()


@dataclass(frozen=True)
class Script:
    """What the ranks execute; `python` is None for a program other than a Python file."""

    path: str
    args: list[str]
    python: str | None
    python_reason: str

    def record(self) -> ScriptRecord:
        return {
            "path": self.path,
            "args": self.args,
            "python": self.python,
            "python_reason": self.python_reason,
        }


def asked_for(args: list[str]) -> bool:
    """Whether --script is on the command line; arguments after -- belong to the script."""
    own, _ = split(args)
    return any(word == "--script" or word.startswith("--script=") for word in own)


def command_of(program: str, args: list[str], /, **changes: Any) -> str:
    """The user's own command with these launcher flags changed."""
    own, theirs = split(args)
    return " ".join(
        [command(program, own, **changes), *([SEPARATOR, shlex.join(theirs)] if theirs else [])]
    )


def _not_for_scripts(name: str) -> bool:
    """Whether this is a flag of Duet's own training, including its config."""
    return name == "config" or (name in FIELDS and name not in USED)


def read(program: str, args: list[str], environ: Mapping[str, str]) -> ScriptLaunchRequest:
    """Check everything that does not depend on the machine. Raises UserError with all problems at
    once."""
    own, theirs = split(args)
    line = flags.parse(own)
    if not line.flags.get("script", ("", ""))[0]:
        fix = f"./{SCRIPT} 2 --script main.py -- ARGUMENTS   # {ALLOWED}"
        raise UserError(
            Problem("flag.no_value", "--script has no value", "a Python file or a program", [fix])
        )
    problems, positional = line.problems, list(line.positional)
    typed = SCRIPTS[program] or number_of_ranks(line, positional, problems)
    if program != SCRIPT:
        problems.append(
            Problem("flag.other_script", f"--script is for {SCRIPT}", "", [f"N={typed}"])
        )
    if "save_config" in line.flags:
        problems.append(
            Problem(
                "save_config.script",
                "--save_config cannot be used with --script, which has its own configuration",
                "",
            )
        )
    resolved = resolve.resolve(line, {}, {k: v for k, v in environ.items() if not _other_field(k)})
    problems += resolved.problems
    config, origins = resolved.config, resolved.origins
    if isinstance(config.retries, int) and config.retries:
        what = (
            f"retries is {config.retries} ({origins['retries']}), but user scripts are not "
            f"restarted: their checkpoints are unknown"
        )
        problems.append(Problem("script.retries", what, "0", ["--retries=0"]))
    if origins["device"] == "default":
        config.device = "auto"
    script = _script(line.flags["script"][0], theirs, environ, problems)
    experiments = folder("out_dir", resolved)
    place = place_of(program, config, environ, problems, 0)
    problems += run_name(
        config, origins, experiments, None, place, partial(command_of, program, args)
    )
    if place and place.kind == RANK:
        text = f"--script starts ranks, but {place.reason}"
        why = "this process is a rank"
        problems.append(
            Problem(
                "launch.nested",
                text,
                "one launcher",
                [
                    f"python {shlex.quote(script.path)} …   # {why}",
                    "--launcher=spawn",
                ],
            )
        )
    if problems or place is None or _moved(line, own):
        raise UserError(
            [*_misplaced(line, own, theirs, typed), *_in_full(problems, line, own, theirs, typed)]
        )
    ranks, local, notes = count(place, typed, program, 0)
    shared = common(program, args, line, resolved, place)
    return ScriptLaunchRequest(**shared, ranks=ranks, local_ranks=local, notes=notes, runs=script)


def _misplaced(
    line: flags.CommandLine, own: list[str], theirs: list[str], ranks: int
) -> list[Problem]:
    """Arguments before -- that belong to the script or to another launcher, each with the whole
    command."""
    from training.config import foreign_names, meant

    out = []
    command = _rebuilt(line, own, theirs, ranks, {})
    used = {name: FIELDS[name] for name in USED}
    for one in line.unknown:
        if _of_a_launcher(one):
            row = foreign_names.row_of(one.name)
            out.append(
                Problem(
                    "flag.unknown",
                    f"{one.typed} is not a known flag: {row.note if row else ''}",
                    "",
                    [command],
                )
            )
            continue
        near = [n for n in suggest.suggest(one.name, list(used)) if meant.fits(n, one.text, used)][
            :1
        ]
        fixes = [
            _rebuilt(line, own, theirs, ranks, {n: one.text or "true"}, without=one) for n in near
        ]
        out.append(
            Problem(
                "script.own_flag",
                f"{one.typed} is not a flag of the launcher",
                ALLOWED,
                [*fixes, command],
            )
        )
    for name in dict.fromkeys(name for name, _, _ in line.places if _not_for_scripts(name)):
        out.append(
            Problem(
                "script.field",
                f"{line.flags[name][1]} is a field of Duet's own training, not of --script",
                ALLOWED,
                [command],
            )
        )
    out += [
        Problem(
            "script.extra_argument", f"{own[at]!r} is one argument too many", ALLOWED, [command]
        )
        for at in _extra(line)
    ]
    return out


def _in_full(
    problems: list[Problem], line: flags.CommandLine, own: list[str], theirs: list[str], ranks: int
) -> list[Problem]:
    """Expand suggestions of flags alone to whole commands."""
    from training.plan.corrections import as_changes

    out = []
    for problem in problems:
        fixes = [(fix, as_changes(fix, FIELDS)) for fix in problem.fixes]
        whole = [
            fix if changes is None else _rebuilt(line, own, theirs, ranks, changes)
            for fix, changes in fixes
        ]
        out.append(replace(problem, fixes=whole))
    return out


def _of_a_launcher(one: flags.Unknown) -> bool:
    """Whether this is a launch flag of torchrun or accelerate."""
    from training.config.foreign_names import ACCELERATE, TORCHRUN, row_of

    row = row_of(one.name)
    launches = {RANKS, "nnodes", "node_rank", "master_addr", "master_port", "retries"}
    return (
        row is not None
        and (TORCHRUN in row.tools or ACCELERATE in row.tools)
        and set(row.to) <= launches
    )


def _extra(line: flags.CommandLine) -> list[int]:
    """Positions of arguments after the number of processes."""
    return line.positional_at[1:]


def _moved(line: flags.CommandLine, own: list[str]) -> list[str]:
    """The arguments before -- that do not belong there."""
    spans = [(one.start, one.stop) for one in line.unknown]
    spans += [(start, stop) for name, start, stop in line.places if _not_for_scripts(name)]
    spans += [(at, at + 1) for at in _extra(line)]
    return [own[i] for start, stop in sorted(spans) for i in range(start, stop)]


def _rebuilt(
    line: flags.CommandLine,
    own: list[str],
    theirs: list[str],
    ranks: int,
    changes: Changes,
    without: flags.Unknown | None = None,
) -> str:
    """The whole command with the script's own arguments after --. `without`: the flag that
    `changes` replace."""
    from training.config import meant

    launcher = [one for one in line.unknown if _of_a_launcher(one)]
    changes = dict(changes)
    for one in launcher:
        for translated in meant.name(one.name, one.text, FIELDS).changes[:1]:
            changes = {n: v for n, v in translated.items() if n != "retries"} | changes
    gone = {
        i
        for one in [*launcher, *([without] if without else [])]
        for i in range(one.start, one.stop)
    }
    moved = {i for one in line.unknown for i in range(one.start, one.stop)} | set(_extra(line))
    moved |= {
        i for name, start, stop in line.places if _not_for_scripts(name) for i in range(start, stop)
    }
    number = changes.pop(RANKS, str(ranks or 2))
    first = line.positional_at[:1]
    kept = [word for i, word in enumerate(own) if i not in moved | gone | set(first)]
    variables = [f"{n}={shlex.quote(changes.pop(n))}" for n in list(changes) if n.isupper()]
    tail = [*(own[i] for i in sorted(moved - gone)), *theirs]
    return " ".join(
        [
            *variables,
            command(SCRIPT, [number, *kept], **changes),
            *([SEPARATOR, shlex.join(tail)] if tail else []),
        ]
    )


def _other_field(variable: str) -> bool:
    name = variable.removeprefix(resolve.PREFIX).lower()
    return variable.startswith(resolve.PREFIX) and name in FIELDS and name not in USED


def _script(
    path: str, args: list[str], environ: Mapping[str, str], problems: list[Problem]
) -> Script:
    file = Path(os.path.expanduser(path))  # noqa: PTH111 – Path.expanduser raises for an unknown user
    python, reason = interpreter(environ)
    if not file.is_file():
        near = suggest.suggest(
            file.name, [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        )
        fixes = [f"--script={shlex.quote(str(file.with_name(name)))}" for name in near]
        what = (
            f"the script {path!r} (--script) is a folder"
            if file.is_dir()
            else f"the script {path!r} (--script) does not exist"
        )
        problems.append(
            Problem(
                "script.file",
                what,
                "a Python file or a program",
                fixes,
            )
        )
    elif not os.access(file, os.R_OK):
        problems.append(
            Problem(
                "script.unreadable",
                f"the script {path!r} (--script) cannot be read",
                "",
                [f"chmod u+r {shlex.quote(str(file))}"],
            )
        )
    elif file.suffix != ".py":
        if not os.access(file, os.X_OK):
            what = f"the script {path!r} (--script) is neither a .py file nor executable"
            problems.append(
                Problem(
                    "script.file",
                    what,
                    "a Python file or a program",
                    [] if _not_executed(file, path) else [f"chmod +x {shlex.quote(str(file))}"],
                )
            )
        elif problem := _not_executed(file, path):
            problems.append(problem)
        return Script(str(file.absolute()), args, None, "")
    return Script(str(file), args, python, reason)


def _not_executed(file: Path, path: str) -> Problem | None:
    """A file that the kernel would refuse: neither ELF nor with a #! line, or with a missing
    interpreter. The interpreter's path ends at the first blank."""
    with file.open("rb") as stream:
        line = stream.readline(256).rstrip(b"\n")
    if line.startswith(b"\x7fELF"):
        return None
    words = os.fsdecode(line.removeprefix(b"#!")).split(maxsplit=1)
    shown, allowed = f"the script {path!r} (--script)", "a Python file or a program"
    if not line.startswith(b"#!") or not words:
        fix = f"add a first line to {shlex.quote(path)}: #!/bin/sh, or #!/usr/bin/env python3"
        return Problem("script.interpreter", f"{shown} has no #! line", allowed, [fix])
    if not os.access(words[0], os.X_OK):
        what = f"{shown} names an interpreter that does not exist: #!{' '.join(words)}"
        fix = f"change the first line of {shlex.quote(path)}: #!/usr/bin/env python3, for example"
        return Problem("script.interpreter", what, allowed, [fix])
    return None


def interpreter(environ: Mapping[str, str]) -> tuple[str, str]:
    """The script's Python: that of the active environment, else the launcher's."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        path = Path(environ.get(variable, ""), "bin/python")
        if environ.get(variable) and os.access(path, os.X_OK):
            return str(path), f"of the active environment ({variable})"
    return sys.executable, "of the launcher, since no environment is active"

"""`./launch_train.sh N --script main.py -- ARGS`: somebody's own torchrun-style script, unchanged, under our launcher.

It gets the environment, checks, per-rank logs, the promise that nothing is left behind, exit codes and failure card; what it
trains and how is its own, so none of our training flags mean anything here.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from training.asked import command, folder, number_of_ranks
from training.config import flags, resolve
from training.config.schema import FIELDS
from training.errors import Problem, UserError
from training.launch.place import RANK
from training.request import Launch, common, count, place_of, run_name

SCRIPT = "launch_train.sh"
SEPARATOR = "--"
EXAMPLE = f"./{SCRIPT} 2 --script main.py -- --epochs=3"
# Fields that say something about the launch of any script.
USED = (
    *(name for name, field in FIELDS.items() if field.metadata["group"] == "launch" and name != "inject"),
    *("run_name", "out_dir", "log_dir", "device", "hang_timeout", "report", "notify"),
)


@dataclass(kw_only=True)
class ScriptLaunch(Launch):
    """A checked wish to start a script."""

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
    """What the ranks execute; `python` is None for a program that is no Python file."""

    path: str
    args: list[str]
    python: str | None
    python_reason: str


def asked_for(args: list[str]) -> bool:
    """Is this a command line with --script? What follows -- belongs to the script."""
    own, _ = split(args)
    return any(word == "--script" or word.startswith("--script=") for word in own)


def split(args: list[str]) -> tuple[list[str], list[str]]:
    """(ours, the script's)."""
    at = args.index(SEPARATOR) if SEPARATOR in args else len(args)
    return args[:at], args[at + 1 :]


def command_of(program: str, args: list[str], **changes: Any) -> str:
    """The user's own command with these flags of ours changed."""
    own, theirs = split(args)
    return " ".join([command(program, own, **changes), *([SEPARATOR, shlex.join(theirs)] if theirs else [])])


def read(program: str, args: list[str], environ: Mapping[str, str]) -> ScriptLaunch:
    """Check what can be checked without looking at the machine. Raises UserError with all problems at once."""
    own, theirs = split(args)
    line = flags.parse(own)
    problems, positional = line.problems, list(line.positional)
    if program != SCRIPT:
        problems.append(Problem(f"--script is for {SCRIPT}", "", [EXAMPLE]))
    typed = number_of_ranks(positional, problems)
    for name, (_, flag) in line.flags.items():
        if name in FIELDS and name not in USED:
            fix = f"./{SCRIPT} … --script … -- {flag}=…   # if it is the script's own flag"
            problems.append(Problem(f"{flag} means nothing with --script: it is a field of our own training", "", [fix]))
    for word in positional:
        problems.append(Problem(f"{word!r} is one argument too many", "the script's own arguments after --", [EXAMPLE]))
    resolved = resolve.resolve(line, {}, {k: v for k, v in environ.items() if not _other_field(k)})
    problems += resolved.problems
    config, origins = resolved.config, resolved.origins
    if origins["device"] == "default":
        config.device = "auto"
    script = _script(line.flags["script"][0], theirs, environ, problems)
    experiments = folder("out_dir", resolved)
    place = place_of(program, config, environ, problems, 0)
    problems += run_name(config, origins, experiments, None, place, partial(command_of, program, args))
    if place and place.kind == RANK:
        text = f"--script starts ranks, but {place.reason}"
        problems.append(
            Problem(text, "one launcher", [f"python {shlex.quote(script.path)} …   # it is a rank already", "--launcher=spawn"])
        )
    if problems or place is None:
        raise UserError(problems)
    ranks, local, notes = count(place, typed, program, 0)
    shared = common(program, args, line, resolved, place)
    return ScriptLaunch(**shared, ranks=ranks, local_ranks=local, notes=notes, runs=script)


def _other_field(variable: str) -> bool:
    name = variable.removeprefix(resolve.PREFIX).lower()
    return variable.startswith(resolve.PREFIX) and name in FIELDS and name not in USED


def _script(path: str, args: list[str], environ: Mapping[str, str], problems: list[Problem]) -> Script:
    file = Path(os.path.expanduser(path))  # noqa: PTH111 – Path.expanduser raises for an unknown user
    python, reason = interpreter(environ)
    if not file.is_file():
        near = flags.suggest(file.name, [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else [])
        fixes = [f"--script={shlex.quote(str(file.with_name(name)))}" for name in near]
        what = "is a folder" if file.is_dir() else "is not there"
        problems.append(Problem(f"the script {path!r} (--script) {what}", "a Python file or a program", fixes))
    elif not os.access(file, os.R_OK):
        problems.append(Problem(f"the script {path!r} (--script) can not be read", "", [f"chmod u+r {shlex.quote(str(file))}"]))
    elif file.suffix != ".py":
        if not os.access(file, os.X_OK):
            what = f"the script {path!r} (--script) is neither a .py file nor executable"
            problems.append(Problem(what, "a Python file or a program", [f"chmod +x {shlex.quote(str(file))}"]))
        return Script(str(file.absolute()), args, None, "")
    return Script(str(file), args, python, reason)


def interpreter(environ: Mapping[str, str]) -> tuple[str, str]:
    """The script's Python: of the active environment, which holds what it imports; else ours."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        path = Path(environ.get(variable, ""), "bin/python")
        if environ.get(variable) and os.access(path, os.X_OK):
            return str(path), f"of the active environment ({variable})"
    return sys.executable, "of the launcher, since no environment is active"

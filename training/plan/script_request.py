"""`./launch_train.sh N --script main.py -- ARGS`: a torchrun-style user script, unchanged, under
Duet's launcher.

The script gets the environment, checks, per-rank logs, clean-up, exit codes and failure card. Flags
of Duet's own training do not apply.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from training.config import flags, resolve
from training.config.schema import FIELDS
from training.config.translate import RANKS, Changes
from training.core import suggest
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.project import LAUNCH_SCRIPT
from training.host import gpus, hosts
from training.host.placement import RANK
from training.plan import (
    elastic,
    launcher_flags,
    nested_launch,
    other_launchers,
    run_name,
    script_program,
)
from training.plan.cli_args import SCRIPTS, command, folder, number_of_ranks
from training.plan.request import LaunchRequest, common
from training.plan.roles import count, not_bindable, place_of
from training.plan.script_words import RUN, SEPARATOR, USED, split


@dataclass(kw_only=True)
class ScriptLaunchRequest(LaunchRequest):
    """A checked request to start a script."""

    runs: script_program.Script
    watch: bool = False  # it starts the ranks itself

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.watch:
            self.gpu_ranks = 0  # which GPUs it uses is unknown

    @property
    def base_name(self) -> str:
        """With the project's folder: the runs of all projects are in one place."""
        path = Path(self.runs.path)
        elsewhere = self.runs.module or self.runs.installed
        folder = Path.cwd() if elsewhere else path.absolute().parent
        name = self.runs.path if self.runs.module else path.stem
        return re.sub(r"[^\w.-]", "_", f"{folder.name}_{name}").lstrip("._-")[:64]

    def command(self, **changes: Any) -> str:
        return command(self.script, self.args, **changes)

    def command_with(self, ranks: int) -> str:
        own = split(self.args)[0]
        at = next(i for i in range(len(own)) if flags.parse(own[: i + 1]).positional)
        return replace(self, args=[*self.args[:at], str(ranks), *self.args[at + 1 :]]).command()


def _not_for_scripts(name: str) -> bool:
    """Whether this is a flag of Duet's own training, including its config."""
    return name == "config" or (name in FIELDS and name not in USED)


def read(program: str, args: list[str], environ: Mapping[str, str]) -> ScriptLaunchRequest:
    """Check everything that does not depend on the machine. Raises UserError with all problems at
    once."""
    own, theirs = split(args)
    line = flags.parse(own)
    launcher_flags.separate(line)
    if not line.flags.get("script", ("", ""))[0]:
        fix = f"./{LAUNCH_SCRIPT} 2 --script main.py -- ARGUMENTS   # {_own_arguments(program)}"
        raise UserError(
            Problem("flag.no_value", msg("plan.script.no_value"), msg("plan.script.allowed"), [fix])
        )
    problems, positional = line.problems, list(line.positional)
    typed = SCRIPTS[program] or number_of_ranks(line, positional, problems)
    if total := other_launchers.total(line):
        typed = max(1, total // other_launchers.machines(line))
    if program not in (LAUNCH_SCRIPT, RUN):
        problems.append(
            Problem(
                "flag.other_script",
                msg("plan.script.only_for", script=LAUNCH_SCRIPT),
                "",
                [f"N={typed}"],
            )
        )
    if "save_config" in line.flags:
        problems.append(
            Problem(
                "save_config.script",
                msg("plan.script.save_config"),
                "",
            )
        )
    resolved = resolve.resolve(line, {}, {k: v for k, v in environ.items() if not _other_field(k)})
    problems += resolved.problems
    config, origins = resolved.config, resolved.origins
    watch = line.on("watch")
    problems += _show_ranks(config.show_ranks, origins["show_ranks"], 0 if watch else typed)
    if origins["device"] == "default":
        config.device = "auto"
    script = script_program.find(
        line.flags["script"][0],
        theirs,
        environ,
        problems,
        module=line.on("module"),
        no_python=line.on("no_python") or watch,
    )
    experiments = folder("out_dir", resolved)
    # the variables of a watched command are its own
    elsewhere = launcher_flags.tool_of(line.unknown)  # the launcher that has to place the ranks
    place = place_of(
        program, config, {} if watch else environ, [] if elsewhere else problems, 0, typed
    )
    if watch and place and (place.nnodes > 1 or place.source == hosts.HEAD):
        what = msg("plan.watch.nodes", nnodes=place.nnodes)
        here = flags.without(flags.without(own, "hosts"), "hostfile")
        fix = command(program, [*here, SEPARATOR, *theirs], nnodes=1)
        problems.append(Problem("watch.nodes", what, msg("plan.watch.each"), [fix]))
    problems += run_name.problems(
        config, origins, experiments, None, place, partial(command, program, args)
    )
    if place and typed:
        problems += elastic.problems(config, origins, typed * place.nnodes, place, watch=watch)
    if place and not watch:  # a watched command starts the ranks
        problems += not_bindable(program, config, origins, place, typed * place.nnodes)
    if place and place.kind == RANK:
        problems.append(nested_launch.problem(program, args, script.path, place, environ))
    if problems or place is None or _moved(line, own):
        raise UserError(
            [
                *_misplaced(program, line, own, theirs, typed, environ),
                *_in_full(program, problems, line, own, theirs, typed),
            ]
        )
    ranks, local, notes = count(place, typed, program, 0)
    shared = common(program, args, line, resolved, place)
    return ScriptLaunchRequest(
        **shared, ranks=ranks, local_ranks=local, notes=notes, runs=script, watch=watch
    )


def _own_arguments(program: str) -> str:
    """Where the script's arguments belong."""
    return (
        msg("plan.script.arguments_of_run") if program == RUN else msg("plan.script.own_arguments")
    )


def _show_ranks(text: str, origin: str, ranks: int) -> list[Problem]:
    """`ranks`: of this machine; 0: unknown."""
    if text == "all":
        return []
    what = msg("plan.script.show_ranks", text=text, origin=origin)
    if re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        if not ranks or all(int(one) < ranks for one in text.split(",")):
            return []
        what = msg("plan.script.show_no_rank", what=what, ranks=ranks)
    allowed = msg("plan.script.show_ranks_allowed")
    return [Problem("script.show_ranks", what, allowed, ["--show_ranks=all"])]


def _misplaced(
    program: str,
    line: flags.CommandLine,
    own: list[str],
    theirs: list[str],
    ranks: int,
    environ: Mapping[str, str],
) -> list[Problem]:
    """Arguments before -- that belong to the script or to another launcher, each with the whole
    command."""
    from training.config import foreign_names, meant

    out = []
    command = _rebuilt(program, line, own, theirs, ranks, {})
    allowed = _own_arguments(program)
    used = {name: FIELDS[name] for name in USED}
    launcher = [one for one in line.unknown if launcher_flags.launches(one)]
    watched = _watched(program, line, launcher, theirs, ranks, environ)
    for one in line.unknown:
        if flag := launcher_flags.find(one):
            out.append(launcher_flags.problem(one, flag, watched or command, allowed))
            continue
        if launcher_flags.launches(one):
            total, nnodes = other_launchers.total(line), other_launchers.machines(line)
            if one.name == other_launchers.TOTAL and not watched and total % nnodes:
                what = msg("plan.script.uneven", typed=one.typed, total=total, nnodes=nnodes)
                more = {RANKS: str(total // nnodes + 1)}
                fixes = [command, _rebuilt(program, line, own, theirs, ranks, more)]
                out.append(Problem("ranks.value", what, "", list(dict.fromkeys(fixes))))
                continue
            row = foreign_names.row_of(one.name)
            what = (
                msg("plan.flag.unknown_because", typed=one.typed, why=row.note)
                if row and row.note
                else msg("plan.flag.unknown", typed=one.typed)
            )
            out.append(Problem("flag.unknown", what, "", [watched or command]))
            continue
        near = [n for n in suggest.suggest(one.name, list(used)) if meant.fits(n, one.text, used)][
            :1
        ]
        fixes = [
            _rebuilt(program, line, own, theirs, ranks, {n: one.text or "true"}, without=one)
            for n in near
        ]
        out.append(
            Problem(
                "script.own_flag",
                msg("plan.script.not_launcher_flag", typed=one.typed),
                allowed,
                [*fixes, command],
            )
        )
    for name in dict.fromkeys(name for name, _, _ in line.places if _not_for_scripts(name)):
        out.append(
            Problem(
                "script.field",
                msg("plan.script.own_field", flag=line.flags[name][1]),
                allowed,
                [command],
            )
        )
    out += [
        Problem(
            "script.extra_argument",
            msg("plan.script.one_too_many", argument=own[at]),
            allowed,
            [command],
        )
        for at in _extra(line)
    ]
    return out


def _watched(
    program: str,
    line: flags.CommandLine,
    launcher: list[flags.Unknown],
    theirs: list[str],
    ranks: int,
    environ: Mapping[str, str],
) -> str:
    """The command of another launcher whose settings are needed, under `duet watch`; '' if none
    is."""
    tool = launcher_flags.tool_of(launcher)
    if not tool:
        return ""
    if tool != launcher_flags.TORCHRUN and program == RUN and ranks == _default(line, environ):
        ranks = 0  # the default of the other launcher may be in its config
    if tool == launcher_flags.ACCELERATE:
        ranks *= other_launchers.machines(line)
    words = launcher_flags.program(line, theirs)
    return launcher_flags.watched(tool, launcher, line, ranks, words)


def _default(line: flags.CommandLine, environ: Mapping[str, str]) -> int:
    """The number of processes without -n, as training.cli.run chooses it: by now a typed one looks
    the same."""
    asked = other_launchers.listed(line)
    slots = [host.slots for host in hosts.read(asked)[0]] if hosts.given(asked) else []
    return max(slots, default=0) or len(gpus.inventory_at_start(environ).gpus) or 1


def _in_full(
    program: str,
    problems: list[Problem],
    line: flags.CommandLine,
    own: list[str],
    theirs: list[str],
    ranks: int,
) -> list[Problem]:
    """Expand suggestions of flags alone to whole commands."""
    from training.plan.corrections import as_changes

    out = []
    for problem in problems:
        fixes = [(fix, as_changes(fix, FIELDS)) for fix in problem.fixes]
        whole = [
            fix if changes is None else _rebuilt(program, line, own, theirs, ranks, changes)
            for fix, changes in fixes
        ]
        out.append(replace(problem, fixes=whole))
    return out


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
    program: str,
    line: flags.CommandLine,
    own: list[str],
    theirs: list[str],
    ranks: int,
    changes: Changes,
    without: flags.Unknown | None = None,
) -> str:
    """The whole command with the script's own arguments after --. `without`: the flag that
    `changes` replace."""
    launcher = [one for one in line.unknown if launcher_flags.launches(one)]
    changes = dict(changes)
    for one in launcher:
        changes = other_launchers.translated(line, one) | changes
    changes = other_launchers.with_address(line, changes)
    gone = {
        i
        for one in [*launcher, *([without] if without else [])]
        for i in range(one.start, one.stop)
    }
    moved = {i for one in line.unknown for i in range(one.start, one.stop)} | set(_extra(line))
    if "hosts" in changes:  # they replace the file
        gone |= {i for name, *span in line.places if name == "hostfile" for i in range(*span)}
    moved |= {
        i for name, start, stop in line.places if _not_for_scripts(name) for i in range(start, stop)
    }
    number = changes.pop(RANKS, str(ranks or 2))
    first = line.positional_at[:1]
    kept = [word for i, word in enumerate(own) if i not in moved | gone | set(first)]
    variables = [f"{n}={shlex.quote(changes.pop(n))}" for n in list(changes) if n.isupper()]
    tail = [*(own[i] for i in sorted(moved - gone)), *theirs]
    words = [number, *kept, *([SEPARATOR, *tail] if tail else [])]
    script = RUN if program == RUN else LAUNCH_SCRIPT
    return " ".join([*variables, command(script, words, **changes)])


def _other_field(variable: str) -> bool:
    name = variable.removeprefix(resolve.PREFIX).lower()
    return variable.startswith(resolve.PREFIX) and name in FIELDS and name not in USED

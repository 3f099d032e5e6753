"""The command line with the task, the config file and the run to resume that it names, merged into
one configuration."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from training import tasks
from training.config import flags, loader, program, resolve
from training.config.schema import FIELDS, Config, Known
from training.config.translate import RANKS
from training.core import find_run, rundir
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.project import ENTRYPOINT, LAUNCH_SCRIPT, ROOT, shipped
from training.plan import auto_resume, init_from, launcher_flags, length, resume_run
from training.plan.script_words import RUN, SEPARATOR, as_run, asked_for, launch_words, split
from training.tasks.spec import TaskSpec
from training.tasks.weights import Weights

QUICKSTART = "configs/dual_gpu/quickstart.py"
# Ranks that each script starts on a machine; None: the first argument is the number.
SCRIPTS: dict[str, int | None] = {
    "train_dual_gpu.sh": 2,
    "train_dual_gpu_enhanced.sh": 2,
    LAUNCH_SCRIPT: None,
    RUN: None,
    ENTRYPOINT: 1,
}
# configuration, folder of the runs → the run to resume as node 0 has sent it; None: it is here
Received = Callable[[Config, Path], rundir.RunDir | None]
MAX_RANKS = 1024
# Words that may be typed for N.
NUMBERS = {
    "one": "N=1",
    "three": "N=3",
    "four": "N=4",
    "eight": "N=8",
}


@dataclass
class ParsedArgs:
    """The parsed command line, merged with the config file and the resumed run."""

    line: flags.CommandLine
    typed: int  # ranks; 0: invalid
    config_file: Path | None
    file: loader.ConfigFile
    kind: TaskSpec
    resolved: resolve.Resolved
    experiments: Path
    resumed: loader.Values = field(default_factory=dict)  # the configuration of the run to resume
    resume_from: rundir.RunDir | None = None
    answer: str = ""  # why there is nothing to resume: the run is finished
    problems: list[Problem] = field(default_factory=list)
    start: Weights | None = None  # of --init_from
    # False: the task cannot be read, and `kind` is the default one, with other rules
    task_known: bool = True

    def bad(self, names: Collection[str]) -> bool:
        """Whether the value of one of these fields is unknown because of a problem already
        found."""
        if not self.task_known:
            return True
        unread = bool(self.file.problems and not self.file.values.keys() - {"task"}) or any(
            p.field in names for p in self.file.problems
        )
        # the weights that would set them were not found
        unread |= bool(self.resolved.config.init_from and not (self.start or self.resume_from))
        return unread or any(p.field in names for p in self.resolved.problems)

    def overruled(self) -> list[str]:
        """A note on the values of the config file that the resumed run overrides."""
        if not self.resume_from or not self.config_file:
            return []
        values, resumed = self.file.values, self.resumed
        chosen = vars(self.resolved.config) | self.resolved.options
        changed = [
            n
            for n in values
            if n in resumed
            and values[n][0] != resumed[n][0] == chosen.get(n)  # else a variable wins
            and n not in self.line.flags
        ]
        return (
            [
                msg(
                    "plan.resume.wins",
                    config_file=self.config_file,
                    fields=", ".join(
                        msg("plan.resume.stays", name=n, value=resumed[n][0]) for n in changed
                    ),
                )
            ]
            if changed
            else []
        )


def nothing(config: Config, experiments: Path) -> None:
    """A Received without other machines."""


def parse_args(
    script: str, args: list[str], environ: Mapping[str, str], received: Received = nothing
) -> ParsedArgs:
    """Problems are collected in the result."""
    # First with the fields of all tasks: the task decides which of them are allowed.
    first = _look(script, args, environ, tasks.everything(), received)
    named, origin = first.resolved.config.task, first.resolved.origins["task"]
    kind, problems = tasks.find(named, origin)
    asked = _look(script, args, environ, kind.fields, received)
    asked.kind, asked.problems = kind, [*problems, *asked.problems]
    asked.task_known = not problems
    if problems:  # the flags of the task are unknown
        asked.problems, asked.line.unknown = (
            [*problems, *(p for p in first.problems if p not in first.line.problems)],
            [],
        )
    return asked


def _look(
    script: str, args: list[str], environ: Mapping[str, str], fields: Known, received: Received
) -> ParsedArgs:
    line = flags.parse(args, fields)
    problems, positional = list(line.problems), list(line.positional)
    typed = SCRIPTS[script] or number_of_ranks(line, positional, problems)
    config_file = _config_file(script, line, positional, problems, environ)
    if config_file:
        executed = line.on("no_python") or line.on("module")
        what = program.PROGRAM if executed else program.kind(config_file, fields)
        if what != program.CONFIG:
            raise UserError(_program(script, line, args, typed, config_file, what))
    file = (
        loader.read(config_file, tasks.CONFIG_READERS, typed)
        if config_file
        else loader.ConfigFile()
    )
    problems += file.problems
    resolved = resolve.resolve(line, file.values, environ, fields=fields, ranks=typed)
    length.settle(resolved)
    experiments = folder("out_dir", resolved)
    found = resume_run.Found()
    own = resolved.config
    if wanted := auto_resume.wanted(own, experiments):

        def merged(known: loader.Values, having: Known, run: rundir.RunDir) -> resolve.Resolved:
            found = resolve.resolve(
                line, file.values, environ, {n: v for n, v in known.items() if n in having}, having
            )
            length.keep_batch(found, known, own)
            length.settle(found, run)
            return found

        starts = not any(line.on(name) for name in ("dry_run", "explain", "check"))
        wish = resume_run.ResumeRequest(
            script,
            typed,
            line,
            config_file,
            replace(resolved, config=replace(own, resume=wanted)),
            experiments,
            merged,
            fields,
            partial(command, script, args),
            received(own, experiments) if starts and wanted == own.resume else None,
        )
        found = resume_run.find(wish, problems)
        resolved = found.resolved or resolved
    restarted = resolve.RESTARTED in environ
    start = init_from.find(resolved, experiments, found.run, problems, restarted=restarted)
    if start:
        given = (*file.values, *line.flags)
        below = {n: v for n, v in init_from.values(start, given).items() if n in fields}
        resolved = resolve.resolve(line, {**below, **file.values}, environ, found.known, fields)
        length.settle(resolved, found.run)
    problems += resolved.problems
    return ParsedArgs(
        line,
        typed,
        config_file,
        file,
        tasks.DEFAULT,
        resolved,
        experiments,
        found.known,
        found.run,
        found.answer,
        problems,
        start,
    )


def command(script: str, args: list[str], /, **changes: Any) -> str:
    """The user's own command with these flags changed, to paste into a shell. `config` replaces a
    config that is given by its path alone; a value of None makes the flag a switch."""
    own, theirs = split(args) if asked_for(args) else (args, [])
    line = flags.parse(own, tasks.everything())
    # options of a user's task are unknown here
    places = [*line.places, *((one.name, one.start, one.stop) for one in line.unknown)]
    out = {i for name, start, stop in places if name in changes for i in range(start, stop)}
    kept = {i: word for i, word in enumerate(own) if i not in out}
    at = line.positional_at[takes_ranks(script) :]
    if "config" in changes and "config" not in line.flags:
        kept[at[0] if at else len(own)] = str(changes.pop("config"))
    changed = [flags.written(k, v) for k, v in changes.items()]
    if script == RUN:
        return as_run(list(kept.values()), changed, theirs)
    program = "python train.py" if script == ENTRYPOINT else f"./{script}"
    tail = [SEPARATOR, shlex.join(theirs)] if theirs else []
    return " ".join([program, *map(shlex.quote, kept.values()), *changed, *tail])


def is_config(word: str) -> bool:
    """Whether this first argument is a config file rather than a number of processes."""
    return word.endswith((".py", ".json")) or "/" in word or bool(word and loader.near(Path(word)))


def _by_another_name(line: flags.CommandLine) -> int:
    """The number of processes from an unknown flag such as torchrun's --nproc_per_node; 0: none."""
    if not line.unknown:
        return 0
    from training.config import meant

    found = [
        c[0].get(RANKS, "0")
        for one in line.unknown
        if (c := meant.name(one.name, one.text, FIELDS).changes)
    ]
    return next((int(text) for text in found if text.isdecimal() and 0 < int(text) <= MAX_RANKS), 0)


def is_number(word: str) -> bool:
    """Whether this is a valid number of processes."""
    decimal = word.isascii() and word.isdecimal() and len(word) <= 9
    return decimal and 1 <= int(word) <= MAX_RANKS


def takes_ranks(script: str) -> bool:
    """Whether the first argument of this script is the number of processes."""
    return script in SCRIPTS and SCRIPTS[script] is None


def number_of_ranks(line: flags.CommandLine, positional: list[str], problems: list[Problem]) -> int:
    """The N of `./launch_train.sh N`; 0 when invalid. Removes its word from `positional`."""
    allowed = msg("plan.ranks.allowed", most=MAX_RANKS)
    word = positional[0] if positional else ""
    named = _by_another_name(line)
    if named and (not word or is_config(word)):
        return named
    if is_number(word):
        number = int(positional.pop(0))
        return named or number
    if positional and not is_config(word):
        positional.pop(0)
        problems.append(
            Problem(
                "ranks.value",
                msg("plan.ranks.invalid", word=word),
                allowed,
                [NUMBERS.get(word.lower(), "N=2")],
            )
        )
    else:
        what = (
            msg("plan.ranks.missing_first", word=word) if positional else msg("plan.ranks.missing")
        )
        later = next(filter(is_number, positional), "2")
        if later in positional:
            positional.remove(later)
        fix = f"N={later}" if word or line.flags else f"N=2 --config={QUICKSTART}"
        problems.append(Problem("ranks.value", what, allowed, [fix]))
    return 0


def config_not_given(fix: str) -> Problem:
    names = sorted(p.stem for p in (ROOT / "configs/dual_gpu").glob("[a-z]*.py"))
    allowed = msg("plan.config.ready", names=", ".join(names))
    return Problem("config.not_given", msg("plan.config.not_given"), allowed, [fix])


def _config_file(
    script: str,
    line: flags.CommandLine,
    positional: list[str],
    problems: list[Problem],
    environ: Mapping[str, str],
) -> Path | None:
    given = [line.flags["config"][0]] if "config" in line.flags else []
    given += positional
    if not given:
        resume = line.flags.get("resume", [environ.get(f"{resolve.PREFIX}RESUME")])[0]
        # a --resume without its value is a problem already
        resumes = any(name == "resume" for name, *_ in line.places) and resume is None
        if script == "train_dual_gpu.sh" and resume in (None, "", auto_resume.AUTO) and not resumes:
            problems.append(config_not_given(f"--config={QUICKSTART}"))
        return None
    # `--data *.txt CONFIG`: the shell expanded the pattern to several words
    if "config" not in line.flags:
        given.sort(key=lambda word: not word.endswith((".py", ".json")))
    if extra := given[1:]:
        shown = ", ".join(map(repr, extra[:4])) + (", …" if len(extra) > 4 else "")
        what = (
            msg("plan.config.one_too_many", shown=shown, config=given[0])
            if len(extra) == 1
            else msg("plan.config.too_many", shown=shown, count=len(extra), config=given[0])
        )
        allowed = (
            msg("plan.config.one_file_data")
            if "data" in line.flags
            else msg("plan.config.one_file")
        )
        numbers = [f"N={word}" for word in extra if is_number(word)]
        problems.append(
            Problem("config.several", what, allowed, numbers if len(extra) == 1 else [])
        )
    return _path(given[0])


def _path(word: str) -> Path:
    return shipped(Path(os.path.expanduser(word)))  # noqa: PTH111 – Path.expanduser raises for an unknown user


def _program(
    script: str, line: flags.CommandLine, args: list[str], typed: int, path: Path, what: str
) -> Problem:
    """The problem of a program given in place of a config, with the command that runs it."""
    shown, ranks = shlex.quote(str(path)), typed or 2
    spans = [range(start, stop) for name, start, stop in line.places if name == "config"]
    named = [
        i
        for i, word in zip(line.positional_at, line.positional, strict=True)
        if _path(word) == path
    ]
    place = spans[0] if spans else range(named[0], named[0] + 1)
    gone, changes = launcher_flags.before(line, place.start)
    gone |= {*place, *(line.positional_at[:1] if takes_ranks(script) else [])}
    rest = [word for i, word in enumerate(args) if i not in gone]
    own, theirs = launch_words(rest)
    own += [flags.written(name, text) for name, text in changes.items()]
    words = shlex.join([str(ranks), *own])
    after = msg("plan.config.arguments_after")
    as_script = f"./launch_train.sh {words} --script {shown} " + (
        f"-- {shlex.join(theirs)}" if theirs else f"  # {after}"
    )
    if what == program.TASK:
        fixes = [f"./launch_train.sh {shlex.join([str(ranks), *rest])} --task={shown}", as_script]
    elif path.resolve() == ROOT / ENTRYPOINT:
        itself = msg("plan.config.own_train")
        fixes = [f"./launch_train.sh {words} {QUICKSTART}   # {itself}", as_script]
    else:
        fixes = [as_script]
    where = "--config" if "config" in line.flags else msg("plan.config.argument_of", script=script)
    return Problem(
        "config.is_program",
        msg("plan.config.is_program", path=path, where=where),
        msg("plan.config.plain"),
        fixes,
    )


def folder(name: str, resolved: resolve.Resolved) -> Path:
    return find_run.folder(
        getattr(resolved.config, name), default=resolved.origins[name] == "default"
    )

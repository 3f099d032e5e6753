"""Command line of submit_job.sh: options for sbatch, and the rest for the training."""

from __future__ import annotations

import shlex
import signal
from dataclasses import dataclass, field

from training.config.flags import ACTIONS, no_value
from training.config.foreign_names import row_of
from training.config.schema import FIELDS, kind
from training.config.translate import RANKS as NUMBER
from training.core.errors import Problem
from training.core.messages import msg
from training.core.project import SUBMIT_SCRIPT
from training.core.suggest import suggest
from training.plan.cli_args import MAX_RANKS, QUICKSTART

SCRIPT = SUBMIT_SCRIPT
RANKS, MORE = "ranks-per-node", "sbatch"
NO_GRES, NO_GPUS_PER_NODE = "--gres=none", "--gpus-per-node=0"
NO_KILL, KILL = "--no-kill", "--no-kill=off"  # does a failed node end the job?
# Options passed on to sbatch. For others: --sbatch="--name=value".
VALUED = (
    *(
        "nodes",
        "time",
        "partition",
        "account",
        "qos",
        "gres",
        "gpus-per-node",
        "cpus-per-task",
        "cpus-per-gpu",
        "constraint",
    ),
    *(
        "mem",
        "mem-per-cpu",
        "mem-per-gpu",
        "nodelist",
        "exclude",
        "reservation",
        "dependency",
        "begin",
        "comment",
        "licenses",
    ),
    *("job-name", "output", "mail-type", "mail-user", "switches", "signal"),
)
SHORT = {
    "-N": "nodes",
    "-t": "time",
    "-p": "partition",
    "-A": "account",
    "-q": "qos",
    "-c": "cpus-per-task",
    "-C": "constraint",
}
SHORT |= {
    "-J": "job-name",
    "-o": "output",
    "-w": "nodelist",
    "-x": "exclude",
    "-d": "dependency",
    "-b": "begin",
    "-H": "hold",
}
BARE_LETTERS = ("-H",)
# Without a value; sbatch takes an optional one only with =, such as --nice=100.
BARE = ("exclusive", "requeue", "no-requeue", "hold", "no-kill", "nice")
_TASKS = msg("launcher.slurm.options.tasks", ranks=RANKS)
_WAY = msg("launcher.slurm.options.nodes")
# The launchers save a checkpoint, and the job is requeued; names as sbatch takes them.
SAVING_SIGNALS = ("USR1", "TERM", *(str(int(n)) for n in (signal.SIGUSR1, signal.SIGTERM)))
# Options that contradict the one task on each node that starts its ranks, and options of other
# scripts.
REFUSED = {
    **dict.fromkeys(
        (
            "ntasks",
            "ntasks-per-node",
            "ntasks-per-gpu",
            "ntasks-per-socket",
            "gpus",
            "gpus-per-task",
        ),
        _TASKS,
    ),
    **dict.fromkeys(
        ("nnodes", "node-rank", "master-addr", "launcher", "hosts", "hostfile", "ssh-args"), _WAY
    ),
    "array": msg("launcher.slurm.options.array"),
    "quiet": msg("launcher.slurm.options.quiet"),
    "wrap": msg("launcher.slurm.options.wrap"),
    **dict.fromkeys(
        ("script", "module", "no-python", "watch"), msg("launcher.slurm.options.script")
    ),
    "check": msg("launcher.slurm.options.check", quickstart=QUICKSTART, flags="--check"),
    "json": msg("launcher.slurm.options.check", quickstart=QUICKSTART, flags="--check --json"),
}


@dataclass
class SplitArgs:
    """`sbatch`: options for it, as `--name=value`; `training`: the rest, as typed."""

    sbatch: list[str] = field(default_factory=list)
    training: list[str] = field(default_factory=list)
    ranks: int | None = None  # --ranks_per_node
    beside: dict[str, str] = field(default_factory=dict)  # options chosen elsewhere (requested)
    problems: list[Problem] = field(default_factory=list)

    def option(self, name: str) -> str | None:
        """The value on the command line: of two sbatch takes the last."""
        found = [word.partition("=")[2] for word in self.sbatch if word.startswith(f"--{name}=")]
        return found[-1] if found else None

    def used(self, name: str) -> str | None:
        """The value that sbatch will use."""
        return self.beside.get(name) if (text := self.option(name)) is None else text

    @property
    def typed(self) -> list[str]:
        """Arguments before those of the training, for a command to paste."""
        known = [word for word in self.sbatch if _is_known(word)]
        if others := [word for word in self.sbatch if not _is_known(word)]:
            known.append(f"--{MORE}={shlex.join(others)}")
        return [*known, *([f"--ranks_per_node={self.ranks}"] if self.ranks else [])]


def _is_known(word: str) -> bool:
    """Does `split` accept this option of sbatch without --sbatch?"""
    name, equals, _ = word.removeprefix("--").partition("=")
    return name in BARE or (name in VALUED and bool(equals))


def split(args: list[str]) -> SplitArgs:
    line, rest = SplitArgs(), list(args)
    while rest:
        word = rest.pop(0)
        typed, equals, text = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        name = typed.replace("_", "-")
        if name in BARE:
            line.sbatch.append(f"--{name}{equals}{text}")
        elif name in (*VALUED, RANKS, MORE):
            if not equals and (not rest or (rest[0].startswith("--") and name != MORE)):
                line.problems.append(no_value(typed))
                continue
            _take(line, name, text if equals else rest.pop(0))
        elif name in REFUSED:
            line.problems.append(
                Problem(
                    "flag.other_script",
                    msg("launcher.slurm.options.other_script", typed=typed, script=SCRIPT),
                    REFUSED[name],
                )
            )
            _drop_value(equals, rest)
        elif word[:2] in SHORT and not word.startswith("--"):
            line.problems.append(_short(word, args, len(args) - len(rest) - 1))
            if len(word) == 2 and word not in BARE_LETTERS and rest:
                rest.pop(0)
        elif (
            typed
            and not _is_training(typed)
            and (found := _unknown(typed, equals, text, args, len(args) - len(rest) - 1))
        ):
            line.problems.append(found)
            _drop_value(equals, rest)
        else:  # the training's own check reports it, with the whole command
            line.training.append(word)
    return line


def _take(line: SplitArgs, name: str, text: str) -> None:
    if name == MORE:
        _more(line, text)
    elif name != RANKS:
        _add(line, name, f"--{name}={text}")
    elif text.isdecimal() and len(text) < 10 and 1 <= int(text) <= MAX_RANKS:
        line.ranks = int(text)
    else:
        line.problems.append(
            Problem(
                "flag.value",
                msg("launcher.slurm.options.ranks_value", text=text),
                msg("plan.ranks.allowed", most=MAX_RANKS),
            )
        )


def _more(line: SplitArgs, text: str) -> None:
    """--sbatch="--one=1 --two": long options only, because their meaning for the run must be
    known."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        line.problems.append(
            Problem(
                "slurm.sbatch_quotes",
                msg("launcher.slurm.options.quotes", text=text, error=error),
                msg("launcher.slurm.options.quotes_allowed"),
            )
        )
        return
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if not word.startswith("--") or len(word) == 2:
            line.problems.append(
                Problem(
                    "slurm.sbatch_word",
                    msg("launcher.slurm.options.word", word=word),
                    msg("launcher.slurm.options.word_allowed"),
                )
            )
            return
        # sbatch accepts abbreviations
        refused = next((own for own in REFUSED if own.startswith(name)), "")
        if refused:
            what = msg("launcher.slurm.options.own", name=name)
            line.problems.append(Problem("slurm.sbatch_own", what, REFUSED[refused]))
        else:
            _add(line, name, word)


def _add(line: SplitArgs, name: str, word: str) -> None:
    problem = signal_problem(word.partition("=")[2], word) if name == "signal" else None
    if problem:
        line.problems.append(problem)
    else:
        line.sbatch.append(word)


def signal_problem(text: str, word: str) -> Problem | None:
    """--signal=[{R|B}:]SIGNAL[@SECONDS]. `B:` would signal the batch script alone, which it ends:
    no rank could save a checkpoint. `word`: how it is given."""
    flags, colon, rest = text.rpartition(":")
    number, _, seconds = rest.partition("@")
    if "B" in flags.upper():
        flags = flags.upper().replace("B", "")
        what = msg("launcher.slurm.options.batch_signal", word=word)
        fix = f"--signal={flags}{colon if flags else ''}{rest}"
        return Problem("slurm.batch_signal", what, "", [fix])
    if number.upper().removeprefix("SIG") in SAVING_SIGNALS:
        return None
    what = msg("launcher.slurm.options.signal", word=word)
    fix = f"--signal={flags}{colon}USR1@{seconds or 120}"
    return Problem("slurm.signal", what, "USR1, TERM", [fix])


def _is_training(typed: str) -> bool:
    name = typed.replace("-", "_")
    return (
        name in FIELDS
        or name in ACTIONS
        or (name.startswith("no_") and name[3:] in FIELDS and kind(name[3:]) == "bool")
    )


def _unknown(typed: str, equals: str, text: str, args: list[str], at: int) -> Problem | None:
    """The problem of an unknown flag that is meant as an option of sbatch; None: it belongs to the
    training. `at`: its index in `args`."""
    row = row_of(typed)
    name = {NUMBER: "ranks_per_node", "nnodes": "nodes"}.get(" ".join(row.to), "") if row else ""
    if not name and row is None:
        options = [n.replace("-", "_") for n in (*VALUED, *BARE, RANKS)]
        near = suggest(typed.replace("-", "_"), [*FIELDS, *ACTIONS, *options])[:1]
        name = near[0] if near and near[0] in options else ""
    if not name:
        return None
    fixed = f"--{name if name == 'ranks_per_node' else name.replace('_', '-')}{equals}{text}"
    return Problem(
        "flag.unknown",
        msg("launcher.slurm.unknown_flag", typed=typed),
        "",
        [_command([*args[:at], fixed, *args[at + 1 :]])],
    )


def _short(word: str, args: list[str], at: int) -> Problem:
    """sbatch has one-letter options too; submit_job.sh accepts their long names only."""
    letter, value = word[:2], word[2:]
    rest = args[at + 1 :]
    if not value and letter not in BARE_LETTERS:
        value, rest = (rest[0], rest[1:]) if rest else ("VALUE", rest)
    fixed = f"--{SHORT[letter]}" + ("" if letter in BARE_LETTERS else f"={value}")
    return Problem(
        "flag.unknown",
        msg("launcher.slurm.options.unknown", word=word),
        msg("launcher.slurm.options.long"),
        [_command([*args[:at], fixed, *rest])],
    )


def _command(args: list[str]) -> str:
    return f"./{SCRIPT} {shlex.join(args)}"


def _drop_value(equals: str, rest: list[str]) -> None:
    if not equals and rest and not rest[0].startswith("--") and "." not in rest[0]:
        rest.pop(0)  # its value, which is not a config path

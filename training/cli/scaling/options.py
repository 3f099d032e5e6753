"""The command line of the scaling check: its own options; the launcher checks the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.config import flags
from training.config.schema import FIELDS
from training.config.translate import RANKS
from training.core import args, suggest
from training.core.errors import Problem
from training.core.messages import msg
from training.plan.cli_args import MAX_RANKS

COMMAND = "./duet scaling"
STEPS, ROUNDS = (4, 100_000), (1, 100)


def _ranks(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(args.is_whole(word) and 1 <= int(word) <= MAX_RANKS for word in words):
        raise ValueError(text)
    return tuple(sorted({1, *map(int, words)}))


FLAGS = {
    "ranks": args.Flag(
        _ranks, msg("cli.scaling.ranks_allowed", most=MAX_RANKS), lambda text: ["1,2"]
    ),
    "steps": args.whole(*STEPS, 40),
    "rounds": args.whole(*ROUNDS, 3),
    "json": args.SWITCH,
    "help": args.SWITCH,
}


@dataclass
class ScalingOptions:
    """The checked options; `rest` as typed. `ranks`: None if not given."""

    ranks: tuple[int, ...] | None = None
    steps: int = 40  # measured steps per run
    rounds: int = 3
    json: bool = False
    help: bool = False
    rest: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def parse(argv: list[str]) -> ScalingOptions:
    """Collects problems instead of raising: experiment.prepare reports them with the launcher's."""
    line = args.parse(argv, FLAGS, COMMAND, _near)
    wrong = {problem.field for problem in line.problems}
    values = {name: value for name, value in line.values.items() if name not in wrong}
    return ScalingOptions(**values, rest=line.words, problems=line.problems)


def _near(word: str) -> str | None:
    """The option that an unknown flag may mean; None: a configuration field, or left to the
    launcher."""
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    if (
        not word.startswith("--")
        or name in FIELDS
        or name in flags.ACTIONS
        or name.removeprefix("no_") in FIELDS
    ):
        return None
    from training.config import foreign_names

    # other tools' names of --steps and --ranks; the launcher translates the rest
    if (row := foreign_names.row_of(name)) is not None:
        return {"num_iterations": "steps", RANKS: "ranks"}.get(" ".join(row.to))
    best = suggest.suggest(name, [*FLAGS, *FIELDS, *flags.ACTIONS])[:1]
    return next((n for n in best if n in FLAGS), None)

"""The command line of the scaling check: its own options; the launcher checks the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.config import flags
from training.config.translate import RANKS
from training.core import args
from training.core.errors import Problem
from training.core.messages import msg
from training.plan.cli_args import MAX_RANKS

COMMAND = "./duet scaling"
FOREIGN = {"num_iterations": "steps", RANKS: "ranks"}
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
    line = args.parse(argv, FLAGS, COMMAND, lambda word: flags.own_option(word, FLAGS, FOREIGN))
    wrong = {problem.field for problem in line.problems}
    values = {name: value for name, value in line.values.items() if name not in wrong}
    return ScalingOptions(**values, rest=line.words, problems=line.problems)

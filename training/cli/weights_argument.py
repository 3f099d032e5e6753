"""RUN of the commands that use trained weights: sample, evaluate, export."""

from __future__ import annotations

from training.core import args, find_run
from training.core.errors import Problem, UserError
from training.core.find_run import EXPERIMENTS, LATEST, RunSelector
from training.core.project import WORK
from training.tasks import weights
from training.tasks.weights import Weights

DEVICES = ("auto", "cpu", "cuda")
KIND = args.one_of(*weights.KINDS)  # --weights


def one(
    words: list[str], asker: RunSelector, problems: list[Problem], kind: str | None
) -> Weights | None:
    """The weights that the only word names, the newest without one; None with a problem. `kind`:
    of --weights."""
    problems += find_run.several(words, asker)
    if len(words) > 1:
        return None
    return find(words[0] if words else LATEST, asker, problems, kind)


def find(
    word: str, asker: RunSelector, problems: list[Problem], kind: str | None
) -> Weights | None:
    try:
        return weights.find(None if word == LATEST else word, WORK / EXPERIMENTS, asker, kind)
    except UserError as error:
        problems += error.problems
        return None

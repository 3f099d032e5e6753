"""RUN of the commands that use trained weights: sample, evaluate, export."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from training.core import args, find_run
from training.core.errors import Problem, UserError
from training.core.find_run import EXPERIMENTS, LATEST, RunSelector
from training.core.project import WORK
from training.tasks import weights
from training.tasks.weights import Weights

DEVICES = ("auto", "cpu", "cuda")
KIND = args.one_of(*weights.KINDS)  # --weights


def one(
    words: list[str],
    line: args.Args,
    problems: list[Problem],
    needed: Mapping[str, str] = MappingProxyType({}),
    before: str = "",
) -> Weights | None:
    """The weights that the only word names, the newest without one; None with a problem. `needed`:
    flags that the command line may lack; `before`: other words after the run."""
    problems += find_run.several(words, _selector(line, needed, before))
    if len(words) > 1:
        return None
    return find(words[0] if words else LATEST, line, problems, needed, before)


def find(
    word: str,
    line: args.Args,
    problems: list[Problem],
    needed: Mapping[str, str] = MappingProxyType({}),
    before: str = "",
) -> Weights | None:
    kind = line.values.get("weights")
    whole, other = (_selector(line, needed, before, *out) for out in ((), ("weights",)))
    place = WORK / EXPERIMENTS
    try:
        return weights.find(None if word == LATEST else word, place, whole, kind, of_kind=other)
    except UserError as error:
        problems += error.problems
        return None


def _selector(
    line: args.Args, needed: Mapping[str, str], before: str, *without: str
) -> RunSelector:
    """How this command line names another run, with its other flags."""
    lacking = {n: text for n, text in needed.items() if n not in line.written}
    rest = " ".join(filter(None, [before, line.flags(**dict.fromkeys(without), **lacking)]))
    command = line.command
    return RunSelector("RUN", f"{command} ", f"{command} {rest}".rstrip(), rest)

"""The command line of the scaling check: its own options; everything else belongs to the launcher, which checks it."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.config import flags
from training.config.schema import FIELDS
from training.config.translate import RANKS
from training.core import suggest
from training.core.errors import Problem
from training.plan.cli_args import MAX_RANKS

COMMAND = "./duet scaling"
OWN = {"ranks": True, "steps": True, "rounds": True, "json": False, "help": False}  # does it take a value?
STEPS, ROUNDS = (4, 100_000), (1, 100)


@dataclass
class ScalingOptions:
    """Own options, checked; `rest` as typed. `ranks` is None when it was not given."""

    ranks: tuple[int, ...] | None = None
    steps: int = 40  # measured steps per run
    rounds: int = 3
    json: bool = False
    help: bool = False
    rest: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def parse(argv: list[str]) -> ScalingOptions:
    """Problems are collected, not raised: the launcher's are told together with ours (see experiment.prepare)."""
    options, words = ScalingOptions(), list(argv)
    given: dict[str, str] = {}
    while words:
        word = words.pop(0)
        typed, equals, value = word.lstrip("-").partition("=")
        name = "help" if word == "-h" else typed.replace("-", "_")
        if name not in OWN or not (word.startswith("--") or word == "-h"):
            near = _near(name) if word.startswith("--") else []
            if not near:
                options.rest.append(word)
                continue
            if not equals and words and not words[0].startswith("--") and "." not in words[0]:
                equals, value = "=", words.pop(0)  # its value, which is no config path
            fix = f"--{near[0]}{equals + value if OWN[near[0]] else ''}"
            options.problems.append(Problem("flag.unknown", f"--{typed} is not a known flag", "", [fix]))
            continue
        if OWN[name] and not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        if OWN[name] and not value:
            options.problems.append(Problem("flag.no_value", f"--{typed} has no value", f"--{typed}=VALUE"))
        elif value and not OWN[name]:
            options.problems.append(Problem("flag.unexpected_value", f"--{typed} has the value {value!r}", "no value", [f"--{typed}"]))
        elif given.setdefault(name, value) != value:
            options.problems.append(Problem("flag.twice", f"--{typed} is given twice, as {given[name]!r} and {value!r}", "once"))
        else:
            _set(options, name, value)
    return options


def _near(name: str) -> list[str]:
    """Our option that a person may have meant, when it is no field of the configuration."""
    if name in FIELDS or name in flags.ACTIONS or name.removeprefix("no_") in FIELDS:
        return []
    from training.config import foreign_names  # only when something is wrong

    if (row := foreign_names.row_of(name)) is not None:  # its length is its own; everything else the launcher answers
        return {"num_iterations": ["steps"], RANKS: ["ranks"]}.get(" ".join(row.to), [])
    best = suggest.suggest(name, [*OWN, *FIELDS, *flags.ACTIONS])[:1]
    return [n for n in best if n in OWN]


def _set(options: ScalingOptions, name: str, value: str) -> None:
    if name == "ranks":
        words = [w.strip() for w in value.split(",")]
        if all(_whole(w, (1, MAX_RANKS)) for w in words):
            options.ranks = tuple(sorted({1, *map(int, words)}))
        else:
            allowed = f"whole numbers from 1 to {MAX_RANKS}, with commas between"
            options.problems.append(Problem("flag.value", f"--ranks is {value!r}", allowed, ["--ranks=1,2"]))
    elif name in ("json", "help"):
        setattr(options, name, True)
    else:
        low, high = limits = STEPS if name == "steps" else ROUNDS
        if _whole(value, limits):
            setattr(options, name, int(value))
        else:
            nearest = min(max(int(value), low), high) if _whole(value, (0, 10**9)) else getattr(ScalingOptions, name)
            allowed = f"a whole number from {low} to {high}"
            options.problems.append(Problem("flag.value", f"--{name} is {value!r}", allowed, [f"--{name}={nearest}"]))


def _whole(text: str, limits: tuple[int, int]) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and limits[0] <= int(text) <= limits[1]

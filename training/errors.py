"""Exit codes, and problems told to people: the value, where it came from, what is allowed, the command that fixes it.

Imports nothing of the project, so that every other module may use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class Exit(IntEnum):
    """What a caller may rely on. The member's comment is the documentation (docs/exit_codes.md is tested against it)."""

    DONE = 0  # training finished
    CONFIG = 2  # the configuration or the command line is wrong; nothing was launched
    RESOURCES = 3  # a resource is missing (GPU, memory, disk, port, folder); nothing was launched
    TRAINING = 4  # a rank failed; the cause is in failure.json
    HANG = 5  # no rank made progress; who was stuck is in failure.json
    PREEMPTED = 75  # stopped by TERM or USR1, checkpoint saved: run the same command with --resume
    INTERRUPTED = 130  # stopped by Ctrl-C


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the user's input or machine."""

    what: str  # the value and where it came from
    allowed: str = ""  # what would be right
    fixes: list[str] = field(default_factory=list)  # commands to paste, best first

    def lines(self) -> list[str]:
        """The problem as text: the first line says what, the others are indented below it."""
        out = [self.what]
        if self.allowed:
            out.append(f"    allowed: {self.allowed}")
        out += [f"    {'try:' if i == 0 else '  or:'}     {fix}" for i, fix in enumerate(self.fixes)]
        return out


class UserError(Exception):
    """Problems that the user can fix; shown without a traceback, all of them at once."""

    def __init__(self, problems: Problem | list[Problem], code: Exit = Exit.CONFIG) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        self.code = code
        super().__init__("; ".join(p.what for p in self.problems))

"""Exit codes, and problems told to people: the value, where it came from, what is allowed, the
command that fixes it.

Imports nothing of the project, so that every other module may use it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """What a caller may rely on; EXIT_MEANING says it for people."""

    DONE = 0
    CONFIG = 2
    RESOURCES = 3
    TRAINING = 4
    HANG = 5
    PREEMPTED = 75
    INTERRUPTED = 130


# How a rank ends after an exception; the supervisor reads the cause from the rank's error file. A
# full disk has no room for that file, so it has a status of its own (EX_IOERR of sysexits.h).
RANK_FAILED, RANK_DISK_FULL = 1, 74

EXIT_MEANING = {
    Exit.DONE: "training finished",
    Exit.CONFIG: "the configuration, the command line or the data is wrong; nothing was launched",
    Exit.RESOURCES: "a resource is missing (GPU, memory, disk, port, folder): nothing was "
    "launched, or no checkpoint could be saved",
    Exit.TRAINING: "a rank failed; the cause is in the run's failure.json",
    Exit.HANG: "no rank made progress; who was stuck is in the run's failure.json",
    Exit.PREEMPTED: "stopped by TERM or USR1, checkpoint saved: run again with --resume",
    Exit.INTERRUPTED: "stopped by Ctrl-C",
}


class NothingToDo(Exception):
    """What is asked for is done already: the answer is shown, nothing is launched, and the exit
    status is 0."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the user's input or machine. `code`: what it is for a program
    (training.core.codes); `field`: the option that it is about, if it is one."""

    code: str
    what: str  # the value and where it came from
    allowed: str = ""  # what would be right
    fixes: list[str] = dataclasses.field(default_factory=list)  # commands to paste, best first
    field: str = ""

    def lines(self) -> list[str]:
        """The problem as text: the first line says what, the others are indented below it."""
        out = [self.what]
        if self.allowed:
            out.append(f"    allowed: {self.allowed}")
        out += [f"    {'try:' if i == 0 else 'or:':<9}{fix}" for i, fix in enumerate(self.fixes)]
        return out


class UserError(Exception):
    """Problems that the user can fix; shown without a traceback, all of them at once.
    `said_by_another`: every rank has them, and one of the others tells."""

    def __init__(
        self,
        problems: Problem | list[Problem],
        code: Exit = Exit.CONFIG,
        *,
        said_by_another: bool = False,
    ) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        self.code, self.said_by_another = code, said_by_another
        super().__init__("; ".join(p.what for p in self.problems))


class RunStopped(UserError):
    """A run stops itself for lack of a resource. `closing`: what it leaves; `cause`: the operating
    system's error."""

    def __init__(self, problem: Problem, closing: str, cause: OSError) -> None:
        super().__init__(problem, Exit.RESOURCES)
        self.closing, self.cause = closing, cause

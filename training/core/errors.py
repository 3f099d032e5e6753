"""Exit codes, and user-facing problems: the value, its origin, what is allowed, the command that
fixes it.

Imports no other module of the project, so that every module can use it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """The stable exit codes; EXIT_MEANING describes them."""

    DONE = 0
    CONFIG = 2
    RESOURCES = 3
    TRAINING = 4
    HANG = 5
    PREEMPTED = 75
    INTERRUPTED = 130


# Exit statuses of a rank after an exception; the supervisor reads the cause from the rank's error
# file. A full disk has no room for that file, hence a separate status (EX_IOERR of sysexits.h).
RANK_FAILED, RANK_DISK_FULL = 1, 74

EXIT_MEANING = {
    Exit.DONE: "training finished",
    Exit.CONFIG: "invalid configuration, command line or data; nothing was launched",
    Exit.RESOURCES: "a resource is missing (GPU, memory, disk, port, folder): nothing was "
    "launched, or no checkpoint could be saved",
    Exit.TRAINING: "a rank failed; the cause is in the run's failure.json",
    Exit.HANG: "no rank made progress; the stuck rank is in the run's failure.json",
    Exit.PREEMPTED: "stopped by TERM or USR1, checkpoint saved: resume with --resume",
    Exit.INTERRUPTED: "stopped by Ctrl-C",
}


class NothingToDo(Exception):
    """The request needs no launch: print the answer and exit with status 0."""


@dataclass(frozen=True)
class Problem:
    """One error in the user's input or on the machine. `code`: for programs (training.core.codes);
    `field`: the option concerned, '' for none."""

    code: str
    what: str  # the value and where it came from
    allowed: str = ""  # valid values
    fixes: list[str] = dataclasses.field(default_factory=list)  # commands to paste, best first
    field: str = ""

    def lines(self) -> list[str]:
        """The problem as text: one line that states it, the others indented below."""
        out = [self.what]
        if self.allowed:
            out.append(f"    allowed: {self.allowed}")
        out += [f"    {'try:' if i == 0 else 'or:':<9}{fix}" for i, fix in enumerate(self.fixes)]
        return out


class UserError(Exception):
    """Problems that the user can fix; reported together, without a traceback. `said_by_another`:
    every rank has the same problems and another rank reports them."""

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
    """A run stops itself because a resource is missing. `closing`: the last line of the report;
    `cause`: the error of the operating system."""

    def __init__(self, problem: Problem, closing: str, cause: OSError) -> None:
        super().__init__(problem, Exit.RESOURCES)
        self.closing, self.cause = closing, cause

"""Exit codes, and user-facing problems: the value, its origin, what is allowed, the command that
fixes it.

Imports no other module of the project but the messages, so that every module can use it.
"""

from __future__ import annotations

import dataclasses
import errno
import shlex
from dataclasses import dataclass
from enum import IntEnum

from training.core.messages import msg


class Exit(IntEnum):
    """The stable exit codes; EXIT_MEANING describes them."""

    DONE = 0
    CONFIG = 2
    RESOURCES = 3
    TRAINING = 4
    HANG = 5
    LEFT = 6
    PREEMPTED = 75
    INTERRUPTED = 130


# Exit statuses of a rank after an exception; the supervisor reads the cause from the rank's error
# file. A full disk has no room for that file, hence a separate status (EX_IOERR of sysexits.h).
RANK_FAILED, RANK_DISK_FULL = 1, 74
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

EXIT_MEANING = {
    Exit.DONE: msg("core.exit.done"),
    Exit.CONFIG: msg("core.exit.config"),
    Exit.RESOURCES: msg("core.exit.resources"),
    Exit.TRAINING: msg("core.exit.training"),
    Exit.HANG: msg("core.exit.hang"),
    Exit.LEFT: msg("core.exit.left"),
    Exit.PREEMPTED: msg("core.exit.preempted"),
    Exit.INTERRUPTED: msg("core.exit.interrupted"),
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
            out.append(msg("core.problem.allowed", allowed=self.allowed))
        return out + [
            msg("core.problem.or", fix=fix) if i else msg("core.problem.try", fix=fix)
            for i, fix in enumerate(self.fixes)
        ]


class UserError(Exception):
    """Problems that the user can fix; reported together, without a traceback. `said_by_another`:
    every rank has the same problems and another rank reports them."""

    of_code = False  # the line that raised it explains nothing

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


def unwritable(path: object, error: OSError, code: Exit = Exit.TRAINING) -> UserError:
    """For a file without which the ranks cannot be started."""
    what = msg("core.rundir.unwritable", file=path, strerror=error.strerror)
    there = shlex.quote(str(path))
    fixes = [f"df -h {there}; df -i {there}; quota -s"] if error.errno in DISK_FULL else []
    return UserError(Problem("run.unwritable", what, fixes=fixes), code)


class RunStopped(UserError):
    """A run stops itself because a resource is missing. `closing`: the last line of the report;
    `cause`: the error of the operating system."""

    def __init__(self, problem: Problem, closing: str, cause: OSError) -> None:
        super().__init__(problem, Exit.RESOURCES)
        self.closing, self.cause = closing, cause

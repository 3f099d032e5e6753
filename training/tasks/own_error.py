"""An error in a user's task outside of a training, with its place in the user's code."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import training
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.tasks import own_modules

SHOWN = 4  # calls in the user's code


def _none(error: Exception) -> bool:
    return False


@contextmanager
def reported(file: Path | None, passes: Callable[[Exception], bool] = _none) -> Iterator[None]:
    """Errors of the user's task in `file` are raised as UserError; None: a built-in task, whose
    errors are Duet's. `passes`: those that the caller handles."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if file is None or isinstance(error, UserError):
            raise
        if isinstance(error, Exception) and passes(error):
            raise
        where, calls = _place(file, error)
        what = msg("tasks.custom.failed", where=where, kind=type(error).__name__, error=error)
        raise UserError(Problem("task.failed", "\n".join([what, *calls]))) from error


def in_loading(error: Exception) -> bool:
    """Whether load_state_dict() failed in a method of the user's model, such as set_extra_state():
    with a RuntimeError it looks like torch's answer to weights of another model. The traceback
    begins in the caller, which is Duet's. Code of other packages counts as the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    torch = os.path.join(os.path.dirname(sys.modules["torch"].__file__ or ""), "")
    ours = tuple(os.path.join(place, "") for place in training.__path__)
    python = os.path.join(sysconfig.get_paths()["stdlib"], "")
    loading, user = len(frames), -1
    for i, frame in enumerate(frames):
        if frame.filename.startswith(torch):
            loading = min(loading, i) if frame.name == "load_state_dict" else loading
        elif not frame.filename.startswith(("<", *ours)) and (
            not frame.filename.startswith(python)
            or not own_modules.INSTALLED.isdisjoint(Path(frame.filename).parts)
        ):
            user = i
    return user > loading or user == len(frames) - 1


def of_val_data(file: Path, error: Exception) -> UserError:
    """The answer to an error in val_data() of this file."""
    where, calls = _place(file, error)
    what = msg("tasks.custom.val_data", where=where, kind=type(error).__name__, error=error)
    allowed = msg("tasks.custom.val_data_alone")
    return UserError(Problem("task.val_data", "\n".join([what, *calls]), allowed))


def _place(file: Path, error: BaseException) -> tuple[str, list[str]]:
    """'FILE:LINE', and the last calls in the user's code as Python prints them."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and own_modules.inside(frame.filename, file.parent)
    ]
    texts = traceback.format_list(frames[-SHOWN:])
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else str(file)
    if isinstance(error, SyntaxError) and error.filename:
        texts += traceback.format_exception_only(error)[:-1]
        where = f"{error.filename}:{error.lineno}"
    return where, "".join(texts).splitlines()

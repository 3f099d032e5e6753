"""An error in a method of a user's task outside of a training, with its place in the file."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from training.core.errors import Problem, UserError
from training.core.messages import msg

if TYPE_CHECKING:
    from pathlib import Path


def of_val_data(file: Path, error: Exception) -> UserError:
    """The answer to an error in val_data() of this file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(file)]
    where = f"{file}:{own[-1].lineno}" if own else str(file)
    kind = type(error).__name__
    what = msg("tasks.custom.val_data", where=where, kind=kind, error=error)
    return UserError(Problem("task.val_data", what, msg("tasks.custom.val_data_alone")))

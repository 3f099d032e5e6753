"""Exit status of a process as text."""

from __future__ import annotations

import signal


def how(status: int) -> str:
    """`status` as in Popen.returncode: negative for a signal."""
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    if status == 0:
        return "exited with status 0 in the middle of the training"
    return f"exited with status {status}"

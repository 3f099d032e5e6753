"""Exit status of a process as text."""

from __future__ import annotations

import signal

from training.core.messages import msg


def how(status: int) -> str:
    """`status` as in Popen.returncode: negative for a signal."""
    if status < 0:
        try:
            return msg("core.exit_status.signal", signal=signal.Signals(-status).name)
        except ValueError:
            return msg("core.exit_status.number", number=-status)
    if status == 0:
        return msg("core.exit_status.early")
    return msg("core.exit_status.status", status=status)

"""What the user sees of a long wait for other machines."""

from __future__ import annotations

import time
from collections.abc import Callable

from training.core import log
from training.core.messages import msg

REPORT_AFTER_S, REPORT_EVERY_S = 5.0, 30.0


class Waiting:
    """Reports after some seconds, and then repeatedly, what is being waited for."""

    def __init__(self) -> None:
        self._started, self._reported_s = time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def report(self, what: str, why: str = "", level: Callable[[str], None] = log.warning) -> None:
        waited = self.seconds
        if waited - self._reported_s > (REPORT_EVERY_S if self._reported_s else REPORT_AFTER_S):
            self._reported_s = waited
            level(
                msg("launcher.nodes.waiting_why", what=what, waited=waited, why=why)
                if why
                else msg("launcher.nodes.waiting", what=what, waited=waited)
            )

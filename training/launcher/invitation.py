"""A new machine in the place of node 0 gets the same command, and its disk knows nothing about the
run that another machine has taken over. That one sends where it listens to the address of node 0
until this node has joined (training.launcher.continued_run waits for it)."""

from __future__ import annotations

import threading
import time

from training.launcher import leadership
from training.launcher.json_socket import Message

CONTINUED = "continued"  # what such a message wants
EVERY_S = 10.0


class Invitations:
    """Those of one coordinator. `first`: the address of node 0."""

    def __init__(self, first: tuple[str, int], message: Message) -> None:
        self._first, self._message = first, message
        self._sent = -EVERY_S

    def look(self) -> None:
        """Called repeatedly while node 0 is lost. Never blocks: its machine may be switched off."""
        if time.monotonic() - self._sent > EVERY_S:
            self._sent = time.monotonic()
            asks = (self._first, self._message)
            threading.Thread(target=leadership.ask, args=asks, daemon=True).start()

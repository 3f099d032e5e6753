"""The other machines, while this one's ranks run and after they have ended: a run of several
machines ends on all of them together."""

from __future__ import annotations

import time

from training.core import log
from training.host import process
from training.launcher.json_socket import Message
from training.launcher.peer_link import PeerLink, Waiting


class Others:
    """Of one start of all ranks; without a `line` there are none. A machine whose ranks have all
    ended reports that to node 0 and waits; node 0 reports the end of the run to all of them when
    the last machine has ended."""

    def __init__(self, line: PeerLink | None) -> None:
        self.line = line
        # node → exit code of its ranks; from node 0 that of the whole run
        self.ended: dict[int, int] = {}
        self._told = False
        self._ended_at: float | None = None  # the ranks of this machine
        self._waiting: Waiting | None = None

    @property
    def first(self) -> bool:
        return self.line is not None and self.line.place.first_node

    def running(self) -> list[int]:
        """The nodes that have not ended; another node than the first one only knows of node 0."""
        if self.line is None:
            return []
        nodes = range(1, self.line.place.nnodes) if self.first else (0,)
        return [node for node in nodes if node not in self.ended]

    def wait(self, code: int) -> bool:
        """Called again and again once the ranks of this machine have ended with `code`: must it go
        on waiting for others?"""
        assert self.line
        if self._waiting is None:
            self._waiting, self._ended_at = Waiting(), time.monotonic()
        left = self.running()
        if not self._told and (not left or not self.first):  # node 0 reports the end of all
            self._told = True
            self.line.tell({"ended": code})
        if left:
            self._waiting.say(
                f"{', '.join(map(self.line.name, left))} to end; the ranks of this machine have "
                f"ended",
                level=log.info,
            )
        return bool(left)

    def still_s(self) -> float:
        """How long the ranks of this machine have been gone; all ranks of a training end
        together."""
        return 0.0 if self._ended_at is None else time.monotonic() - self._ended_at

    def pass_on(self, number: int, times: int, left: int | None) -> None:
        """This machine was asked to stop, for the n-th time: so are all. `left`: this rank has left
        without the others."""
        if self.line:
            self.line.tell({"asked": number, "times": times, "left": left})


def asked(message: Message) -> tuple[int, int] | None:
    """(signal, how often) of a wish to stop from another machine; None where it is not one: it
    comes from a network."""
    number, times = message.get("asked"), message.get("times")
    if (
        not isinstance(number, int)
        or not isinstance(times, int)
        or number not in process.STOP_SIGNALS
    ):
        return None
    return number, times

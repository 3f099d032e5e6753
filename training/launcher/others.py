"""The other machines of a run, while the ranks of this one run and after they have ended: a run
ends on all machines together."""

from __future__ import annotations

import time

from training.core import log
from training.core.messages import msg
from training.launcher import seats
from training.launcher.json_socket import Message
from training.launcher.peer_link import PeerLink, stop_request
from training.launcher.waiting import Waiting


class Others:
    """For one attempt; without a `line` there are none. A machine whose ranks have all ended
    reports that to node 0 and waits; node 0 reports the end of the run to all of them when the last
    machine has ended. A `spare` machine has no ranks, and waits to replace a lost one."""

    def __init__(self, line: PeerLink | None) -> None:
        self.line = line
        self.spare = line is not None and not seats.ranks(line.plan)
        # node → exit code of its ranks; node 0's is that of the whole run
        self.ended: dict[int, int] = {}
        self._reported = False
        self._ended_at: float | None = None  # when the ranks of this machine had ended
        self._waiting: Waiting | None = None

    @property
    def first(self) -> bool:
        """Whether this machine coordinates the run."""
        return self.line is not None and self.line.place.leads

    def running(self) -> list[int]:
        """Machines that have not ended; one that does not coordinate knows only the one that
        does."""
        if self.line is None:
            return []
        leader = self.line.place.leader
        nodes = [n for n in seats.nodes(self.line.plan) if n != leader] if self.first else [leader]
        return [node for node in nodes if node not in self.ended]

    def wait(self, code: int) -> bool:
        """Called repeatedly once the ranks of this machine have ended with `code`: are there
        machines left to wait for?"""
        assert self.line
        if self._waiting is None:
            self._waiting, self._ended_at = Waiting(), time.monotonic()
            if self.spare:
                log.info(msg("launcher.nodes.spare"))
        left = self.running()
        if self.spare:
            return bool(left)
        if not self._reported and (not left or not self.first):  # node 0 reports the end of all
            self._reported = True
            self.line.send_all({"ended": code})
        if left:
            self._waiting.report(
                msg("launcher.nodes.to_end", names=", ".join(map(self.line.name, left))),
                level=log.info,
            )
        return bool(left)

    def still_s(self) -> float:
        """For how long the ranks of this machine have been finished: all ranks of a training end
        together."""
        return 0.0 if self._ended_at is None or self.spare else time.monotonic() - self._ended_at

    def pass_on(self, number: int, times: int, left: int | None) -> None:
        """Pass the n-th stop request on to the other machines. `left`: the rank that got it alone
        and exited without the others."""
        if self.line:
            self.line.send_all({"asked": number, "times": times, "left": left})

    def report_raised(self, number: int) -> None:
        """A rank of a script had raised an exception before the first stop request."""
        if self.line:
            self.line.send_all({"asked": number, "times": 1, "raised": True})


def asked(message: Message) -> tuple[int, int] | None:
    """(signal, how many requests) of a stop request from another machine; None if malformed: it
    comes from a network."""
    number, times = stop_request(message), message.get("times")
    return (number, times) if number is not None and isinstance(times, int) else None

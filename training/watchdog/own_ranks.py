"""Ranks that the only rank of a script has started itself, by a launcher or by
torch.multiprocessing."""

from __future__ import annotations

import time

from training.core import log
from training.core.messages import msg
from training.core.units import plural
from training.watchdog import discovery
from training.watchdog.probes import procfs

SEARCH_S = 10.0  # interval of the search: most scripts start none
SETTLED_S = 60.0  # ranks without variables: processes that have met none of them are none


class OwnRanks:
    """For one attempt, asked a few times a second. `script`: its name."""

    def __init__(self, script: str) -> None:
        self._script = script
        self.running: dict[int, int] = {}
        self._seen: set[int] = set()  # ranks of the same start
        self._complete = False
        self._since, self._next = time.monotonic(), 0.0
        self.elsewhere = False  # other machines have ranks of this training too
        self.joining = False  # a process of this machine may still become a rank

    @property
    def ended(self) -> set[int]:
        """With an unknown status: only the script can wait for them."""
        return self._seen - self.running.keys()

    def of(self, pid: int) -> dict[int, int]:
        """Rank → PID of those that run below this process; {} without any. The last one's end is
        the end of their training: the script may start others."""
        self.running = {rank: one for rank, one in self.running.items() if procfs.lives(one)}
        if self._seen and not self.running:
            self._seen, self._complete, self.elsewhere, self.joining = set(), False, False, False
        now = time.monotonic()
        # those without variables are numbered by the order of their start
        if not self._complete and not self.ended and now >= self._next:
            self._next = now + SEARCH_S
            self._search(pid, settled=now - self._since > SETTLED_S)
        return self.running

    def _search(self, pid: int, settled: bool) -> None:
        found, local, world, maybe = discovery.own_ranks(pid, settled)
        if len(found) < len(self.running) or not found:
            return
        if found != self.running:
            ranks, pids = plural(len(found), "rank"), ", ".join(map(str, found.values()))
            log.info(msg("watchdog.adopted", ranks=ranks, command=self._script, pids=pids))
        self.running, self._complete = found, len(found) == local and not maybe
        self.elsewhere, self.joining = world > local, maybe > 0
        self._seen |= found.keys()

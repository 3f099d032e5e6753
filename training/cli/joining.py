"""Rendezvous of ranks that another launcher has started: reports the ranks that are missing, where
torch would wait in silence and then report their number."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.core import log, phase_timeouts
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg

if TYPE_CHECKING:
    import torch.distributed as dist

    from training.core.contracts.plan import Plan
    from training.host.placement import Topology
    from training.inspector.distributed import World

RESOLVE_AFTER_S, FIRST_S, EVERY_S = 5.0, 25.0, 60.0  # to the first report of each kind, and others
POLL_S, RETRY_S, CONNECT_S = 0.1, 0.5, 5.0
ASK_S = 2.0  # between two questions for the name of the attempt
SHOWN, MANY = 16, 64  # ranks
GIVEN_UP, REPORTED, PRESENT = "joining/given_up", "joining/reported", "joining/present"
ASKED, ANSWER = "joining/asked", "joining/answer"


@dataclass
class Joining:
    """One rank's way to the others. `seconds`: for all of it; `reports`: of all ranks of a machine
    the one that reports what it waits for before there is a store."""

    address: str
    port: int
    rank: int
    size: int
    seconds: float
    reports: bool

    def __post_init__(self) -> None:
        self._began, self._count, self._next_s = time.monotonic(), 0, FIRST_S

    @property
    def at(self) -> str:
        return f"{self.address}:{self.port}"

    def resolve(self) -> None:
        """Wait until the address resolves: that of a pod may take a while. Raises UserError."""
        self._next_s = RESOLVE_AFTER_S
        while why := self._unresolved():
            address, seconds = self.address, self.seconds
            text = msg("cli.join.unresolved", address=address, seconds=seconds, why=why)
            over = Problem("ranks.address", text, msg("cli.join.allowed"))
            self._wait(msg("cli.join.address", address=address), why, over)
        self._next_s = FIRST_S

    def reach(self) -> None:
        """Wait until the store is served. Raises UserError."""
        while why := self._unreachable():
            text = msg("cli.join.no_answer", at=self.at, seconds=self.seconds, why=why)
            over = Problem("ranks.no_answer", text, msg("cli.join.allowed"))
            self._wait(msg("cli.join.rank_0", at=self.at), why, over)

    def _unresolved(self) -> str:
        try:
            socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            return error.strerror or str(error)
        except UnicodeError:  # a part of it is empty or too long
            return msg("launcher.nodes.invalid_name")
        return ""

    def _unreachable(self) -> str:
        try:
            socket.create_connection((self.address, self.port), CONNECT_S).close()
        except ConnectionRefusedError:
            return msg("launcher.nodes.nothing_listens")
        except OSError as error:
            why = error.strerror or msg("launcher.nodes.answers_not")
            return msg("launcher.nodes.cannot_reach", why=why)
        return ""

    def _wait(self, what: str, why: str, over: Problem, *, once: bool = False) -> None:
        """`over`: the error when the time is over; `once`: on each machine."""
        waited = time.monotonic() - self._began
        if waited >= self.seconds:
            raise UserError(over, Exit.RESOURCES, said_by_another=once and not self.reports)
        if self.reports and waited >= self._next_s:
            self._next_s = waited + EVERY_S
            log.warning(msg("launcher.nodes.waiting_why", what=what, waited=waited, why=why))
        time.sleep(min(RETRY_S, self.seconds - waited))

    def wait_for_all(self, store: dist.Store) -> dist.Store:
        """Wait until all ranks have entered themselves into the store, and return the part of it
        that belongs to this attempt. The first rank whose time is over reports the others. Raises
        UserError, and DistNetworkError if the store is gone."""
        from torch.distributed import PrefixStore

        from training.inspector import distributed

        naming, asking = None, None
        if distributed.restarts_differ():
            if self.rank == 0:
                naming = Naming(store, self.size)
                name = naming.name
            else:
                asking = Asking(store, self.rank)
                name = self._name(asking)
            store = PrefixStore(name, store)
        keys = [f"{PRESENT}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], "")
        while not store.check(keys):
            if naming:
                naming.answer()
            elif asking and (name := asking.renamed()):  # only rank 0's machine starts again
                store = PrefixStore(name, asking.store)
                store.set(keys[self.rank], "")
            if store.check([GIVEN_UP]):
                raise self._missing(store, keys, said_by_another=True)
            waited = time.monotonic() - self._began
            if waited >= self.seconds:
                own = str(self.rank)
                first = store.compare_set(GIVEN_UP, "", own).decode()
                time.sleep(5 * POLL_S)  # the store may end with this rank: the others read it first
                raise self._missing(store, keys, said_by_another=first != own)
            if waited >= self._next_s:
                self._report(store, keys, waited)
            time.sleep(POLL_S * max(1.0, self.size / MANY))  # rank 0 answers all of them
        return store

    def _name(self, asking: Asking) -> str:
        """The name of this attempt from rank 0. Raises UserError."""
        what = msg("cli.join.ranks", ranks="0", size=self.size)
        text = msg("cli.join.absent", ranks="0", size=self.size, at=self.at, seconds=self.seconds)
        over = Problem("ranks.missing", text, msg("cli.join.all_start"))
        while not (name := asking.renamed()):
            self._wait(what, msg("cli.join.not_connected", at=self.at), over, once=True)
        return name

    def _report(self, store: dist.Store, keys: list[str], waited: float) -> None:
        """Once for all ranks."""
        self._next_s = waited + EVERY_S
        self._count += 1
        if store.add(f"{REPORTED}/{self._count}", 1) == 1:
            what = msg("cli.join.ranks", ranks=_absent(store, keys), size=self.size)
            log.warning(
                msg(
                    "launcher.nodes.waiting_why",
                    what=what,
                    waited=waited,
                    why=msg("cli.join.not_connected", at=self.at),
                )
            )

    def _missing(self, store: dist.Store, keys: list[str], *, said_by_another: bool) -> UserError:
        ranks = _absent(store, keys)
        text = msg("cli.join.absent", ranks=ranks, size=self.size, at=self.at, seconds=self.seconds)
        problem = Problem("ranks.missing", text, msg("cli.join.all_start"))
        return UserError(problem, Exit.RESOURCES, said_by_another=said_by_another)


class Asking:
    """A rank's questions for the name of the attempt. It asks again: the machine of rank 0 alone
    may start its ranks again, and they have another name."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store, self._rank = store, rank
        self._name = self._word = ""
        self._next = 0.0

    def renamed(self) -> str:
        """The name, if it is a new one; otherwise empty."""
        if self._word and self.store.check([f"{ANSWER}/{self._word}"]):
            name, before = self.store.get(f"{ANSWER}/{self._word}").decode(), self._name
            self._name, self._word = name, ""
            self._next = time.monotonic() + ASK_S
            if name != before:
                return name
        if not self._word and time.monotonic() >= self._next:
            self._word = uuid.uuid4().hex
            self.store.set(f"{ASKED}/{self._rank}", self._word)
        return ""


class Naming:
    """Rank 0's name of this attempt, in a store with the keys of earlier ones. It answers under a
    word that only a rank of this attempt waits for."""

    def __init__(self, store: dist.Store, size: int) -> None:
        self.name = f"attempt/{uuid.uuid4().hex}"
        self._store, self._size = store, size
        self._answered: dict[int, str] = {}

    def answer(self) -> None:
        """Answer the ranks that have asked since the last call."""
        for rank in range(1, self._size):
            key = f"{ASKED}/{rank}"
            word = self._store.get(key).decode() if self._store.check([key]) else ""
            if word and word != self._answered.get(rank):
                self._answered[rank] = word
                self._store.set(f"{ANSWER}/{word}", self.name)


def join(plan: Plan, place: Topology, environ: Mapping[str, str]) -> World:
    """The process group of the ranks. Raises UserError (exit 3)."""
    seconds = float(plan["config"]["rendezvous_timeout"])
    way = None
    if place.world_size > 1:
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        own = place.local_rank == 0
        way = Joining(address, port, place.rank, place.world_size, seconds, own)
        way.resolve()
    from torch.distributed import DistNetworkError, DistStoreError

    from training.inspector import distributed

    limit_s = phase_timeouts.backstop_s(plan["config"]["hang_timeout"], supervised=False)
    device = plan["device"]["value"]
    if way is None:
        return distributed.setup(device, limit_s)
    if not distributed.serves_store(place.rank):
        way.reach()
    try:
        return distributed.setup(device, limit_s, way.wait_for_all)
    except (DistNetworkError, DistStoreError) as error:
        text = msg("cli.join.failed", at=way.at, error=str(error).partition("\n")[0])
        raise UserError(Problem("ranks.rendezvous", text), Exit.RESOURCES) from error


def _absent(store: dist.Store, keys: list[str]) -> str:
    ranks = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    return ", ".join(ranks[:SHOWN]) + (" …" if len(ranks) > SHOWN else "")

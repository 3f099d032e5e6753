"""Data of a rank: prepared by the supervisor or, without one, by rank 0 and by one rank of each
machine that has not its files, while the others wait."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from training.core import heartbeat, phase_timeouts, rundir, standing
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.host import placement

if TYPE_CHECKING:
    import torch.distributed as dist

    from training.core.contracts.plan import PlaceRecord, Plan
    from training.data.prepared_corpus import PreparedCorpus
    from training.inspector.distributed import World

POLL_S, MANY = 0.05, 64  # the store answers all ranks
ALIVE_S = 10.0  # between two additions to ALIVE
REPORT_S = 0.5  # a rank that has failed reports it before the others end
SHOWN = 16  # ranks
FIRST, PUBLISHED, READY = "data/first", "data/published", "data/ready"
ALIVE, COUNT, FAILED = "data/alive", "data/count", "data/failed"

Found = TypeVar("Found")


class RankEnded(RuntimeError):
    """Another rank has ended while this one waited for its data. `rank`: None if unknown."""

    of_code = False  # the line that raised it is that of the check

    def __init__(self, text: str, rank: int | None) -> None:
        super().__init__(text)
        self.rank = rank


def prepared(
    run: rundir.RunDir, plan: Plan, world: World, *, supervised: bool
) -> PreparedCorpus | None:
    """The data of this rank, without a collective, which could time out. None: the task needs no
    preparation."""
    from training import tasks
    from training.trainer import prepared_cache

    if not tasks.spec_of(plan).reads_text:
        return None
    several = not supervised and not placement.on_one_machine(plan["place"])
    shared = plan.get("shared", True)
    limit_s = phase_timeouts.backstop_s(plan["config"]["hang_timeout"], supervised=supervised)
    peers = Peers(world, limit_s)
    first = peers.first_here() if several and not shared else 0
    if world.rank == first and not supervised:
        data: PreparedCorpus | None = _prepare_alone(run, plan, peers)
    else:
        data = peers.wait_for(lambda: prepared_cache.published(run), lambda: [first])
        if several and shared:
            data = _of_this_machine(run, plan, peers, data)
    if several:
        peers.wait_for_all()
    return data


def _of_this_machine(
    run: rundir.RunDir, plan: Plan, peers: Peers, published: PreparedCorpus
) -> PreparedCorpus | None:
    """Data of a machine that has the run directory of rank 0, and perhaps not its prepared data:
    then one rank prepares them for the others there."""
    from training.trainer import prepared_cache

    first = peers.first_here()
    if first != peers.rank:
        if own := peers.wait_for(lambda: peers.published_by(first), lambda: [first]):
            os.environ[prepared_cache.OWN] = own
    elif Path(published.folder).exists():
        peers.publish("")
    else:
        place = cast("PlaceRecord", {**plan["place"], "node_rank": -1})  # data.json is rank 0's
        with peers.preparing():
            prepared_cache.prepare(run, {**plan, "place": place})
        peers.publish(os.environ.get(prepared_cache.OWN, ""))
    return prepared_cache.published(run)


def _prepare_alone(run: rundir.RunDir, plan: Plan, peers: Peers) -> PreparedCorpus:
    """Prepare data as the supervisor would. If new data of a resumed run is rejected, the run is
    restored, but only after FAILED is set: the others must not take the data of the start
    before."""
    from training.plan import writer
    from training.trainer import prepared_cache

    try:
        with peers.preparing():
            return prepared_cache.prepare(run, plan)
    except UserError:
        writer.give_back(run)
        raise


class Peers:
    """The other ranks, as far as their data are concerned, by the ranks' store. All methods raise
    RankEnded if it is gone: it ends with rank 0 or with the launcher. `limit_s`: of a wait in which
    no rank prepares data."""

    def __init__(self, world: World, limit_s: float) -> None:
        self.rank, self._size, self._limit_s = world.rank, world.world_size, limit_s

    def first_here(self) -> int:
        """The first rank of this machine that has asked."""
        with _store() as store:
            first = store.compare_set(f"{FIRST}/{machine()}", "", str(self.rank))
        return int(first.decode())

    def publish(self, text: str) -> None:
        """The data of this machine, for its other ranks; '': those of rank 0."""
        with _store() as store:
            store.set(f"{PUBLISHED}/{self.rank}", text)

    def published_by(self, rank: int) -> str | None:
        with _store() as store:
            key = f"{PUBLISHED}/{rank}"
            return store.get(key).decode() if store.check([key]) else None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """While entered, the others wait as long as this process lives. If it fails, they end."""
        heartbeat.current.beat("preparing data")
        if self._size == 1:
            yield
            return
        ended = threading.Event()
        threading.Thread(target=self._show_life, args=(ended,), daemon=True).start()
        try:
            yield
        except Exception as error:
            with suppress(RankEnded), _store() as store:
                store.set(FAILED, json.dumps(self._failure(error)))
            raise
        finally:
            ended.set()

    def _show_life(self, ended: threading.Event) -> None:
        with suppress(RankEnded):
            while not ended.is_set():
                with _store() as store:
                    store.add(ALIVE, 1)
                ended.wait(ALIVE_S)

    def _failure(self, error: Exception) -> dict[str, object]:
        if not isinstance(error, UserError):
            return {"rank": self.rank}
        rank, host = self.rank, os.uname().nodename
        found = []
        for one in error.problems:
            what = "\n".join(one.lines())
            text = msg("cli.train.of_rank", rank=rank, host=host, what=what)
            found.append({"code": one.code, "text": text})
        return {"rank": rank, "code": int(error.code), "problems": found}

    def wait_for_all(self) -> None:
        """A machine may prepare its data for longer than a collective may take."""
        keys = [f"{READY}/{rank}" for rank in range(self._size)]
        with _store() as store:
            store.set(keys[self.rank], "")
            store.add(COUNT, 1)

        def all_ready() -> bool | None:
            with _store() as store:
                return store.add(COUNT, 0) == self._size or None

        def missing() -> list[int]:
            with _store() as store:
                return [rank for rank, key in enumerate(keys) if not store.check([key])]

        self.wait_for(all_ready, missing)

    def wait_for(self, look: Callable[[], Found | None], missing: Callable[[], list[int]]) -> Found:
        """What `look` finds. `missing`: the ranks that this one waits for. Raises RankEnded, and
        UserError if another rank has rejected its data."""
        heartbeat.current.beat("waiting for data")
        before, since = -1, time.monotonic()
        while (found := look()) is None:
            now = self._progress()
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > self._limit_s:
                ranks = missing()
                shown = ", ".join(map(str, ranks[:SHOWN])) + (" …" if len(ranks) > SHOWN else "")
                text = msg("trainer.data.silent", ranks=shown, limit_s=self._limit_s)
                raise RankEnded(text, ranks[0] if len(ranks) == 1 else None)
            time.sleep(POLL_S * max(1.0, self._size / MANY))
        if self._size > 1:
            self._progress()  # it may be of the start before, which a failed rank has restored
        return found

    def _progress(self) -> int:
        """A number that grows while a rank prepares data. Raises the failure of another rank."""
        with _store() as store:
            if not store.check([FAILED]):
                return store.add(ALIVE, 0) + store.add(COUNT, 0)
            failed = json.loads(store.get(FAILED))
        time.sleep(REPORT_S)
        if "code" not in failed:
            raise _ended(failed["rank"])
        # the console of rank 0 may be another one
        own = self.rank == 0
        problems = [Problem(one["code"], one["text"]) for one in failed["problems"] if own]
        raise UserError(problems, Exit(failed["code"]), said_by_another=not own)


def machine() -> str:
    """A name of this machine, or of this container: some have the host name of their machine."""
    return f"{os.uname().nodename} {standing.boot_id()} {standing.pid_namespace()}"


@contextmanager
def _store() -> Iterator[dist.Store]:
    from torch.distributed import distributed_c10d

    try:
        yield distributed_c10d._get_default_store()
    except RuntimeError as error:
        raise _ended(0) from error


def _ended(rank: int) -> RankEnded:
    return RankEnded(msg("trainer.data.rank_ended", rank=rank), rank)

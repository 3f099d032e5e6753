"""Data of a rank: prepared by the supervisor or, without one, by rank 0 and by one rank of each
machine that has not its files, while the others wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from training.core import heartbeat, rundir, standing
from training.core.errors import UserError
from training.core.messages import msg
from training.host import placement

if TYPE_CHECKING:
    import torch.distributed as dist

    from training.core.contracts.plan import PlaceRecord, Plan
    from training.data.prepared_corpus import PreparedCorpus
    from training.inspector.distributed import World

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
POLL_S = 0.05
FIRST, TOLD, READY = "data/first", "data/told", "data/ready"

Found = TypeVar("Found")


class RankEnded(RuntimeError):
    """Rank 0 has ended while this one waited for it."""

    rank, of_code = 0, False  # the guilty one; the line that raised it is that of the check


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
    peers = Peers(world)
    first = peers.first_here() if several and not shared else 0
    if world.rank == first and not supervised:
        heartbeat.current.beat("preparing data")
        data: PreparedCorpus | None = _prepare_alone(run, plan)
    else:
        data = peers.wait_for(lambda: prepared_cache.published(run))
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
        if own := peers.wait_for(lambda: peers.told_by(first)):
            os.environ[prepared_cache.OWN] = own
    elif Path(published.folder).exists():
        peers.tell("")
    else:
        heartbeat.current.beat("preparing data")
        place = cast("PlaceRecord", {**plan["place"], "node_rank": -1})  # data.json is rank 0's
        try:
            prepared_cache.prepare(run, {**plan, "place": place})
        finally:
            peers.tell(os.environ.get(prepared_cache.OWN, ""))
    return prepared_cache.published(run)


def _prepare_alone(run: rundir.RunDir, plan: Plan) -> PreparedCorpus:
    """Prepare data as the supervisor would. If new data of a resumed run is rejected, the run is
    restored."""
    from training.plan import writer
    from training.trainer import prepared_cache

    try:
        return prepared_cache.prepare(run, plan)
    except UserError:
        writer.give_back(run)
        raise


class Peers:
    """The other ranks, as far as their data are concerned, by the ranks' store."""

    def __init__(self, world: World) -> None:
        self.rank, self._size = world.rank, world.world_size

    def first_here(self) -> int:
        """The first rank of this machine that has asked."""
        key = f"{FIRST}/{machine()}"
        return int(_store().compare_set(key, "", str(self.rank)).decode())

    def tell(self, text: str) -> None:
        """Tell the other ranks of this machine where their data are; '': those of rank 0."""
        _store().set(f"{TOLD}/{self.rank}", text)

    def told_by(self, rank: int) -> str | None:
        key = f"{TOLD}/{rank}"
        return _store().get(key).decode() if _store().check([key]) else None

    def wait_for_all(self) -> None:
        """A machine may prepare its data for longer than a collective may take."""
        keys = [f"{READY}/{rank}" for rank in range(self._size)]
        _store().set(keys[self.rank], "")
        self.wait_for(lambda: _store().check(keys) or None)

    def wait_for(self, look: Callable[[], Found | None]) -> Found:
        """What `look` finds. Raises RankEnded."""
        heartbeat.current.beat("waiting for data")
        while (found := look()) is None:
            _prove_rank_0_lives()
            time.sleep(POLL_S)
        return found


def machine() -> str:
    """A name of this machine, or of this container: some have the host name of their machine."""
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename} {boot} {standing.pid_namespace()}"


def _store() -> dist.Store:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _prove_rank_0_lives() -> None:
    """Check the ranks' store, which ends with rank 0 or with the launcher. Raises RankEnded if
    it is gone."""
    try:
        _store().check([FIRST])
    except RuntimeError as error:
        raise RankEnded(msg("trainer.data.rank_ended")) from error

"""Helpers for ranks, for any script; all of them also work in a single process without a process
group.

    from training.inspector.distributed import all_reduce_mean, barrier, cleanup
    from training.inspector.distributed import get_rank, is_main_process, setup

Every launcher (Duet's supervisor, torchrun, a platform) sets the same variables: RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from training.core import heartbeat
from training.core.messages import msg
from training.host.torch_build import NO_LIBUV

# A listening socket on loopback, inherited by rank 0 for the TCPStore: no other process can take
# its port, and it does not listen on other interfaces.
STORE_FD = "DUET_STORE_FD"
DEFAULT_TIMEOUT_S = 600.0
POLL_S = 0.05
LEAVE_S = 10.0  # that the main process waits for the others to leave a barrier


class BarrierError(RuntimeError):
    """Not all ranks reached a named barrier in time, or ranks were at different barriers."""


@dataclass(frozen=True)
class World:
    """Position of this rank. `backend` is 'none' in a single process."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    backend: str
    master: str


_world: World | None = None
_store: dist.Store | None = None
_barriers = 0


def get_rank() -> int:
    return _world.rank if _world else int(os.environ.get("RANK", 0))


def get_world_size() -> int:
    return _world.world_size if _world else int(os.environ.get("WORLD_SIZE", 1))


def is_main_process() -> bool:
    return get_rank() == 0


def setup(
    device: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    wait_for_all: Callable[[dist.Store], dist.Store] | None = None,
) -> World:
    """Join the process group. device: auto, cuda or cpu; timeout_s: limit of the rendezvous and of
    each collective; wait_for_all: waits for the other ranks, by their store, instead of torch, and
    returns the part of it that belongs to this attempt.

    Raises torch.distributed.DistError if the rendezvous fails.
    """
    global _world, _store
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        index = gpu_index()
        torch.cuda.set_device(index)
        where = torch.device("cuda", index)
    else:
        where = torch.device("cpu")
    if size == 1:
        _world = World(rank, local_rank, size, where, "none", "-")
        return _world
    limit = timedelta(seconds=timeout_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _store = _open_store(address, port, rank, size, limit, waits=wait_for_all is None)
    if wait_for_all:
        _store = wait_for_all(_store)
    backend = "nccl" if device == "cuda" else "gloo"
    prefixed = dist.PrefixStore("group", _store)
    dist.init_process_group(
        backend,
        store=prefixed,
        rank=rank,
        world_size=size,
        timeout=limit,
        device_id=where if device == "cuda" else None,
    )
    _world = World(rank, local_rank, size, where, backend, f"{address}:{port}")
    return _world


def gpu_index() -> int:
    """The GPU of this rank. With SLURM's --gpus-per-task each rank sees one GPU, but LOCAL_RANK
    still counts."""
    return 0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", 0))


def serves_store(rank: int) -> bool:
    """Whether this rank makes the store itself: else another rank does, or torchrun."""
    return rank == 0 and not _agent_serves()


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restarts_differ() -> bool:
    """Whether the store may have keys of earlier attempts, which each machine's agent has counted
    for itself."""
    return _agent_serves() and os.environ.get("GROUP_WORLD_SIZE") != "1"


def _attempt() -> str | None:
    """A name of this attempt that all ranks know; None: the store is of this attempt alone, or
    each machine has its own count."""
    common = _agent_serves() and not restarts_differ()
    return f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if common else None


def _open_store(
    address: str, port: int, rank: int, size: int, limit: timedelta, *, waits: bool
) -> dist.Store:
    """The TCPStore of the ranks; without libuv if the torch build lacks it. `waits`: on rank 0, for
    all of them. That of torchrun's agent keeps the keys of the attempts before."""
    inherited = int(os.environ.pop(STORE_FD)) if STORE_FD in os.environ else None

    def opened() -> dist.Store:
        if inherited is None and waits:
            store: dist.Store = next(dist.rendezvous("env://", rank, size, timeout=limit))[0]
            store.set_timeout(limit)
            return store
        libuv = os.environ.get("USE_LIBUV", "1") == "1"
        return dist.TCPStore(
            address,
            port,
            size,
            serves_store(rank) if inherited is None else rank == 0,
            limit,
            wait_for_workers=False,
            multi_tenant=inherited is None,
            master_listen_fd=inherited,
            use_libuv=libuv,
        )

    try:
        store = opened()
    except (RuntimeError, ValueError) as error:
        if NO_LIBUV not in str(error) or os.environ.get("USE_LIBUV") == "0":
            raise
        os.environ["USE_LIBUV"] = "0"
        store = opened()
    return dist.PrefixStore(attempt, store) if (attempt := _attempt()) else store


def cleanup() -> None:
    """Leave the group; safe to call twice or without setup()."""
    global _world, _store
    if dist.is_initialized():
        dist.destroy_process_group()
    _world, _store = None, None


def barrier(name: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Wait until every rank is at this barrier. It uses the store, not the devices, and can
    therefore name the missing ranks, including rank 0. Raises BarrierError; RuntimeError without a
    process group."""
    global _barriers
    if get_world_size() == 1:
        return
    store, ranks = _common_store(), range(get_world_size())
    heartbeat.current.beat(f"barrier: {name}")
    _barriers += 1
    keys = [f"barrier/{_barriers}/{rank}" for rank in ranks]
    store.set(keys[get_rank()], name)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        text = msg(
            "inspector.barrier.missing",
            name=name,
            ranks=", ".join(map(str, missing)),
            timeout_s=timeout_s,
        )
        raise BarrierError(text) from error
    names = [store.get(key).decode() for key in keys]
    store.set(f"barrier/{_barriers}/left/{get_rank()}", "")
    # This process may host the store: it must not end while another rank still reads the names.
    if is_main_process():
        # A dead rank is not reported by the barrier.
        with contextlib.suppress(dist.DistStoreError):
            store.wait(
                [f"barrier/{_barriers}/left/{rank}" for rank in ranks], timedelta(seconds=LEAVE_S)
            )
    if len(set(names)) > 1:
        raise BarrierError(
            "ranks are at different barriers: "
            + ", ".join(f"rank {r} at '{n}'" for r, n in enumerate(names))
        )


def _common_store() -> dist.Store:
    """The store of setup(), or that of a process group created by the script."""
    if _store is not None:
        return _store
    if dist.is_initialized():
        return dist.PrefixStore("duet", dist.distributed_c10d._get_default_store())
    raise RuntimeError(
        "no process group: call setup() or torch.distributed.init_process_group() first"
    )


def from_main(key: str, value: str | None = None, waiting: Callable[[], None] | None = None) -> str:
    """Broadcast a text from rank 0 through the store (not a collective). Waits at most setup's
    timeout; with `waiting`, which is called regularly, as long as the store exists."""
    if _store is None:
        return value or ""
    if is_main_process():
        _store.set(f"main/{key}", value or "")
        return value or ""
    while waiting and not _store.check([f"main/{key}"]):
        waiting()
        time.sleep(POLL_S)
    return _store.get(f"main/{key}").decode()


def exchange_texts(key: str, text: str, *, everybody: bool = False) -> list[str]:
    """Gather texts on rank 0 (or on every rank) in rank order through the store; other ranks get an
    empty list. Not a collective.

    `key` must be unique per call. Waits at most setup's timeout.
    """
    if _store is None:
        return [text]
    _store.set(f"texts/{key}/{get_rank()}", text)
    if not everybody and not is_main_process():
        return []
    return [_store.get(f"texts/{key}/{rank}").decode() for rank in range(get_world_size())]


def is_first(key: str) -> bool:
    """Is this the first rank to call this with `key`? Without a store, rank 0 is. Not a
    collective."""
    if _store is None:
        return is_main_process()
    own = str(get_rank())
    try:
        return _store.compare_set(f"first/{key}", "", own).decode() == own
    except RuntimeError:  # the rank that serves the store has ended
        return False


def all_reduce_mean(value: float | torch.Tensor) -> float | torch.Tensor:
    """The mean over all ranks, in the type of `value`. A collective: every rank must call it."""
    if get_world_size() == 1:
        return value
    where = _world.device if _world else torch.device("cpu")
    given = (
        value
        if isinstance(value, torch.Tensor)
        else torch.tensor(float(value), dtype=torch.float64)
    )
    total = given.detach().to(where, copy=True)
    dist.all_reduce(total)
    mean = total / get_world_size()
    return mean if isinstance(value, torch.Tensor) else float(mean)

"""Non-blocking exchange of JSON between ranks, through the store of the process group."""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch.distributed as dist


class Store(Protocol):
    """The subset of torch.distributed.Store in use."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...
    def delete_key(self, key: str) -> bool: ...


class OwnStore(dict[str, bytes]):
    """In-memory store for a single process, or for several ranks in one process (tests)."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def add(self, key: str, amount: int) -> int:
        self[key] = str(int(self.get(key) if key in self else 0) + amount).encode()
        return int(self[key])

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


class SharedStore:
    """`store`: used by these ranks only; `server`: an object to keep alive with it. Every call is a
    short request to the store of rank 0; missing values are None."""

    def __init__(self, store: Store, rank: int, world: int, server: object = None) -> None:
        self._store, self.rank, self.world, self._server = store, rank, world, server

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def take(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def take_all(self, key: str) -> list[Any] | None:
        """The values of all ranks in rank order; None until all are present."""
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        return [json.loads(self._store.get(k)) for k in keys] if self._store.check(keys) else None

    def missing(self, key: str) -> list[int]:
        return [rank for rank in range(self.world) if not self._store.check([f"{key}/{rank}"])]

    def announce(self, value: Any) -> None:
        """Append to the sequence that all ranks read: finding/1, finding/2, …"""
        self.put(f"finding/{self._store.add('findings', 1)}", value)

    def close(self) -> None:
        """Stop using the store."""
        self._store, self._server = OwnStore(), None

    def drop_all(self, key: str) -> None:
        for rank in range(self.world):
            self._store.delete_key(f"{key}/{rank}")


def open_board(number: int) -> SharedStore:
    """The shared store of the `number`-th inspector in this process."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return SharedStore(OwnStore(), 0, 1)
    server = dist.distributed_c10d._get_default_store()  # on rank 0 it ends with its last reference
    # A separate connection: a wait in the store (a barrier, the start of NCCL) blocks its own.
    own = server.clone() if hasattr(server, "clone") else server
    return SharedStore(
        dist.PrefixStore(f"{__package__}/{number}", own),
        dist.get_rank(),
        dist.get_world_size(),
        server,
    )

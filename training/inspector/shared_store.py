"""Where the ranks tell each other what they do: the store of the process group. Nobody ever waits
for anybody there."""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch.distributed as dist


class Store(Protocol):
    """What is used of torch.distributed.Store."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...
    def delete_key(self, key: str) -> bool: ...


class OwnStore(dict[str, bytes]):
    """Of a single process, and of several ranks in one process (tests)."""

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
    """`store`: of these ranks alone; `server`: what must live as long. Every call is one short
    question to rank 0's store; what is not there yet is None."""

    def __init__(self, store: Store, rank: int, world: int, server: object = None) -> None:
        self._store, self.rank, self.world, self._server = store, rank, world, server

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def take(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def take_all(self, key: str) -> list[Any] | None:
        """Every rank's, in rank order; None until all are there."""
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        return [json.loads(self._store.get(k)) for k in keys] if self._store.check(keys) else None

    def missing(self, key: str) -> list[int]:
        return [rank for rank in range(self.world) if not self._store.check([f"{key}/{rank}"])]

    def announce(self, value: Any) -> None:
        """The next of a row that everybody reads: finding/1, finding/2, …"""
        self.put(f"finding/{self._store.add('findings', 1)}", value)

    def close(self) -> None:
        """Nothing may be asked any more."""
        self._store, self._server = OwnStore(), None

    def drop_all(self, key: str) -> None:
        for rank in range(self.world):
            self._store.delete_key(f"{key}/{rank}")


def open_board(number: int) -> SharedStore:
    """The `number`-th of this process."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return SharedStore(OwnStore(), 0, 1)
    server = dist.distributed_c10d._get_default_store()  # rank 0's ends with its last user
    # A connection of its own: whoever waits in the store (a barrier, NCCL's start) keeps that
    # connection for himself.
    own = server.clone() if hasattr(server, "clone") else server
    return SharedStore(
        dist.PrefixStore(f"{__package__}/{number}", own),
        dist.get_rank(),
        dist.get_world_size(),
        server,
    )

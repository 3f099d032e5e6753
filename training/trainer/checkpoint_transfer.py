"""Loading the checkpoint of a run. On one machine every rank reads and verifies the file. On
several, rank 0 does and sends its tensors to the others: only its machine needs the checkpoints.

The others never look at a disk then, which may have older checkpoints of the same run. The state is
the same for all ranks: the optimizers gather it before each save and take their own part when it is
loaded, and the order of the data follows from the position.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist

from training.core import heartbeat, log, units
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.inspector.distributed import World, from_main
from training.trainer import checkpoint
from training.trainer.checkpoint import LoadedCheckpoint, TensorTree, TrainProgress

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord

CHUNK = 1 << 26  # bytes of a broadcast, which has a buffer in host memory and one on the GPU
FACTS, DIGEST = "checkpoint", "checkpoint/sha256"  # keys of the ranks' store
Broadcast = Callable[[torch.Tensor], None]  # of a part of the buffer, in place


class Published(TypedDict, total=False):
    """By rank 0; empty without a checkpoint."""

    failed: int  # exit code; alone
    name: str
    skipped: list[str]
    # on several machines
    position: dict[str, int]
    manifest: ManifestRecord
    form_bytes: int
    form_sha256: str


class TransferError(RuntimeError):
    """This rank has another checkpoint than rank 0, or other bytes of it."""


def load(folder: Path, world: World, *, one_machine: bool) -> LoadedCheckpoint | None:
    """The newest intact checkpoint in rank 0's `folder`, or None. All ranks must call it.

    Raises UserError if there are checkpoints but all are damaged, and TransferError.
    """
    if world.world_size == 1:
        return checkpoint.latest(folder, heartbeat.current.again)
    if one_machine:
        return _read_here(folder, world)
    return _send(folder, world) if world.rank == 0 else _receive(folder, world)


def _read_here(folder: Path, world: World) -> LoadedCheckpoint | None:
    """The same one on every rank: a disk that returns an error to one of them could make it use
    an older one."""
    if world.rank == 0:
        loaded = _newest(folder)
        from_main(FACTS, json.dumps(_names(loaded)))
        return loaded
    loaded = checkpoint.latest(folder, heartbeat.current.again)
    first, own = _published(), _names(loaded)
    if own.get("name") != first.get("name"):
        none = msg("trainer.checkpoint.none")
        text = msg(
            "trainer.checkpoint.other_rank",
            rank=world.rank,
            own=own.get("name", none),
            name=first.get("name", none),
            folder=folder,
        )
        raise TransferError("; ".join([text, *own.get("skipped", ()), *first.get("skipped", ())]))
    return loaded


def _names(loaded: LoadedCheckpoint | None) -> Published:
    return {"name": loaded.path.name, "skipped": loaded.skipped} if loaded else {}


def _newest(folder: Path) -> LoadedCheckpoint | None:
    """On rank 0, whose error ends the wait of the others."""
    try:
        return checkpoint.latest(folder, heartbeat.current.again)
    except UserError as error:
        from_main(FACTS, json.dumps({"failed": int(error.code)}))
        raise


def _published() -> Published:
    """Raises UserError if rank 0 has no intact checkpoint."""
    facts: Published = json.loads(from_main(FACTS, waiting=heartbeat.current.again))
    if "failed" in facts:
        raise UserError([], Exit(facts["failed"]), said_by_another=True)
    return facts


def _send(folder: Path, world: World) -> LoadedCheckpoint | None:
    loaded = _newest(folder)
    if loaded is None:
        from_main(FACTS, "{}")
        return None
    began, form = time.monotonic(), _form(loaded.state)
    pieces = [_flat(tensor) for tensor in _tensors(loaded.state)]
    facts: Published = {
        "name": loaded.path.name,
        "position": asdict(loaded.position),
        "manifest": loaded.manifest,
        "form_bytes": len(form),
        "form_sha256": hashlib.sha256(form).hexdigest(),
    }
    from_main(FACTS, json.dumps(facts))
    send([torch.frombuffer(bytearray(form), dtype=torch.uint8)], _broadcast(world))
    from_main(DIGEST, send(pieces, _broadcast(world)))
    log.info(
        msg(
            "trainer.checkpoint.sent",
            name=loaded.path.name,
            size=units.size(len(form) + sum(map(torch.numel, pieces))),
            seconds=time.monotonic() - began,
            ranks=units.plural(world.world_size - 1, "rank"),
        )
    )
    return loaded


def _receive(folder: Path, world: World) -> LoadedCheckpoint | None:
    facts = _published()
    if not facts:
        return None
    form = torch.empty(facts["form_bytes"], dtype=torch.uint8)
    _compare(receive([form], _broadcast(world)), facts["form_sha256"], facts["name"])
    state = _empty(form.numpy().tobytes())
    found = receive([_flat(tensor) for tensor in _tensors(state)], _broadcast(world))
    _compare(found, from_main(DIGEST), facts["name"])
    position, path = TrainProgress(**facts["position"]), folder / facts["name"]
    return LoadedCheckpoint(position, state, facts["manifest"], path, [])


def _compare(found: str, sent: str, name: str) -> None:
    """Compare the checksums of what was received and sent. Raises TransferError."""
    if found != sent:
        text = msg(
            "trainer.checkpoint.transfer",
            host=socket.gethostname(),
            name=name,
            found=found[:12],
            sent=sent[:12],
        )
        raise TransferError(text)


def _broadcast(world: World) -> Broadcast:
    def broadcast(chunk: torch.Tensor) -> None:
        heartbeat.current.again()
        there = chunk.to(world.device)
        dist.broadcast(there, 0)
        if there is not chunk:
            chunk.copy_(there)

    return broadcast


def send(pieces: list[torch.Tensor], broadcast: Broadcast) -> str:
    """Broadcast the bytes of `pieces` (uint8, one dimension each); returns their sha256."""
    digest = hashlib.sha256()
    for chunk, parts in _chunks(pieces):
        for place, part in parts:
            place.copy_(part)
        broadcast(chunk)
        digest.update(chunk.numpy())
    return digest.hexdigest()


def receive(pieces: list[torch.Tensor], broadcast: Broadcast) -> str:
    """Fill `pieces`, of the same sizes as rank 0's; returns the sha256 of their bytes."""
    digest = hashlib.sha256()
    for chunk, parts in _chunks(pieces):
        broadcast(chunk)
        digest.update(chunk.numpy())
        for place, part in parts:
            part.copy_(place)
    return digest.hexdigest()


def _chunks(
    pieces: list[torch.Tensor],
) -> Iterator[tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """The used part of one buffer, with (place in the buffer, part of a piece); each but the last
    is CHUNK bytes. Small tensors travel together: an optimizer has thousands of them."""
    buffer = torch.empty(min(CHUNK, sum(map(torch.numel, pieces))), dtype=torch.uint8)
    used, parts = 0, []
    for piece in pieces:
        left = piece
        while left.numel():
            place = buffer[used : used + left.numel()]
            parts.append((place, left[: place.numel()]))
            used, left = used + place.numel(), left[place.numel() :]
            if used == len(buffer):
                yield buffer, parts
                used, parts = 0, []
    if parts:
        yield buffer[:used], parts


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: a view of a contiguous one."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _has_bytes(value: Any) -> bool:
    """Not sparse tensors, and those that consist of others: they travel with the structure."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors that have bytes, in an order that depends on the structure alone."""
    if _has_bytes(value):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _form(state: TensorTree) -> bytes:
    """Everything but the bytes of the tensors."""
    file = io.BytesIO()
    torch.save(_replaced(state, lambda tensor: torch.empty_like(tensor, device="meta")), file)
    return file.getvalue()


def _empty(form: bytes) -> TensorTree:
    """The state of `form`, with tensors to be filled."""
    found = torch.load(io.BytesIO(form), weights_only=True)
    state: TensorTree = _replaced(found, lambda t: torch.empty(t.shape, dtype=t.dtype))
    return state


def _replaced(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if _has_bytes(value):
        return change(value)
    if isinstance(value, dict):
        other = copy.copy(value)  # keeps the versions of modules in a state_dict's _metadata
        other.update((key, _replaced(item, change)) for key, item in value.items())
        return other
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, change) for item in value)
    return value

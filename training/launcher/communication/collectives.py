"""Collectives of the communication test: every element of the result is known in advance, and
checked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypedDict

import torch
import torch.distributed as dist

from training.inspector.distributed import World, gpu_index
from training.launcher.communication.stages import SMALL_BYTES

# Prime: no piece that a collective moves as a whole is a multiple of it, so a misplaced piece is
# detected. Small: the sum over a thousand ranks is an integer that float32 represents exactly.
PERIOD = 31
ELEMENT_BYTES = 4
SMALL_REPETITIONS, LARGE_REPETITIONS = 50, 5


class Wrong(TypedDict):
    """A wrong result of a collective."""

    collective: str
    bytes: int
    element: int  # the first that differs
    got: float
    expected: float
    count: int  # of elements that differ


def start_gpu() -> None:
    """Create the context and run a kernel, before any rank waits for another."""
    torch.cuda.set_device(gpu_index())
    torch.ones(1, device="cuda").sum().item()


def warm_up(world: World) -> None:
    dist.all_reduce(torch.ones(1, device=world.device))
    _finish(world)


def all_reduce(world: World, size: int) -> list[Wrong]:
    """Sum over the ranks, of data that differs by rank and position."""
    data = _pattern(world, size, world.rank + 1)
    dist.all_reduce(data)
    _finish(world)
    total = world.world_size * (world.world_size + 1) // 2
    return _compare(data, _pattern(world, size, total), "all_reduce", size)


def broadcast(world: World, size: int) -> list[Wrong]:
    """From every rank in turn to all others."""
    wrong = []
    for source in range(world.world_size):
        expected = _pattern(world, size, source + 1)
        data = expected.clone() if source == world.rank else torch.full_like(expected, -1.0)
        dist.broadcast(data, source)
        _finish(world)
        wrong += _compare(data, expected, f"broadcast from rank {source}", size)
    return wrong


CHECKS: dict[str, Callable[[World, int], list[Wrong]]] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
}


def _pattern(world: World, size: int, factor: int) -> torch.Tensor:
    positions = torch.arange(size // ELEMENT_BYTES, device=world.device, dtype=torch.int32)
    return (positions % PERIOD + 1).to(torch.float32) * factor


def _compare(got: torch.Tensor, expected: torch.Tensor, name: str, size: int) -> list[Wrong]:
    different = got != expected  # true for NaN
    count = int(different.sum())
    if not count:
        return []
    first = int(different.to(torch.uint8).argmax())
    return [
        {
            "collective": name,
            "bytes": size,
            "element": first,
            "got": float(got[first]),
            "expected": float(expected[first]),
            "count": count,
        }
    ]


def measure(world: World, large_bytes: int) -> dict[str, float]:
    """Median seconds of an all_reduce, small and large."""
    return {
        "small_s": _median(world, SMALL_BYTES, SMALL_REPETITIONS),
        "large_s": _median(world, large_bytes, LARGE_REPETITIONS),
    }


def _median(world: World, size: int, repetitions: int) -> float:
    # zeros: repeated sums would overflow
    data = torch.zeros(size // ELEMENT_BYTES, device=world.device)
    seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        dist.all_reduce(data)
        _finish(world)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _finish(world: World) -> None:
    """A collective on a GPU is only enqueued when the call returns."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def versions(device: str) -> dict[str, str]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else "-"
    return {"torch": str(torch.__version__), "nccl": nccl}

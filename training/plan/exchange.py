"""Predicted exchange of gradients in a step: how long it takes, how much of it the backward pass
hides, and what follows for buckets and compression. Pure arithmetic.

    exchange   bytes of the gradients / measured bandwidth, and Muon's updates
    arithmetic operations of a step / (peak of the slowest GPU × MFU)
    hidden     as much as fits into the backward pass of the last micro-batch
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# Model FLOPs utilization of a step without communication: published runs on one machine reach 41 to
# 52 %, compiled (docs/gpus.md); eager kernels about two thirds of that.
MFU_COMPILED, MFU_EAGER = 0.45, 0.3
BACKWARD = 2 / 3  # of the operations of a micro-batch
MIB = 1 << 20
BUCKET_MIB, BUCKETS_MIB = 25, (4, 8, 16, 25, 50, 100)  # torch's default; the choices
LITTLE = 0.75  # of an ideal speed-up: below, the plan explains what limits it
PAYS = 0.05  # of a step: what compression has to save
# The host's time for the launches of a compiled block in one micro-batch, on the slowest host
# measured (docs/gpus.md), and how much of it is left with several blocks in one graph.
LAUNCHES_S, LAUNCHES_LEFT = 2.5e-3, 0.6


@dataclass(frozen=True)
class Exchange:
    """One optimizer step of each of `ranks` GPUs."""

    ranks: int
    gradient_bytes: int  # fp32, of one rank
    update_bytes: int  # gathered by all ranks after the optimizer (sharded Muon); 0: none
    bytes_per_s: float  # size / time of an all_reduce
    latency_s: float  # of a small all_reduce
    compute_s: float | None  # arithmetic of a rank; None: unknown
    fastest: float = 1.0  # peak of the fastest GPU, as a multiple of that of the slowest
    accumulation: int = 1
    compressed: bool = False
    bucket_mib: int = BUCKET_MIB
    graph_bytes: int = 0  # gradients of a compiled graph, which are complete when it has ended
    launches_s: float = 0.0  # of the host, at most; 0: negligible

    @property
    def sent_bytes(self) -> float:
        return self.gradient_bytes / 2 if self.compressed else self.gradient_bytes

    @property
    def latencies_s(self) -> float:
        buckets = math.ceil(self.gradient_bytes / (self.bucket_mib * MIB))
        return buckets * self.latency_s

    @property
    def small(self) -> bool:
        """Whether the latency of the buckets takes longer than their bytes."""
        return self.latencies_s > self.sent_bytes / self.bytes_per_s

    @property
    def gradients_s(self) -> float:
        return self.sent_bytes / self.bytes_per_s + self.latencies_s

    @property
    def updates_s(self) -> float:
        """An all_gather sends half as many bytes as an all_reduce of the same size."""
        return self.update_bytes / 2 / self.bytes_per_s

    @property
    def total_s(self) -> float:
        return self.gradients_s + self.updates_s

    @property
    def exposed_s(self) -> float:
        """Not hidden: the excess over the backward pass after its first graph, at least the last
        bucket or graph, and updates. Everything if the arithmetic is unknown."""
        if self.compute_s is None:
            return self.total_s
        first = min(1.0, self.graph_bytes / self.gradient_bytes)
        backward = self.compute_s * BACKWARD / self.accumulation * (1 - first)
        last = self.gradients_s * max(first, min(1.0, self.bucket_mib * MIB / self.gradient_bytes))
        return max(self.gradients_s - backward, last) + self.updates_s

    @property
    def share(self) -> float | None:
        """Share of a step in which the GPU waits for the exchange, 0 to 1."""
        return (
            None if self.compute_s is None else self.exposed_s / (self.compute_s + self.exposed_s)
        )

    @property
    def waits_little(self) -> bool:
        """For the exchange; faster GPUs also wait for slower ones."""
        return self.share is not None and 1 - self.share >= LITTLE

    @property
    def speed_up(self) -> float | None:
        """Over the fastest GPU alone with the same work per GPU."""
        return None if self.share is None else self.ranks * (1 - self.share) / self.fastest

    def accumulated(self, factor: int) -> Exchange:
        """The same with so many times the micro-batches."""
        compute = None if self.compute_s is None else self.compute_s * factor
        return replace(self, compute_s=compute, accumulation=self.accumulation * factor)


def in_graphs(one: Exchange, blocks: int, block_bytes: int, together: int) -> Exchange:
    """The same with `together` of the `blocks` compiled as one graph; `block_bytes`: gradients of a
    block."""
    launches = blocks * one.accumulation * LAUNCHES_S * (LAUNCHES_LEFT if together > 1 else 1)
    return replace(one, graph_bytes=together * block_bytes, launches_s=launches)


def best_bucket(one: Exchange) -> tuple[int, float]:
    """(bucket size in MiB, the optimum): more buckets cost more latency, larger ones leave a larger
    last one that no backward pass hides. Torch's default unless the optimum is twice or half."""
    sent = one.gradient_bytes * one.latency_s * one.bytes_per_s * (2 if one.compressed else 1)
    optimum = math.sqrt(sent) / MIB
    if BUCKET_MIB / 2 <= optimum <= BUCKET_MIB * 2:
        return BUCKET_MIB, optimum
    return min(BUCKETS_MIB, key=lambda size: abs(math.log(size / max(optimum, 1e-9)))), optimum


def saved(plain: Exchange, other: Exchange) -> float | None:
    """Share of a step with `plain` that `other` saves; None if unknown."""
    if plain.compute_s is None:
        return None
    return (plain.exposed_s - other.exposed_s) / (plain.compute_s + plain.exposed_s)


def largest_factor(most: int) -> int | None:
    """The largest power of two up to `most`; None if that is less than 2."""
    return 1 << (most.bit_length() - 1) if most >= 2 else None

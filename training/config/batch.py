"""Batch arithmetic: total_batch_size = device_batch_size × max_seq_len × world_size × accumulation
steps.

For samples that are not token sequences the length is 1 and sizes are in samples.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

from training.core.messages import msg
from training.core.units import plural

if TYPE_CHECKING:
    from training.core.contracts.plan import BatchRecord


@dataclass(frozen=True)
class Batch:
    """Batch of one optimizer step. Sizes are in the task's unit (tokens, samples), except those in
    sequences."""

    device_sequences: int  # per rank and micro-batch
    seq_len: int
    world_size: int
    accumulation: int  # micro-batches per rank and optimizer step

    def record(self) -> BatchRecord:
        return cast("BatchRecord", asdict(self))

    @property
    def micro_tokens(self) -> int:
        """Tokens of one micro-batch of all ranks."""
        return self.device_sequences * self.seq_len * self.world_size

    @property
    def total_tokens(self) -> int:
        return self.micro_tokens * self.accumulation

    def sentence(self, unit: str = "tokens") -> str:
        each = (
            msg(
                "config.batch.sequences",
                sequences=plural(self.device_sequences, "sequence"),
                seq_len=self.seq_len,
            )
            if unit == "tokens"
            else f"{self.device_sequences} {unit}"
        )
        ranks, steps = (
            plural(self.world_size, "rank"),
            plural(self.accumulation, "accumulation step"),
        )
        return msg(
            "config.batch.per_step",
            each=each,
            ranks=ranks,
            steps=steps,
            total_tokens=self.total_tokens,
            unit=unit,
        )


def split(device_sequences: int, seq_len: int, world_size: int, total_tokens: int) -> Batch | None:
    """The batch, or None if `total_tokens` is not divisible."""
    steps, rest = divmod(total_tokens, device_sequences * seq_len * world_size)
    return None if rest or not steps else Batch(device_sequences, seq_len, world_size, steps)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def device_choices(seq_len: int, world_size: int, total_tokens: int) -> list[int]:
    """Every device_batch_size that divides this total, ascending."""
    sequences, rest = divmod(total_tokens, seq_len * world_size)
    return [] if rest or not sequences else divisors(sequences)


def smaller(device_sequences: int, seq_len: int, world_size: int, total_tokens: int) -> int | None:
    """The next smaller device_batch_size that divides this total, or None."""
    return max(
        (
            size
            for size in device_choices(seq_len, world_size, total_tokens)
            if size < device_sequences
        ),
        default=None,
    )


def repairs(
    device_sequences: int, seq_len: int, world_size: int, total_tokens: int
) -> list[tuple[str, int]]:
    """The smallest single changes that make the batch divisible, as (field, value): totals first,
    then device batches."""
    micro = device_sequences * seq_len * world_size
    below = total_tokens // micro * micro
    totals = [t for t in (below, below + micro) if t > 0]
    out = [
        ("total_batch_size", t) for t in sorted(totals, key=lambda t: (abs(t - total_tokens), t))
    ]
    choices = device_choices(seq_len, world_size, total_tokens)
    nearest = sorted(choices, key=lambda d: (abs(d - device_sequences), -d))
    return out + [("device_batch_size", d) for d in nearest[:1]]

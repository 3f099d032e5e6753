"""Memory of one rank before anything runs, by formula.

The formula's terms (parameters, gradients, AdamW state, activations, logits) were compared with eight public runs of
this model family: it under-predicts by 0 to 27 %. So `needed` adds 10 % and 1 GiB, and `tight` warns at 25 %.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from training.data.tokenizer import PADDED_VOCAB

GIB = 1 << 30
# What the authors of the original dual-GPU configs promise for 2 × 32 GB, in GB, printed beside our estimate.
PROMISE = {"conservative": "15–16 GB", "balanced": "20–22 GB", "aggressive": "28–30 GB"}


@dataclass(frozen=True)
class Estimate:
    """Bytes per rank."""

    parameters: int
    gradients: int
    optimizer: int
    weight_copies: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def needed(self) -> int:
        return int(self.total * 1.10) + GIB

    @property
    def tight(self) -> int:
        return int(self.total * 1.25) + GIB

    def record(self) -> dict[str, Any]:
        return {f"{name}_bytes": value for name, value in asdict(self).items()} | {
            "total_bytes": self.total,
            "needed_bytes": self.needed,
        }

    def sentence(self) -> str:
        return (
            f"{gib(self.total)} per rank (parameters {gib(self.parameters)}, gradients {gib(self.gradients)}, "
            f"optimizer {gib(self.optimizer)}, activations {gib(self.activations)}, logits {gib(self.logits)}); "
            f"{gib(self.needed)} with the margin that decides"
        )


def gib(amount: int | None) -> str:
    """Bytes for people."""
    if amount is None:
        return "-"
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / (1 << 20):.0f} MiB"


def parameters(depth: int, vocab: int = PADDED_VOCAB) -> int:
    """Number of weights of the GPT of this depth."""
    width = 64 * depth
    return 12 * depth * width**2 + 2 * vocab * width


def estimate(depth: int, sequences: int, seq_len: int, *, bf16: bool, compiled: bool, vocab: int = PADDED_VOCAB) -> Estimate:
    """Bytes per rank for DDP with fp32 weights and AdamW; `sequences` is the micro-batch of one rank."""
    width, tokens, weights = 64 * depth, sequences * seq_len, parameters(depth, vocab)
    per_element = 1 if bf16 else 2  # the constants below are for 16-bit activations
    return Estimate(
        parameters=4 * weights,
        gradients=4 * weights,
        optimizer=8 * weights,
        weight_copies=2 * weights if bf16 else 0,
        activations=(38 if compiled else 50) * depth * width * tokens * per_element,
        logits=(2 * per_element if compiled else 16) * vocab * tokens,
    )

"""Memory of one rank before anything runs, by formula.

The constants are those of our model (training/tasks/gpt/model.py): counted from the tensors that
autograd keeps, and compared with fake tensors and with real runs; docs/memory.md has the figures,
`python -m benchmarks.memory` measures them again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

from training.tasks.gpt.model_dims import ModelDims
from training.tasks.memory import CONTEXT, gib, with_ample_margin, with_margin

if TYPE_CHECKING:
    from training.core.contracts.plan import MemoryRecord

# What the authors of the original dual-GPU configs promise for 2 × 32 GB, in GB, printed beside our
# estimate.
PROMISE = {"conservative": "15–16 GB", "balanced": "20–22 GB", "aggressive": "28–30 GB"}

# Bytes per token and unit of width. The residual stream is fp32, under bf16 autocast too.
RESIDUAL = 4  # all that a checkpointed block keeps: its input
PARTS = 8  # the parts' gradients of a loss in parts, while they are added up


@dataclass(frozen=True)
class StepWorkload:
    """What one rank trains: everything that the memory depends on."""

    depth: int
    sequences: int  # micro-batch of one rank
    seq_len: int
    vocab: int  # rows of the embedding, with padding
    bf16: bool
    compiled: bool
    cuda: bool = True
    muon: bool = True  # for the blocks' matrices; False: AdamW
    ranks: int = 1  # that share Muon's state (training/tasks/gpt/optim.py)
    blocks: int = 0  # checkpointed
    chunks: int = 1  # of the loss
    total_tokens: int = 0  # of an optimizer step, all ranks; 0: of one micro-batch
    copy: bool = False  # rank 0's copy of a checkpoint lies in the same memory, as on a CPU

    @property
    def shape(self) -> ModelDims:
        return ModelDims(self.depth, self.vocab, self.seq_len)

    @property
    def width(self) -> int:
        return self.shape.width

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len

    @property
    def optimizer_state(self) -> int:
        """Bytes of all ranks' state together."""
        return (
            4 if self.muon else 8
        ) * self.depth * self.shape.block_weights + 16 * self.vocab * self.width

    @property
    def second_gradients(self) -> int:
        """Bytes of the gradients that gather over micro-batches: DDP leaves them beside its buckets
        until the last one."""
        return (
            4 * self.shape.weights
            if self.ranks > 1 and self.total_tokens > self.tokens * self.ranks
            else 0
        )

    @property
    def saved(self) -> int:
        """Bytes that saving a checkpoint takes in the same memory and keeps: what is gathered from
        the other ranks, and a copy of all."""
        return self.elsewhere + 4 * self.shape.weights + self.optimizer_state if self.copy else 0

    @property
    def elsewhere(self) -> int:
        """Bytes of Muon's state that the other ranks hold."""
        whole = 4 * self.depth * self.shape.block_weights if self.muon else 0
        return whole - whole // self.ranks

    @property
    def extra_time(self) -> float:
        """Multiplications that are done again, as a share of all of a step (forward 1, backward
        2)."""
        block, head = self.shape.block_weights + self.seq_len * self.width, self.vocab * self.width
        again = self.blocks * block + (head if self.chunks > 1 else 0)
        return again / (3 * (self.depth * block + head))


@dataclass(frozen=True)
class Estimate:
    """Bytes per rank at the peak of a step."""

    parameters: int
    # DDP's buckets, which stay from step to step and are the gradients; with accumulation those
    # beside them too
    gradients: int
    optimizer: int
    weight_copies: int  # in bf16
    activations: int  # kept for the backward pass
    logits: int  # with their gradient, while the loss is computed; 0 when the peak is in a block
    # what one block needs beside what is kept, in its backward pass; 0 when the peak is at the loss
    block: int
    context: int
    saved: int = 0  # for checkpoints, on rank 0 of a CPU training

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def needed(self) -> int:
        return with_margin(self.total)

    @property
    def tight(self) -> int:
        return with_ample_margin(self.total)

    def record(self) -> MemoryRecord:
        parts = {f"{name}_bytes": value for name, value in asdict(self).items()}
        return cast(
            "MemoryRecord",
            parts
            | {"total_bytes": self.total, "needed_bytes": self.needed, "tight_bytes": self.tight},
        )

    def sentence(self) -> str:
        peak = (
            f"logits {gib(self.logits)}"
            if self.logits
            else f"one block's backward pass {gib(self.block)}"
        )
        copies = f"bf16 weights {gib(self.weight_copies)}, " if self.weight_copies else ""
        copies += f"checkpoint {gib(self.saved)}, " if self.saved else ""
        return (
            f"{gib(self.total)} per rank (parameters {gib(self.parameters)}, gradients "
            f"{gib(self.gradients)}, "
            f"optimizer {gib(self.optimizer)}, {copies}activations {gib(self.activations)}, "
            f"{peak}); "
            f"{gib(self.needed)} with the margin that decides"
        )


@dataclass(frozen=True)
class _Constants:
    """Bytes per token and unit of width (`logits`: per token and vocabulary entry)."""

    kept: int  # by a block for its backward pass
    work: int  # beside that, at the height of a block's backward pass
    again: int  # instead of `work`, when the block was computed again and no other is alive in full
    ends: int  # embedding and last norm
    logits: int  # logits and what the loss makes of them, forward and backward, at their height


def _constants(load: StepWorkload) -> _Constants:
    if load.compiled:
        return _Constants(49, 21, 21, 6, 4) if load.bf16 else _Constants(81, 25, 25, 8, 8)
    if load.bf16:
        return _Constants(57, 21, 5, 10, 16)
    return _Constants(86, 25, 14, 12, 16)


def estimate(load: StepWorkload) -> Estimate:
    """Bytes per rank with fp32 weights, as training/trainer does it.

    A step has two heights: at the loss (everything kept, and the logits), and in the backward pass
    of the last block (everything kept, no logits, but the gradients inside a block). A block that
    was checkpointed is computed again before its backward pass, so one of them is alive in full
    when no other block is.
    """
    use, unit = _constants(load), load.width * load.tokens
    matrices, table = load.shape.block_weights, load.vocab * load.width
    weights = load.shape.weights
    plain = load.depth - load.blocks
    kept = (use.ends + plain * use.kept + load.blocks * RESIDUAL) * unit
    logits = use.logits * load.vocab * load.tokens // load.chunks + (
        PARTS * unit if load.chunks > 1 else 0
    )
    block = (use.work if plain else use.kept + use.again) * unit
    # Eager autocast keeps all copies until the end of the forward pass.
    at_loss = 2 * ((plain if load.compiled else load.depth) * matrices + table) if load.bf16 else 0
    in_block = 2 * max(plain, 1) * matrices if load.bf16 else 0
    loss_is_peak = at_loss + logits >= in_block + block
    return Estimate(
        parameters=4 * weights,
        gradients=4 * weights + load.second_gradients,
        optimizer=load.optimizer_state - load.elsewhere,
        weight_copies=at_loss if loss_is_peak else in_block,
        activations=kept,
        logits=logits if loss_is_peak else 0,
        block=0 if loss_is_peak else block,
        context=CONTEXT if load.cuda else 0,
        saved=load.saved,
    )

"""Memory of one rank before anything runs, by formula.

The formula belongs to Duet's model (training/tasks/gpt/model.py), and so do its constants. Figures:
docs/memory_accuracy.md; to measure them again: `python -m benchmarks.memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

from training.core.messages import msg
from training.tasks.gpt import memory_constants
from training.tasks.gpt.memory_constants import Constants
from training.tasks.gpt.model_dims import ModelDims, muon_share
from training.tasks.memory import (
    CONTEXT,
    exchanged_copies,
    gib,
    pinned,
    with_ample_margin,
    with_margin,
)

if TYPE_CHECKING:
    from training.core.contracts.plan import MemoryRecord

# Memory that the authors of the original dual-GPU configs report for 2 × 32 GB, in GB, printed
# beside Duet's estimate.
PROMISE = {"conservative": "15–16 GB", "balanced": "20–22 GB", "aggressive": "28–30 GB"}

# Multiplications per token and unit of width that take as long on a GPU as everything in a block
# but its products and attention: an estimate from bytes read and written, about 40, and the 50
# multiplications in bf16 for which a GPU needs as long as for one byte.
ELEMENTWISE = 2000

# Bytes per weight of Muon's updates: bf16 or fp16. (GPUs without tensor cores exchange fp32.)
UPDATE = 2
# Most that Muon needs on a GPU to compute a batch of updates, in bytes of these: fp32 gradients and
# products of the iteration. For square matrices, and for the MLP's of 8/3 of the width.
SQUARE, OBLONG = 3.0, 3.5

# Bytes of the residual stream's numbers: fp32, but bf16 under bf16 autocast. A checkpointed block
# keeps one for each token and unit of width, its input.
STREAM, STREAM_BF16 = 4, 2
PARTS = 2  # gradients of a split loss while they are summed, in numbers of the residual stream


@dataclass(frozen=True)
class StepWorkload:
    """Everything about a rank's training that its memory depends on."""

    depth: int
    sequences: int  # sequences of a micro-batch of one rank
    seq_len: int
    vocab: int  # rows of the embedding, padding included
    bf16: bool  # or fp16; also with fp8
    compiled: bool
    cuda: bool = True
    muon: bool = True  # for the blocks' matrices; False: AdamW
    ranks: int = 1  # sharing Muon's state (training/tasks/gpt/optim.py)
    blocks: int = 0  # number of checkpointed blocks
    selective: int = 0  # of further blocks that keep their products and attention
    chunks: int = 1  # parts of the loss
    total_tokens: int = 0  # per optimizer step, all ranks; 0: one micro-batch
    fp8: bool = False  # products of the blocks
    fp16: bool = False  # instead of bf16: the residual stream stays fp32
    ema: bool = False  # a moving average of the weights
    # rank 0's checkpoint copy is in the same memory: on a CPU, and a GPU with the host's memory
    copy: bool = False
    compressed: bool = False  # gradients, between the ranks
    dropout: float = 0.0

    @property
    def shape(self) -> ModelDims:
        return ModelDims(self.depth, self.vocab, self.seq_len)

    @property
    def width(self) -> int:
        return self.shape.width

    @property
    def plain(self) -> int:
        """Blocks that recompute nothing."""
        return self.depth - self.blocks - self.selective

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len

    @property
    def stream(self) -> int:
        """Bytes of each number in the residual stream."""
        return STREAM_BF16 if self.bf16 and not self.fp16 else STREAM

    @property
    def copied_weights(self) -> int:
        """Weights of a block that autocast copies."""
        return 0 if self.fp8 else self.shape.block_weights

    @property
    def optimizer_state(self) -> int:
        """Bytes of the state of all ranks together."""
        return (
            4 if self.muon else 8
        ) * self.depth * self.shape.block_weights + 16 * self.vocab * self.width

    @property
    def average(self) -> int:
        """Bytes of the moving average of the weights."""
        return 4 * self.shape.weights if self.ema else 0

    @property
    def accumulates(self) -> bool:
        return self.total_tokens > self.tokens * self.ranks

    @property
    def holds_gradients(self) -> bool:
        """Whether a forward pass finds gradients in memory: DDP's buckets, or those of the
        micro-batch before."""
        return self.ranks > 1 or self.accumulates

    @property
    def second_gradients(self) -> int:
        """Bytes of gradients beside DDP's buckets: accumulated ones, until the last micro-batch,
        and copies for the exchange."""
        buckets = 4 * self.shape.weights
        copies = exchanged_copies(buckets, self.ranks) if self.compressed else 0
        return copies + (buckets if self.ranks > 1 and self.accumulates else 0)

    @property
    def updates(self) -> int:
        """Temporary bytes of Muon's step on a GPU. Assumes updates of 16 bits."""
        if not self.muon or not self.cuda:
            return 0
        most = before = 0.0
        for own, factor in self._muon_batches():
            # What this rank sends, and what all have; applied after the next one is computed and
            # its exchange has begun.
            exchanged = own * (1 if self.ranks == 1 else 1 + self.ranks)
            most = max(most, before + max(factor * own, exchanged))
            before = exchanged
        return int(most)

    def _muon_batches(self) -> Iterator[tuple[int, float]]:
        """(bytes of this rank's updates, SQUARE or OBLONG) of each batch, in Muon's order."""
        oblong, square = self.width * self.shape.inner, self.width**2
        kinds = (
            (2 * self.depth, oblong, OBLONG),  # gate and up
            (4 * self.depth, square, SQUARE),  # query, key, value, projection
            (self.depth, oblong, OBLONG),  # down
        )
        for count, weights, factor in kinds:
            most = muon_share(UPDATE * weights, self.ranks, "cuda") * self.ranks
            for at in range(0, count, most):
                share = -(-min(most, count - at) // self.ranks)
                yield share * UPDATE * weights, factor

    @property
    def saved(self) -> int:
        """Bytes allocated and kept by checkpoints in the same memory: state gathered from other
        ranks, and a copy of everything."""
        if not self.copy:
            return 0
        if self.cuda:
            return self.saving
        return self.elsewhere + 4 * self.shape.weights + self.optimizer_state + self.average

    @property
    def elsewhere(self) -> int:
        """Bytes of Muon's state held by other ranks."""
        whole = 4 * self.depth * self.shape.block_weights if self.muon else 0
        return whole - whole // self.ranks

    @property
    def saving(self) -> int:
        """As StepNeeds.saving: tensors of the GPU are copied to pinned memory."""
        square, tall = pinned(4 * self.width**2), pinned(4 * self.width * self.shape.inner)
        blocks, table = self.depth * (4 * square + 3 * tall), pinned(4 * self.vocab * self.width)
        # weights and state; of Muon's only this rank's share, and the others' as it was received
        own = blocks + blocks // self.ranks if self.muon else 3 * blocks
        average = blocks + 2 * table if self.ema else 0
        return own + 6 * table + 2 * self.elsewhere + average

    @property
    def extra_time(self) -> float:
        """Recomputed multiplications as a share of all in a step (forward 1, backward 2)."""
        block, head = self.shape.block_weights + self.seq_len * self.width, self.vocab * self.width
        again = self.blocks * block + self.selective * ELEMENTWISE * self.width
        again += head if self.chunks > 1 else 0
        return again / (3 * (self.depth * block + head))


@dataclass(frozen=True)
class Estimate:
    """Bytes per rank at the peak of a step."""

    parameters: int
    # DDP's buckets, which are the gradients and persist between steps; with accumulation, also the
    # accumulated gradients, and with compression copies of them
    gradients: int
    optimizer: int
    weight_copies: int  # in bf16, with the head's gradient
    activations: int  # kept for the backward pass
    logits: int  # with their gradient, during the loss; 0 if the peak is in a block
    # further memory of one block in its backward pass; 0 if the peak is at the loss
    block: int
    context: int
    saved: int = 0  # for checkpoints, on rank 0, in the same memory
    updates: int = 0  # Muon's, in its step; 0 unless the peak is there
    average: int = 0  # of the weights

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
        if self.updates:
            peak = msg("tasks.gpt.memory.updates", updates=gib(self.updates))
        elif self.logits:
            peak = msg("tasks.gpt.memory.logits", logits=gib(self.logits))
        else:
            peak = msg("tasks.gpt.memory.block", block=gib(self.block))
        copies = (
            msg("tasks.gpt.memory.copies", weight_copies=gib(self.weight_copies))
            if self.weight_copies
            else ""
        )
        copies += msg("tasks.gpt.memory.average", average=gib(self.average)) if self.average else ""
        copies += msg("tasks.gpt.memory.saved", saved=gib(self.saved)) if self.saved else ""
        copies += msg("tasks.gpt.memory.context", context=gib(self.context)) if self.context else ""
        return msg(
            "tasks.gpt.memory.estimate",
            total=gib(self.total),
            parameters=gib(self.parameters),
            gradients=gib(self.gradients),
            optimizer=gib(self.optimizer),
            copies=copies,
            activations=gib(self.activations),
            peak=peak,
            needed=gib(self.needed),
        )


def estimate(load: StepWorkload) -> Estimate:
    """Bytes per rank with fp32 weights, as in training/trainer.

    The peak of a step is at the loss (everything kept, and the logits), in the backward pass of a
    block (no logits, but the gradients inside the block), or in Muon's step (nothing kept), the
    highest one of a small micro-batch. A block's backward pass is at its highest at the first or
    last block of a kind: it frees what the blocks kept, but may create gradients. A checkpointed
    block is recomputed before, so it may be fully in memory when no other block is.
    """
    use, gradients = memory_constants.of(load), 4 * load.shape.weights + load.second_gradients
    held = gradients if load.holds_gradients else 0
    peaks = [
        _at_loss(load, use, held),
        *_in_blocks(load, use, held),
        _Peak(gradients, updates=load.updates),
    ]
    return Estimate(
        parameters=4 * load.shape.weights,
        optimizer=load.optimizer_state - load.elsewhere,
        context=CONTEXT if load.cuda else 0,
        saved=load.saved,
        average=load.average,
        **asdict(max(peaks, key=lambda one: one.total)),
    )


@dataclass(frozen=True)
class _Peak:
    """Fields of an Estimate that differ between the moments of a step."""

    gradients: int
    weight_copies: int = 0
    activations: int = 0
    logits: int = 0
    block: int = 0
    updates: int = 0

    @property
    def total(self) -> int:
        return (
            self.gradients
            + self.weight_copies
            + self.activations
            + self.logits
            + self.block
            + self.updates
        )


def _at_loss(load: StepWorkload, use: Constants, held: int) -> _Peak:
    table = load.vocab * load.width
    logits = use.logits * load.vocab * load.tokens // load.chunks
    if load.chunks > 1:
        logits += PARTS * load.stream * load.width * load.tokens
    # Eager autocast keeps all weight copies until the end of the forward pass; in fp8 a product
    # has its own.
    copied = load.plain if load.compiled else load.depth
    copies = 2 * (copied * load.copied_weights + table) + use.head * table if load.bf16 else 0
    return _Peak(held, copies, _kept(load, use, load.depth), logits)


def _in_blocks(load: StepWorkload, use: Constants, held: int) -> Iterator[_Peak]:
    """Blocks checkpointed as a whole come first, then selective ones, then the others."""
    unit, before = load.width * load.tokens, 0
    for count, work in (
        (load.blocks, use.work_whole),
        (load.selective, use.work_selective),
        (load.plain, use.work),
    ):
        for number in {before + 1, before + count} if count else ():
            copied = max(number - load.blocks - load.selective, 1)
            created = (load.depth - number + 1) * load.shape.block_weights + load.vocab * load.width
            yield _Peak(
                held or 4 * created,
                2 * copied * load.copied_weights if load.bf16 else 0,
                _kept(load, use, number),
                block=int(work * unit),
            )
        before += count


def _kept(load: StepWorkload, use: Constants, number: int) -> int:
    """Bytes kept by the first `number` blocks, and by embedding and last norm."""
    whole = min(number, load.blocks)
    selective = min(number - whole, load.selective)
    plain = number - whole - selective
    of_blocks = plain * use.kept + selective * use.products + whole * load.stream + use.ends
    return load.tokens * round(load.width * of_blocks)

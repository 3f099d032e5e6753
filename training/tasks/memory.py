"""Memory that a training step needs on a rank, as used by the plan and its checks. No torch.

Each task estimates its own step: by formula (training.tasks.gpt.memory) or by fake tensors
(training.tasks.sample_memory).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from training.config.schema import Config
from training.core.units import GIB, unknown

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import StepRecord

CONTEXT = GIB // 2  # CUDA context on a GPU, including torch's kernels
PAIR = 2  # ranks that exchange gradients in bf16 with each other; more ranks add theirs
# Decisions of a plan that save memory.
SAVINGS: tuple[
    Literal["activation_checkpointing", "selective_checkpointing", "loss_chunks"], ...
] = ("activation_checkpointing", "selective_checkpointing", "loss_chunks")


class Estimate(Protocol):
    """Bytes per rank at the peak of a step."""

    @property
    def parameters(self) -> int: ...
    @property
    def optimizer(self) -> int: ...
    @property
    def average(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def needed(self) -> int: ...
    @property
    def tight(self) -> int: ...


class Unavailable(RuntimeError):
    """This torch lacks the private APIs that are needed; the message names them."""


@dataclass(frozen=True)
class Measured:
    """Bytes of an eager step without the CUDA context: by fake tensors, and by the formula for the
    same step."""

    fake: int
    formula: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.fake / self.formula


@dataclass(frozen=True)
class CompiledBlocks:
    """Equal parts of a model, several of which can be compiled as one graph."""

    count: int
    gradient_bytes: int  # of one, in fp32
    together: int  # number of them that suits one graph


class StepNeeds(ABC):
    """The planned step of one rank, for any task."""

    MODEL: ClassVar[frozenset[str]] = frozenset()  # fields of suggestions() that change the model

    @property
    @abstractmethod
    def estimate(self) -> Estimate: ...

    @property
    @abstractmethod
    def on_gpu(self) -> bool: ...

    @property
    @abstractmethod
    def source(self) -> str:
        """Source of the estimate, for `--check`."""

    @property
    @abstractmethod
    def gradient_bytes(self) -> int:
        """Bytes of gradients that a rank exchanges in a step, in fp32."""

    @property
    def update_bytes(self) -> int:
        """Bytes of updates that every rank receives after the optimizer's step, all ranks'."""
        return 0

    @property
    def compiled_blocks(self) -> CompiledBlocks | None:
        """None: the plan does not decide what is compiled as one graph."""
        return None

    @property
    def elsewhere(self) -> int:
        """Bytes of optimizer state held by other ranks."""
        return 0

    @property
    def saving(self) -> int:
        """Bytes of host memory on rank 0 of a GPU training that saves a checkpoint: the copy, and
        what it has gathered from other ranks."""
        return self.stored + self.elsewhere

    @property
    def stored(self) -> int:
        """Bytes of a checkpoint."""
        found = self.estimate
        return found.parameters + found.optimizer + found.average + self.elsewhere

    @abstractmethod
    def resized(self, sequences: int | None = None, ranks: int | None = None) -> StepNeeds:
        """The same step with another micro-batch, or on another number of ranks."""

    @abstractmethod
    def suggestions(self, config: Config, ranks: int, room: int) -> list[FieldValues]:
        """Configuration changes estimated to fit `room` bytes, the smallest change of each kind."""

    @abstractmethod
    def record(self) -> StepRecord:
        """Record for the plan; the task rebuilds the step from its "load"."""

    def flops(self, steps: int) -> float | None:
        """Floating-point operations of `steps` steps on all ranks; None: unknown."""
        return None

    def measure(self) -> Measured | None:
        """The estimate compared with fake tensors, using torch; None if fake tensors gave the
        estimate. Raises Unavailable."""
        return None


def may_compress(config: Config) -> bool:
    """Whether ranks may exchange their gradients in bf16: `auto` is decided after the memory."""
    return config.gradient_compression != "none"


def exchanged_copies(gradients: int, ranks: int) -> int:
    """Bytes of what training.trainer.compression keeps of so many bytes of fp32 gradients."""
    if ranks == 1:
        return 0
    return gradients if ranks == PAIR else gradients // 2


def pinned(size: int) -> int:
    """Bytes of pinned memory for a tensor: torch rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def with_margin(total: int) -> int:
    """Bytes that must be free for an estimate of `total`."""
    return int(total * 1.10) + GIB


def with_ample_margin(total: int) -> int:
    """Bytes below which an estimate of `total` is tight."""
    return int(total * 1.25) + GIB


def gib(amount: int | None) -> str:
    """Bytes in words, GiB, MiB or KiB."""
    if amount is None:
        return unknown()
    if 0 < amount < 1 << 20:
        return f"{amount / 1024:.0f} KiB"
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / (1 << 20):.0f} MiB"

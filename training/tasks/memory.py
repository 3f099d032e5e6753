"""What a training step needs of a rank's memory, as the plan and its checks see it. No torch here.

Each task knows its own step: by a formula (training.tasks.gpt.memory) or measured by fake tensors
(training.tasks.sample_memory).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from training.config.schema import Config

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import StepRecord

GIB = 1 << 30
CONTEXT = GIB // 2  # CUDA's own memory on a GPU, with the kernels of torch


class Estimate(Protocol):
    """Bytes per rank at the peak of a step."""

    @property
    def parameters(self) -> int: ...
    @property
    def optimizer(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def needed(self) -> int: ...
    @property
    def tight(self) -> int: ...


MEASURING = "measuring the memory of a step by fake tensors"  # for who waits


class Unavailable(RuntimeError):
    """This torch does not have the private parts that are needed; the text says which."""


@dataclass(frozen=True)
class Measured:
    """Bytes of an eager step without the GPU's context: by fake tensors, and by the formula for the
    same."""

    fake: int
    formula: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.fake / self.formula


class StepNeeds(ABC):
    """The planned step of one rank, of whatever task."""

    @property
    @abstractmethod
    def estimate(self) -> Estimate: ...

    @property
    @abstractmethod
    def source(self) -> str:
        """Where the estimate comes from, for `--check`."""

    @property
    def elsewhere(self) -> int:
        """Bytes of the optimizer's state that the other ranks hold."""
        return 0

    @abstractmethod
    def resized(self, sequences: int) -> StepNeeds:
        """The same step with another micro-batch."""

    @abstractmethod
    def suggestions(self, config: Config, ranks: int, room: int) -> list[FieldValues]:
        """Changes of the configuration that fit `room` bytes by the estimate, the nearest of each
        kind."""

    @abstractmethod
    def record(self) -> StepRecord:
        """For the plan; its task makes the same of what stands under "load"."""

    def flops(self, steps: int) -> float | None:
        """Arithmetic of so many steps of all ranks; None: not known."""
        return None

    def measure(self) -> Measured | None:
        """The estimate against fake tensors, with torch; None where it comes from them. Raises
        Unavailable."""
        return None


def with_margin(total: int) -> int:
    """What must be free for so many bytes: less does not fit."""
    return int(total * 1.10) + GIB


def with_ample_margin(total: int) -> int:
    """Less than this is tight."""
    return int(total * 1.25) + GIB


def gib(amount: int | None) -> str:
    """Bytes for people."""
    if amount is None:
        return "-"
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / (1 << 20):.0f} MiB"

"""Base class of datasets that return whole batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from training.data.permutation import Ints


class BatchDataset(ABC):
    """A sized dataset, read in the rank itself or in its data-loader workers."""

    # Whether it can be read in processes that are forked after the first access.
    fork_safe = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, indices: Ints | Sequence[int], epoch: int = 0) -> Any:
        """The samples at these indices as one batch of CPU tensors; `epoch` from 0."""

"""Base class of datasets that return whole batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from training.data.permutation import Ints


class BatchDataset(ABC):
    """A sized dataset, read in the rank itself or in its data-loader workers."""

    # Maximum number of workers that read it outside of the epochs; None: that of --num_workers.
    # Where it is 0 the rank reads, and later forks workers: no open file may have a position.
    most_readers: int | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, indices: Ints | Sequence[int], epoch: int = 0) -> Any:
        """The samples at these indices as one batch of CPU tensors; `epoch` from 0."""

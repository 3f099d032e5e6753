"""Task interface: a model, its data, a loss, metrics and a sample. The trainer uses nothing else.

The first part of the class is what a user's task defines (complete example: docs/tasks.md); the
second part, used by the trainer, is derived from it, and a task overrides it where it has something
better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from training.config.schema import Config
from training.core import heartbeat, json_text, units
from training.core.messages import msg
from training.data import device_copy
from training.data.batch_dataset import BatchDataset
from training.data.permutation import Ints, mix
from training.tasks import optim, returned

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord
    from training.tasks.evaluation import Part


class Task(ABC):
    """One per rank. `options`: the task's own options as attributes; `config`: the fields common to
    all tasks."""

    unit = "samples"  # unit of batch size and speed
    pieces = "samples"  # unit of dataset size
    random = True  # whether the model uses random numbers in training (dropout)
    # Samples per validation batch; None: the training micro-batch, in ./duet evaluate at most
    # trained.EVALUATED.
    eval_batch: int | None = None

    file_sha256 = ""  # of the user's file that defines the task

    def __init__(self, options: Any, config: Config, device: torch.device) -> None:
        self.options, self.config, self.device = options, config, device

    # Defined by a user's task.

    @abstractmethod
    def model(self) -> nn.Module:
        """The model with initial weights, on the CPU. torch, numpy and random start from the
        configured seed."""

    @abstractmethod
    def train_data(self) -> Dataset[Any]:
        """A map-style dataset: len() and [index]. If samples are random (crops, flips), it also has
        draw(index, random) with a numpy Generator that depends only on seed, epoch and index, not
        on workers or ranks."""

    def val_data(self) -> Dataset[Any] | None:
        """As train_data(), read in order and without draw(); None: no validation."""
        return None

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean over the batch, a scalar. Call `model` exactly once and do not use the module
        inside it: it is wrapped by DDP."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """One value per sample of a validation batch, (B,) each, by name, which determines whether
        higher values are better (docs/tasks.md)."""
        return {"loss": self.loss(model, batch).expand(self.count(batch))}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW with the options lr and weight_decay, if they exist."""
        rate, decay = getattr(self.options, "lr", 1e-3), getattr(self.options, "weight_decay", 0.01)
        return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)

    def rate(self, step: int, total: int) -> float:
        """The share of the optimizer's learning rates in step `step` (0-based): the configured
        warm-up, constant phase and decay."""
        return optim.multiplier(step, total, self.config)

    def sample(self, model: nn.Module, folder: Path) -> str | None:
        """A sample of the trained model, on rank 0 at the end: returns text for the summary, writes
        pictures (.png) for the report into `folder`."""
        return None

    def alive(self) -> None:
        """Heartbeat for code that takes minutes in __init__(), train_data(), val_data(), metrics()
        or sample(): call it regularly there, otherwise it is reported as a hang."""
        heartbeat.current.again()

    # Used by the trainer.

    def optimizers(self, model: nn.Module) -> optim.Optimizers:
        found = returned.optimizer(self.optimizer(model), type(self))
        return optim.Optimizers([found])

    def compile(self, model: nn.Module) -> None:
        """Compile the model in place, before DDP."""
        model.compile()

    def rows(self, part: str) -> BatchDataset | None:
        """Dataset of whole batches for 'train' or 'val'."""
        data = self.train_data() if part == "train" else self.val_data()
        if data is None and part == "val":
            return None
        checked = returned.data(data, type(self), part)
        return Samples(checked, self.config.seed, drawn=part == "train", task=type(self))

    def arrive(self, batch: Any) -> Any:
        """Move a batch from the loader to the device."""
        return moved(batch, self.device)

    def count(self, batch: Any) -> int:
        """Number of samples in a batch."""
        return _first(batch).shape[0]

    def share(self, count: int, rank: int, ranks: int) -> Sequence[int]:
        """The validation samples out of `count` that this rank measures."""
        return range(rank, count, ranks)

    def measured(self, count: int) -> dict[str, int]:
        """How much an evaluation measures of `count` validation samples: a resume compares scores
        only if it is the same."""
        return {"samples": len(self.share(count, 0, 1))}

    def measure(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Sums over a validation batch, one number each; the trainer adds those of all batches and
        ranks."""
        count = self.count(batch)
        found = returned.metrics(self.metrics(model, batch), type(self), count)
        return {name: values.double().sum() for name, values in found.items()} | {
            "": torch.tensor(float(count))
        }

    def check_names(self, found: Iterable[str], others: Iterable[str], where: str) -> None:
        """Raises TypeError if the sums of a batch have other names than those of `where`."""
        returned.same_names(found, others, type(self), where)

    def checked_model(self) -> nn.Module:
        """model(), if it is a module. Raises TypeError."""
        return returned.model(self.model(), type(self))

    def checked_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """loss(), if it is one number with a gradient. Raises TypeError."""
        return returned.loss(self.loss(model, batch), type(self), model)

    def checked_sample(self, model: nn.Module, folder: Path) -> str | None:
        """sample(), if it is a text or None. Raises TypeError."""
        return returned.sample(self.sample(model, folder), type(self))

    def part(self, model: nn.Module, index: int, batch: Any, pictured: bool) -> Part | None:
        """Name, and pictures if wanted, of the validation sample `index`, the only one in `batch`;
        None: it has none. For the page of ./duet evaluate."""
        return None

    def fill(self, rows: Any, size: int) -> Any | None:
        """Validation rows extended to `size` samples by ones that change no score, so that a
        compiled model is validated by its graph of training; None: the task has no such samples."""
        return None

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Convert the total sums to the recorded values, named val_NAME."""
        return {name: value / sums[""] for name, value in sums.items() if name}

    def shown_loss(self, loss: float) -> str:
        """The loss for a progress line, in the unit of `shown` if there is one."""
        return units.decimal(loss)

    def shown(self, scores: Mapping[str, float]) -> str:
        """The scores for a progress line."""
        return ", ".join(f"{name} {units.significant(value)}" for name, value in scores.items())

    def why_not(self, count: int) -> str:
        """Why `count` validation samples are too few, or ""."""
        return "" if count else msg("tasks.base.no_val_data")

    def facts(self) -> ManifestRecord:
        """Facts stored in a checkpoint beside the weights: "shape" of the model and "data"."""
        return {}

    def same_data(self, saved: ManifestRecord) -> bool:
        """Whether the checkpoint with these facts was trained on the current data."""
        saved_data = json_text.as_stored(saved["data"])
        return bool(saved_data == json_text.as_stored(self.facts().get("data", saved_data)))

    def describe(self, model: nn.Module) -> str:
        """The model in words, for the banner."""
        return msg(
            "tasks.base.parameters",
            millions=units.millions(sum(p.numel() for p in model.parameters())),
        )

    def flops(self, model: nn.Module) -> float | None:
        """Floating-point operations per unit, forward and backward, to compute MFU; None:
        unknown."""
        return None


class Samples(BatchDataset):
    """Wraps a map-style dataset of this task to return whole batches. `drawn`: for training."""

    def __init__(
        self, data: Dataset[Any], seed: int, *, drawn: bool, task: type[Task] = Task
    ) -> None:
        self.data, self.seed, self.drawn, self.task = data, seed, drawn, task
        self.most_readers = _most_readers(data)
        # The order of an epoch and the shares of the ranks depend on it: it must not change.
        self._count = len(data)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._count

    def rows(self, indices: Ints | Sequence[int], epoch: int = 0) -> Any:
        samples = [self._one(int(index), epoch) for index in indices]
        try:
            return default_collate(samples)
        except (TypeError, RuntimeError, KeyError) as error:
            returned.no_batch(self.task, self._part, indices, samples, error)

    @property
    def _part(self) -> str:
        return "train" if self.drawn else "val"

    def _one(self, index: int, epoch: int) -> Any:
        try:
            return self._read(index, epoch)
        except StopIteration as error:  # a loop over batches would take it for their end
            returned.no_sample(self.task, self._part, index, error)
        except Exception as error:
            returned.note_sample(self._part, index, error)
            raise

    def _read(self, index: int, epoch: int) -> Any:
        data: Any
        data, place = _innermost(self.data, index) if self.drawn else (None, index)
        if not hasattr(data, "draw"):
            return self.data[index]
        import numpy as np

        return data.draw(place, np.random.default_rng([mix(self.seed), epoch, index]))


def _innermost(data: Any, index: Any) -> tuple[Any, Any]:
    """The dataset that has draw(), and the index in it, behind torch's Subset (of random_split) and
    ConcatDataset. One with a [index] of its own does more than select: it needs its own draw()."""
    while not hasattr(data, "draw"):
        read = getattr(type(data), "__getitem__", None)
        if read is Subset.__getitem__:
            data, index = data.dataset, data.indices[index]
        elif read is ConcatDataset.__getitem__:
            part = bisect_right(data.cumulative_sizes, index)
            index -= data.cumulative_sizes[part - 1] if part else 0
            data = data.datasets[part]
        else:
            break
    return data, index


def _most_readers(data: Any) -> int | None:
    """`most_readers` of the dataset, or of those that torch's Subset and ConcatDataset read."""
    own: int | None = getattr(data, "most_readers", None)
    if own is not None:
        return own
    if isinstance(data, Subset):
        return _most_readers(data.dataset)
    parts = data.datasets if isinstance(data, ConcatDataset) else []
    limits = (_most_readers(part) for part in parts)
    return min((limit for limit in limits if limit is not None), default=None)


def moved(batch: Any, device: torch.device) -> Any:
    """Move every tensor to the device."""
    return mapped(batch, lambda tensor: device_copy.to_device(tensor, device))


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same lists and dictionaries with `change` applied to every tensor."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {name: mapped(value, change) for name, value in batch.items()}
        if not isinstance(batch, (dict, UserDict)):
            return changed
        try:
            same = copy(batch)  # a dictionary of another type may have attributes too
            for name, value in changed.items():
                same[name] = value
        except TypeError:  # or accept no changes
            return changed
        return same
    if isinstance(batch, (list, tuple)):
        found = [mapped(value, change) for value in batch]
        # a namedtuple takes separate arguments
        return type(batch)(*found) if hasattr(batch, "_fields") else type(batch)(found)
    return batch


def _first(batch: Any) -> torch.Tensor:
    """The first tensor of a batch."""
    if isinstance(batch, torch.Tensor):
        return batch
    for value in (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, (list, tuple))
        else ()
    ):
        found = _first(value)
        if found is not _NONE:
            return found
    return _NONE


_NONE = torch.empty(0)

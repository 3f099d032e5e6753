"""What a task is: a model, its data, a loss, metrics and a sample. The trainer knows nothing else
of what it trains.

The first part of the class is what a task of your own needs (docs/tasks.md has a complete one); the
second part is what the trainer asks for, made of the first: a task overrides it where it has
something better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from training.config.schema import Config
from training.core import heartbeat, units
from training.data.batch_dataset import BatchDataset
from training.data.permutation import Ints, mix
from training.tasks import optim

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord


class Task(ABC):
    """One on each rank. `options`: the task's own options as attributes; `config`: those of every
    training."""

    unit = "samples"  # what a batch and the speed count
    pieces = "samples"  # what a data set is made of
    random = True  # does the model draw at random while it trains (dropout)?
    eval_batch: int | None = None  # samples measured together; None: as many as a rank trains on

    def __init__(self, options: Any, config: Config, device: torch.device) -> None:
        self.options, self.config, self.device = options, config, device

    # What a task of your own has.

    @abstractmethod
    def model(self) -> nn.Module:
        """With its first weights, on the CPU; torch's seed is the configuration's."""

    @abstractmethod
    def train_data(self) -> Dataset[Any]:
        """A map-style dataset: len() and [index]. Where samples are drawn at random (crops, flips),
        it has draw(index, random) beside that, with a numpy Generator that is the same for the same
        seed, epoch and index, whatever the workers and ranks."""

    def val_data(self) -> Dataset[Any] | None:
        """As train_data(), looked at in its order and never drawn; None: no validation."""
        return None

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean over the batch, a scalar. `model`: call it, once, and nothing of the bare model:
        DDP is around it."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """A figure for each sample of a validation batch, (B,) each, by name: higher is better for
        psnr, ssim, acc and accuracy."""
        return {"loss": self.loss(model, batch).expand(self.count(batch))}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW with the options lr and weight_decay, if there are such."""
        rate, decay = getattr(self.options, "lr", 1e-3), getattr(self.options, "weight_decay", 0.01)
        return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)

    def rate(self, step: int, total: int) -> float:
        """The share of the optimizer's learning rates in step `step` (0-based): warm-up, constant,
        decay of the configuration."""
        return optim.multiplier(step, total, self.config)

    def sample(self, model: nn.Module, folder: Path) -> str | None:
        """What can be seen of the trained model, on rank 0 at the end: a text for the summary,
        pictures (.png) into `folder`, which the report shows."""
        return None

    def alive(self) -> None:
        """To be called now and then in a metrics() or sample() that takes minutes: otherwise it
        looks like a hang."""
        heartbeat.current.again()

    # What the trainer asks for.

    def optimizers(self, model: nn.Module) -> optim.Optimizers:
        return optim.Optimizers([self.optimizer(model)])

    def compile(self, model: nn.Module) -> None:
        """Before DDP, in place."""
        model.compile()

    def rows(self, part: str) -> BatchDataset | None:
        """Of 'train' or 'val': what gives whole batches."""
        data = self.train_data() if part == "train" else self.val_data()
        return None if data is None else Samples(data, self.config.seed, drawn=part == "train")

    def arrive(self, batch: Any) -> Any:
        """From the loader to the device."""
        return moved(batch, self.device)

    def count(self, batch: Any) -> int:
        """Samples of a batch."""
        return _first(batch).shape[0]

    def share(self, count: int, rank: int, ranks: int) -> range:
        """Which of so many validation samples this rank measures."""
        return range(rank, count, ranks)

    def measure(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Sums over a validation batch, one number each; those of all batches and ranks are
        added."""
        found = self.metrics(model, batch)
        return {name: values.double().sum() for name, values in found.items()} | {
            "": torch.tensor(float(self.count(batch)))
        }

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """From the sums of everything to what is recorded, as val_NAME."""
        return {name: value / sums[""] for name, value in sums.items() if name}

    def shown_loss(self, loss: float) -> str:
        """For a progress line, in the unit of `shown` where there is one."""
        return f"{loss:.4f}"

    def shown(self, scores: Mapping[str, float]) -> str:
        """Of the scores, for a progress line."""
        return ", ".join(f"{name} {value:.4g}" for name, value in scores.items())

    def why_not(self, count: int, ranks: int) -> str:
        """Why so many validation samples are not enough, for people; or nothing."""
        return "" if count else "no validation: its data is empty"

    def facts(self) -> ManifestRecord:
        """What a checkpoint says of the model ("shape") and its data ("data"), beside the
        weights."""
        return {}

    def same_data(self, saved: ManifestRecord) -> bool:
        """Was the checkpoint with these facts trained on the data that there is now?"""
        return bool(saved["data"] == self.facts().get("data", saved["data"]))

    def describe(self, model: nn.Module) -> str:
        """For the banner."""
        return f"{units.millions(sum(p.numel() for p in model.parameters()))} parameters"

    def flops(self, model: nn.Module) -> float | None:
        """Arithmetic of one unit, forward and backward, for the use of the GPU's peak (MFU); None:
        not known."""
        return None


class Samples(BatchDataset):
    """A map-style dataset as the trainer reads it: a whole batch for indices."""

    def __init__(self, data: Dataset[Any], seed: int, *, drawn: bool) -> None:
        self.data, self.seed, self.drawn = data, seed, drawn and hasattr(data, "draw")

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def rows(self, indices: Ints | Sequence[int], epoch: int = 0) -> Any:
        return default_collate([self._one(int(index), epoch) for index in indices])

    def _one(self, index: int, epoch: int) -> Any:
        if not self.drawn:
            return self.data[index]
        import numpy as np

        random = np.random.default_rng([mix(self.seed), epoch, index])
        return self.data.draw(index, random)  # type: ignore[attr-defined]


def moved(batch: Any, device: torch.device) -> Any:
    """Every tensor on the device; to a GPU from pinned memory, without waiting."""
    if device.type == "cuda":
        return mapped(batch, lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
    return mapped(batch, lambda tensor: tensor.to(device))


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same lists and dictionaries with every tensor changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: mapped(value, change) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        found = [mapped(value, change) for value in batch]
        # a namedtuple takes them one by one
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

"""Several ranks in this process that train with DDPInspector and share a store; everything else is
real."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
)

from training.inspector import DDPInspector, inspector, reporting
from training.inspector.shared_store import OwnStore, SharedStore

LOADERS = Callable[[int], Any]


class Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int = 320, own: int = 0) -> None:
        self.count, self.own = count, own

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(6, generator=torch.Generator().manual_seed(index + self.own))


class Few(Samples):
    """Values that repeat often, like labels or masks."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index % 2), *[0.0] * 5])


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, first: int, step: int) -> None:
        self.indices = range(first, 200, step)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(Samples().__getitem__, self.indices)


def sharded(data: Any, rank: int, batch: int = 4, **more: Any) -> Any:
    return DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, 2, rank, **more))


class Ranks:
    """Ranks that train in lockstep; `change(rank, step, model)` and `spoil(rank, step, batch)`
    inject errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self._patch = monkeypatch
        monkeypatch.setattr(
            reporting.FindingsOutput, "line", lambda _, text: self.lines.append(text)
        )
        self.inspectors: list[DDPInspector] = []

    def start(self, loaders: LOADERS, world: int = 2, **options: Any) -> list[torch.nn.Module]:
        store, numbers = OwnStore(), iter(range(world))
        self._patch.setattr(
            inspector, "open_board", lambda _: SharedStore(store, next(numbers), world)
        )
        torch.manual_seed(0)
        first = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 1))
        models: list[torch.nn.Module] = [copy.deepcopy(first) for _ in range(world)]
        self.loaders = [loaders(rank) for rank in range(world)]
        for model, loader in zip(models, self.loaders, strict=True):
            self.inspectors.append(DDPInspector(model, loader, every=4, wrapped=True, **options))
        return models

    def train(
        self,
        loaders: LOADERS,
        *,
        world: int = 2,
        epochs: int = 1,
        steps: int = 12,
        given: bool = True,
        change: Callable[[int, int, torch.nn.Module], None] = lambda rank, step, model: None,
        spoil: Callable[[int, int, torch.Tensor], torch.Tensor] = lambda rank, step, batch: batch,
        **options: Any,
    ) -> list[str]:
        """The warnings."""
        models = self.start(loaders, world, **options)
        step = 0
        for _ in range(epochs):
            for batches in zip(*self.loaders, strict=False):
                if step == steps:
                    break
                step += 1
                for rank, fetched in enumerate(batches):
                    batch = spoil(rank, step, fetched)
                    loss = models[rank](batch).square().mean()
                    change(rank, step, models[rank])
                    self.inspectors[rank].step(loss, batch if given else None)
        self.close()
        return [
            text.removeprefix("WARNING: ") for text in self.lines if text.startswith("WARNING: ")
        ]

    def close(self) -> None:
        for one in reversed(self.inspectors):
            one._close("its loop ended", 10.0)
        self.inspectors.clear()

    def logged(self, text: str) -> bool:
        return any(text in line for line in self.lines)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    made = Ranks(monkeypatch)
    yield made
    made.close()


GOOD: dict[str, LOADERS] = {
    "sampler": lambda rank: sharded(Samples(), rank),
    "shuffled": lambda rank: sharded(Samples(), rank, shuffle=True),
    "workers": lambda rank: DataLoader(
        Samples(), 4, sampler=DistributedSampler(Samples(), 2, rank), num_workers=1
    ),
    "padded": lambda rank: sharded(Samples(5), rank),  # three each: one twice
    "few": lambda rank: sharded(Few(), rank),
    "a part of the stream": lambda rank: DataLoader(Stream(rank, 2), 4),
    "a dataset of its own": lambda rank: DataLoader(Samples(own=1000 * rank), 4),
    "a subset of its own": lambda rank: DataLoader(
        Subset(Samples(), range(100 * rank, 100 * rank + 100)), 4, shuffle=True
    ),
    "batches": lambda rank: [
        torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + n))
        for n in range(10)
    ],
    "batch sampler": lambda rank: DataLoader(
        Samples(), batch_sampler=BatchSampler(range(160 * rank, 160 * rank + 160), 4, False)
    ),
    "with replacement": lambda rank: DataLoader(
        Samples(4000),
        4,
        sampler=RandomSampler(Samples(4000), True, generator=torch.Generator().manual_seed(rank)),
    ),
}


SAME: dict[str, tuple[LOADERS, str]] = {
    "no sampler": (lambda rank: DataLoader(Samples(), 4), "by content"),
    "same order": (
        lambda rank: DataLoader(Samples(), 4, sampler=DistributedSampler(Samples(), 2, 0)),
        "by content",
    ),
    "own orders": (
        lambda rank: DataLoader(
            Samples(),
            4,
            sampler=RandomSampler(Samples(), generator=torch.Generator().manual_seed(rank)),
        ),
        "each of them draws all 320 samples of the dataset: no DistributedSampler",
    ),
    "same stream": (
        lambda rank: DataLoader(Stream(0, 1), 4),
        "32 of their first 32 are the same, by content",
    ),
}

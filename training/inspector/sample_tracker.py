"""Samples of a rank: indices drawn by a sampler, and digests of the contents for any loader."""

from __future__ import annotations

import hashlib
import numbers
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from .messages import msg

if TYPE_CHECKING:
    from training.inspector.exchange import LoaderFacts

SHOWN = 8  # indices in a message
PROVEN_STEPS = 8  # of the first epoch, whose samples are compared between the ranks
ROW = 1024  # values of a sample in its digest
PROBES = 4  # elements at each end of a list in a fingerprint
DEPTH = 4
# Maximum number of samples of an epoch that is drawn twice: a few seconds and 100 MB.
REPLAYED = 1 << 22


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors whose values can be examined, in lists, dictionaries and objects with attributes,
    in their order."""
    return (tensor for tensor in _every(batch, DEPTH) if _plain(tensor))


def _every(batch: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth and isinstance(batch, Mapping):
        for value in batch.values():
            yield from _every(value, depth - 1)
    elif depth and isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        for value in batch:
            yield from _every(value, depth - 1)
    elif depth and hasattr(batch, "__dict__"):
        yield from _every(vars(batch), depth - 1)


def _plain(tensor: torch.Tensor) -> bool:
    """Not sparse, nested, without values (meta) or quantized: those lack the operations below."""
    return tensor.layout == torch.strided and not (
        tensor.is_nested or tensor.is_meta or tensor.is_quantized
    )


def size(batch: Any) -> int | None:
    """The number of samples; None: unknown."""
    # Fast path: called in every step.
    if isinstance(batch, torch.Tensor) and batch.dim():
        return batch.size(0)  # also of a nested tensor, which has no shape
    for tensor in _every(batch, DEPTH):
        if tensor.dim():
            return tensor.size(0)
    return (
        len(batch) if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)) else None
    )


def digests(batch: Any, count: int) -> list[str]:
    """A digest per sample, of the largest tensor with one row per sample. Samples with constant
    values (silence, padding) are omitted. Waits for the GPU."""
    rows = [t for t in tensors(batch) if t.dim() and len(t) == count and t.numel()]
    if not rows:
        return []
    table = max(rows, key=torch.Tensor.numel).detach()
    table = (torch.view_as_real(table.resolve_conj()) if table.is_complex() else table).reshape(
        count, -1
    )
    table = table[:, :: -(-table.shape[1] // ROW)].cpu()
    lowest, highest = table.float().amin(1), table.float().amax(1)
    words = table.contiguous().view(torch.uint8).reshape(count, -1).numpy()
    varied = (
        torch.logical_or(lowest != highest, lowest.isnan())
        if table.shape[1] > 1
        else torch.ones(count, dtype=torch.bool)
    )
    return [
        hashlib.blake2b(words[i].tobytes(), digest_size=8).hexdigest()
        for i in range(count)
        if varied[i]
    ]


def not_finite(batch: Any, loss: torch.Tensor | None, count: int) -> tuple[list[int], list[int]]:
    """(positions in the batch with non-finite input, positions with non-finite loss)."""
    bad = torch.zeros(count, dtype=torch.bool)
    for tensor in tensors(batch):
        if tensor.dim() and len(tensor) == count and tensor.is_floating_point():
            bad |= ~tensor.detach().isfinite().reshape(count, -1).all(1).cpu()
    own: list[int] = []
    if loss is not None and _plain(loss) and loss.dim() and len(loss) == count:
        own = (
            torch.nonzero(~loss.detach().isfinite().reshape(count, -1).all(1).cpu())
            .flatten()
            .tolist()
        )
    return torch.nonzero(bad).flatten().tolist(), own


class SamplerTrace:
    """Proxy of a loader's batch sampler that records the drawn indices.

    Used in this process only, never in workers of the loader. `first`: indices of the first batches
    of the first observed epoch. `epoch`: the one that has begun; `trained`: that of the last step.
    A batch that is only looked at, as on one rank, begins no further one. `ahead`: how many batches
    may be drawn before the one of the step.
    """

    def __init__(self, inner: Any, ahead: int) -> None:
        self._inner, self.ahead = inner, ahead
        self.epoch, self.trained, self.ended = 0, 0, False
        self._drawings = 0
        self.first: list[list[int]] = []
        self._queue: deque[tuple[int, int, list[int]]] = deque()
        self._trusted = True
        # of this drawing: a step has taken a batch; the batches before that had no step
        self._began = self._unused = False
        self._replay: Iterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        self._queue.clear()
        self._replay = None
        self.epoch, self.ended = self.trained + 1, False
        if self.epoch == 1:
            self.first = []
        self._drawings = mine = self._drawings + 1
        self._trusted |= self._unused
        self._began = self._unused = False
        skipped = _skipped(sys._getframe(1))
        try:
            for number, drawn in enumerate(self._inner):
                indices = _whole(drawn)
                if self.epoch == 1 and skipped <= number < skipped + PROVEN_STEPS:
                    self.first.append(indices)
                if self._trusted and number >= skipped:
                    self._queue.append((self.epoch, number + 1, indices))
                yield drawn
        except GeneratorExit:  # the loop has ended early, or the dataset is exhausted
            if self._drawings == mine:
                self._queue.clear()
            raise
        finally:
            self.ended |= self._drawings == mine

    def begun(self, epoch: int) -> None:
        """This epoch has already begun: reconstruct its draws if drawing again is deterministic and
        has no side effects."""
        self.epoch = self.trained = epoch
        if _repeats(getattr(self._inner, "sampler", None)):
            self._replay = (
                (epoch, number + 1, _whole(drawn)) for number, drawn in enumerate(self._inner)
            )
            self._queue.extend(
                taken for _, taken in zip(range(PROVEN_STEPS), self._replay, strict=False)
            )
            self.first = [indices for _, _, indices in self._queue]

    def took(self, count: int | None) -> tuple[int, int, list[int]] | None:
        """(epoch, batch, indices) of the current batch; None if unknown (a step of several
        batches)."""
        self.trained = self.epoch
        if self._replay is not None:
            self._queue.extend(taken for _, taken in zip(range(1), self._replay, strict=False))
        if not self._queue:
            return None
        taken = self._queue.popleft()
        many = len(self._queue) > max(self.ahead, PROVEN_STEPS)
        alike = count is None or not taken[2] or count == len(taken[2])
        self._unused |= many and alike and not self._began
        self._began = True
        self._trusted &= alike and not many
        if not self._trusted:  # steps of several batches: they would pile up
            self._queue.clear()
            return None
        return taken

    @property
    def exhausted(self) -> bool:
        """Whether the last batch of the epoch is done; False for steps of several batches."""
        return self.ended and self._trusted and not self._queue


def watch(loader: Any) -> SamplerTrace | None:
    """Insert a SamplerTrace into a torch DataLoader (or a wrapped one, as in Accelerate); None if
    that is impossible."""
    if type(loader).__name__ == "DataLoaderDispatcher":  # of accelerate: draws for all ranks
        return None
    own = getattr(loader, "base_dataloader", loader)
    sampler = getattr(own, "batch_sampler", None)
    if not isinstance(own, torch.utils.data.DataLoader) or sampler is None:
        return None
    # A StatefulDataLoader saves the state of its sampler and needs the original.
    if hasattr(own, "state_dict"):
        return None
    if isinstance(sampler, SamplerTrace):  # of another inspector
        return None
    drawn = SamplerTrace(sampler, 4 + own.num_workers * (own.prefetch_factor or 0))
    # DataLoader forbids setattr after its creation.
    object.__setattr__(own, "batch_sampler", drawn)
    return drawn


def unwatch(loader: Any, drawn: SamplerTrace) -> None:
    own = getattr(loader, "base_dataloader", loader)
    if own.batch_sampler is drawn:
        object.__setattr__(own, "batch_sampler", drawn._inner)


def describe(loader: Any, drawn: SamplerTrace | None) -> LoaderFacts:
    """Facts about the data of this rank before it trains."""
    own = getattr(loader, "base_dataloader", loader)
    dataset: Any = getattr(own, "dataset", None)
    sampler: Any = None if drawn is None else getattr(drawn, "sampler", None)
    batch_sampler = None if drawn is None else drawn._inner
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    plain = type(batch_sampler) is torch.utils.data.BatchSampler and (
        type(sampler) is torch.utils.data.SequentialSampler
        or (
            type(sampler) is torch.utils.data.RandomSampler
            and not sampler.replacement
            and sampler.num_samples == _length(dataset)
        )
    )
    name = (
        ""
        if loader is None
        else msg("inspector.data.iterable")
        if iterable
        else type(sampler or batch_sampler or own).__name__
    )
    return {
        "dataset": None if iterable else _length(dataset),
        "batches": _length(loader),
        "sampler": name,
        "whole_dataset": bool(plain and not iterable),
        "fingerprint": fingerprint(dataset) if dataset is not None else "",
    }


def _whole(drawn: Any) -> list[int]:
    """The indices of a batch; an IterableDataset has none."""
    return [
        int(i)
        for i in (drawn if isinstance(drawn, (list, tuple)) else [drawn])
        if isinstance(i, numbers.Integral)
    ]


def _skipped(caller: FrameType) -> int:
    """How many batches accelerate draws but does not train, in the epoch that a script resumes."""
    sampler = caller.f_locals.get("self")
    known = type(sampler).__name__ == "SkipBatchSampler"
    return int(getattr(sampler, "skip_batches", 0)) if known else 0


def _repeats(sampler: Any) -> bool:
    """Whether the sampler draws the same again without changing random state. Not known for
    subclasses."""
    known = type(sampler) in (
        torch.utils.data.SequentialSampler,
        torch.utils.data.DistributedSampler,
    )
    return known and len(sampler) <= REPLAYED


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def fingerprint(thing: Any) -> str:
    """Digest of the plain attributes of a dataset, equal for equal datasets; never calls the
    dataset."""
    return hashlib.blake2b(
        repr(_facts(thing, DEPTH)).encode("utf-8", "replace"), digest_size=8
    ).hexdigest()


def _facts(thing: Any, depth: int) -> Any:
    if thing is None or isinstance(thing, (bool, int, float, str, bytes)):
        return thing
    if isinstance(thing, torch.Tensor):
        return (
            [str(thing.dtype), *thing.shape, *thing.detach().flatten()[:PROBES].tolist()]
            if _plain(thing) and thing.numel()
            else [str(thing.dtype), str(thing.layout)]
        )
    if depth and isinstance(thing, range):
        return repr(thing)
    if depth and isinstance(thing, (list, tuple)):
        return [
            len(thing),
            *(_facts(value, depth - 1) for value in (*thing[:PROBES], *thing[-PROBES:])),
        ]
    if depth and isinstance(thing, dict):
        return {str(k): _facts(v, depth - 1) for k, v in list(thing.items())[:64]}
    own = getattr(thing, "__dict__", None)
    return [
        type(thing).__qualname__,
        _facts(own, depth - 1) if depth and isinstance(own, dict) else None,
    ]

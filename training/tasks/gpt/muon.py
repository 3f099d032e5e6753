"""Muon in batches, shared by the ranks: all matrices of one shape take one Newton-Schulz iteration.

Muon (Jordan 2024, kellerjordan.github.io/posts/muon) replaces the update of a matrix by the nearest
orthogonal matrix. Its arithmetic is up to a fifth of a small step, so each rank updates some
matrices of each shape and sends the updates to the others (ZeRO stage 1, arXiv:1910.02054); the
exchange of one batch overlaps with the arithmetic of the next. All ranks apply the same received
bits, so the weights stay identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.tasks.collectives import all_gather
from training.tasks.gpt.model_dims import MUON_BATCH, muon_share
from training.tasks.gpt.muon_update import (
    Numbers,
    apply_in_one_kernel,
    argument,
    compiled_update,
    nesterov,
)
from training.tasks.gpt.newton_schulz import TORCH, iterate, scaled
from training.tasks.optim import Group


@dataclass
class _Bucket:
    """Matrices of one shape that are updated together. This rank updates `own`, whose momentum is
    one tensor."""

    matrices: list[Tensor]
    weights: Tensor  # (matrices, rows, columns), of which the matrices are views
    own: slice
    share: int  # matrices per rank, the last rank may have fewer
    momentum: Tensor  # (own, rows, columns), fp32
    gathered: list[Tensor] | None = None  # momentum of each rank, on rank 0 after gather()

    def gradients(self) -> list[Tensor]:
        """Gradients of the matrices that this rank updates."""
        found = [matrix.grad for matrix in self.matrices[self.own] if matrix.grad is not None]
        assert len(found) == len(self.momentum), "every matrix has a gradient"
        return found

    @property
    def size(self) -> int:
        """Numbers that a rank sends."""
        return self.share * self.matrices[0].numel()

    @property
    def scale(self) -> float:
        """Factor of the learning rate: tall matrices take larger steps."""
        rows, columns = self.matrices[0].shape
        return math.sqrt(max(1.0, rows / columns))


class Muon(torch.optim.Optimizer):
    """The matrices of one shape become views of one tensor; their storage must not be replaced
    after that. `dtype`: of the iteration and of the exchanged updates. `found_inf` as an attribute
    during a step: 1.0 skips it, which may change the sign of a zero (training.tasks.optim). With a
    process group the constructor, step() and gather() are called by all ranks; its state dict is
    torch.optim.Muon's without the constants and does not depend on the number of ranks."""

    # torch's name for: reads found_inf and skips the step on the device
    _step_supports_amp_scaling = True
    momentum_follows_step = True  # training.tasks.optim

    def __init__(
        self,
        matrices: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(
            list(matrices), {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        )
        self.dtype = dtype
        self._numbers = Numbers(self.param_groups[0], None)  # of this step
        self._compiled_update: Callable[..., Tensor] | None = None
        self._compiled_apply: Callable[..., None] | None = None
        self._iterate: Callable[[Tensor], Tensor] = iterate
        shared = dist.is_available() and dist.is_initialized()
        self.ranks = dist.get_world_size() if shared else 1
        self.rank = dist.get_rank() if shared else 0
        shapes = dict.fromkeys(m.shape for m in matrices)
        # The largest first: more arithmetic remains to overlap with their exchange.
        by_size = sorted(shapes, key=lambda s: -s.numel() * sum(m.shape == s for m in matrices))
        self.buckets = [
            self._bucket(batch)
            for shape in by_size
            for batch in self._batches([m for m in matrices if m.shape == shape])
        ]
        self.exchanges = self._exchanges()

    def compile(self) -> None:
        """Let Triton compute the updates, but not on a CPU, which works on one matrix at a time."""
        first = self.param_groups[0]["params"][0]
        if not first.is_cuda:
            return
        self._compiled_update = torch.compile(compiled_update(self.dtype), dynamic=False)
        self._compiled_apply = torch.compile(apply_in_one_kernel, dynamic=False)
        if self.dtype == torch.float32:
            return
        from training.tasks.gpt import muon_kernels  # needs Triton

        products = muon_kernels.products(first.device)
        if products is not TORCH:

            def iterated(matrices: Tensor) -> Tensor:
                return iterate(matrices, products)

            # As one graph its launches take a third of the time of Triton's own. The update before
            # it is not part of the graph, which would compute and write it for each of its readers.
            self._iterate = torch.compile(iterated, dynamic=False)

    def _batches(self, alike: list[Tensor]) -> Iterator[list[Tensor]]:
        first = alike[0]
        each = first.numel() * self.dtype.itemsize
        count = self.ranks * muon_share(each, self.ranks, first.device.type)
        return (alike[at : at + count] for at in range(0, len(alike), count))

    def _exchanges(self) -> list[list[_Bucket]]:
        """Buckets that are sent together: on a GPU each alone, to overlap with the arithmetic of
        the next. On a CPU nothing overlaps, and fewer calls take less time."""
        found: list[list[_Bucket]] = []
        most, room = MUON_BATCH["cpu"], 0
        for bucket in self.buckets:
            size = self.ranks * bucket.size * self.dtype.itemsize
            if bucket.weights.is_cuda or size > room:
                found.append([])
                room = most
            found[-1].append(bucket)
            room -= size
        return found

    def _bucket(self, matrices: list[Tensor]) -> _Bucket:
        share = -(-len(matrices) // self.ranks)
        own = slice(self.rank * share, min((self.rank + 1) * share, len(matrices)))
        count, first = max(0, own.stop - own.start), matrices[0]
        weights = torch.stack([matrix.detach() for matrix in matrices])
        for matrix, view in zip(matrices, weights.unbind(), strict=True):
            matrix.data = view
        momentum = first.new_zeros((count, *first.shape))
        for matrix, buffer in zip(matrices[own], momentum.unbind(), strict=True):
            self.state[matrix]["momentum_buffer"] = buffer
        return _Bucket(matrices, weights, own, share, momentum)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._numbers = Numbers(self.param_groups[0], getattr(self, "found_inf", None))
        sent: tuple[list[_Bucket], Tensor, dist.Work | None] | None = None
        for together in self.exchanges:
            following = (together, *self._exchange(together))
            if sent:
                self._apply(*sent)
            sent = following
        if sent:
            self._apply(*sent)
        return loss

    def _apply(self, together: list[_Bucket], every: Tensor, work: dist.Work | None) -> None:
        """`every`: (ranks, numbers), the updates of `together`."""
        if work is not None:
            work.wait()
        parts = every.split([bucket.size for bucket in together], dim=1)
        for bucket, part in zip(together, parts, strict=True):
            shape = bucket.matrices[0].shape
            if part.is_contiguous():
                self._add(bucket, bucket.weights, part.view(-1, *shape))
                continue
            for weights, updates in zip(bucket.weights.split(bucket.share), part, strict=False):
                self._add(bucket, weights, updates.view(-1, *shape))

    def _add(self, bucket: _Bucket, weights: Tensor, updates: Tensor) -> None:
        updates = updates[: len(weights)]  # the last rank's part may be padded
        numbers, factor = self._numbers, self._numbers.factor(bucket.scale)
        if self._compiled_apply:
            self._compiled_apply(weights, updates, argument(numbers.keep), argument(factor))
            return
        if numbers.decay:
            weights.mul_(numbers.keep)
        if isinstance(factor, Tensor):
            weights.addcmul_(updates, factor)
        else:
            weights.add_(updates, alpha=factor)

    def _exchange(self, together: list[_Bucket]) -> tuple[Tensor, dist.Work | None]:
        """The updates of all matrices, (ranks, numbers); complete when the work is, if there is
        one."""
        if together[0].weights.is_cuda:
            mine = self._on_gpu(together[0]).flatten()
            if self.ranks == 1:
                return mine[None], None
            every = mine.new_empty((self.ranks, len(mine)))
        else:
            sizes = [bucket.size for bucket in together]
            every = torch.empty((self.ranks, sum(sizes)), dtype=self.dtype)
            mine = every[self.rank]
            for bucket, place in zip(together, mine.split(sizes), strict=True):
                self._on_cpu(bucket, place.view(-1, *bucket.matrices[0].shape))
        return every, all_gather(every, mine) if self.ranks > 1 else None

    def _on_gpu(self, bucket: _Bucket) -> Tensor:
        """Updates of this rank's matrices, (share, rows, columns), in one iteration."""
        if not len(bucket.momentum):  # this rank has none of this shape
            return bucket.weights.new_zeros(
                (bucket.share, *bucket.weights.shape[1:]), dtype=self.dtype
            )
        mine = self._iterate(self._updates(bucket))
        if len(mine) < bucket.share:
            pad = mine.new_zeros((bucket.share - len(mine), *mine.shape[1:]))
            mine = torch.cat([mine, pad])
        return mine

    def _updates(self, bucket: _Bucket) -> Tensor:
        """What is iterated. Only the returned tensor exists after it."""
        gradients, numbers = torch.stack(bucket.gradients()), self._numbers
        if numbers.skip is not None:
            gradients.masked_fill_(numbers.skip, 0)
        if self._compiled_update:
            return self._compiled_update(gradients, bucket.momentum, argument(numbers.weight))
        return self._scaled(nesterov(gradients, bucket.momentum, numbers, out=gradients))

    def _on_cpu(self, bucket: _Bucket, updates: Tensor) -> None:
        """Write the updates of this rank's matrices to (share, rows, columns): one at a time, which
        stays in the cache."""
        gradients, numbers = bucket.gradients(), self._numbers
        updates[len(gradients) :] = 0
        for one, gradient, buffer in zip(updates, gradients, bucket.momentum, strict=False):
            skip = numbers.skip
            finite = gradient if skip is None else gradient.masked_fill(skip, 0)
            one.copy_(self._iterate(self._scaled(nesterov(finite, buffer, numbers))))

    def _scaled(self, update: Tensor) -> Tensor:
        # In fp16 small ones would be zero before.
        rounded = update if self.dtype == torch.float16 else update.to(self.dtype)
        return scaled(rounded, self.dtype)

    def gather(self) -> None:
        """Collect the momentum of all ranks on rank 0 for state_dict()."""
        if self.ranks == 1:
            return
        for bucket in self.buckets:
            shape = bucket.matrices[0].shape
            mine = bucket.momentum
            if len(mine) < bucket.share:
                mine = torch.cat([mine, mine.new_zeros((bucket.share - len(mine), *shape))])
            parts = [torch.empty_like(mine) for _ in range(self.ranks)] if self.rank == 0 else None
            dist.gather(mine, parts, dst=0)
            if parts is not None:
                # On the CPU: a GPU has no room for the momentum of the others.
                bucket.gathered = [bucket.momentum, *(part.cpu() for part in parts[1:])]

    def state_dict(self) -> Group:
        """With several ranks on rank 0 only, after gather()."""
        state = super().state_dict()
        place = self._places()
        for bucket in self.buckets if self.ranks > 1 else ():
            assert bucket.gathered is not None, "gather() comes first"
            every = [buffer for part in bucket.gathered for buffer in part.unbind()]
            # The last rank's part is padded.
            for matrix, buffer in zip(bucket.matrices, every, strict=False):
                state["state"][place[id(matrix)]] = {"momentum_buffer": buffer}
            bucket.gathered = None
        state["state"] = dict(sorted(state["state"].items()))
        return state

    def load_state_dict(self, state_dict: Group) -> None:
        """Takes the momentum of this rank's matrices; accepts torch.optim.Muon's state."""
        place = self._places()
        for bucket in self.buckets:
            for matrix, buffer in zip(
                bucket.matrices[bucket.own], bucket.momentum.unbind(), strict=True
            ):
                saved = state_dict["state"].get(place[id(matrix)])
                if saved is None:  # of a run that has not made a step
                    buffer.zero_()
                else:
                    buffer.copy_(saved["momentum_buffer"])

    def _places(self) -> dict[int, int]:
        return {id(m): i for i, m in enumerate(self.param_groups[0]["params"])}

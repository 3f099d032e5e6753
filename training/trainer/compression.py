"""Gradients in bf16 on the wire: half of the bytes that DDP exchanges otherwise. bf16 has the range
of fp32, so that a NaN, an infinity or a scaled gradient arrives as such.

The error of the mean is measured in docs/performance.md.
"""

# Without `from __future__ import annotations`: torch compares the annotations of a hook, which must
# not be strings.
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from training.tasks.collectives import all_gather

PAIR = 2


def register(model: DistributedDataParallel) -> None:
    """Before the first forward pass, on every rank."""
    model.register_comm_hook(None, mean_in_bf16)


def mean_in_bf16(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Communication hook of DDP: the mean of one bucket over the ranks, equal on all of them."""
    gradients = bucket.buffer()
    ranks = dist.get_world_size(group)
    # The model is in half precision, or float64 was chosen for its accuracy, so it is not rounded.
    if gradients.dtype != torch.float32:
        return _sum(group, gradients, ranks, gradients.dtype)
    if ranks == PAIR:
        return _pair(group, gradients)
    return _sum(group, gradients, ranks, torch.bfloat16)


def _pair(
    group: dist.ProcessGroup | None, gradients: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Two ranks send each other their gradients, as many bytes as in a reduction, and each takes
    the mean in fp32: only the gradients are rounded, not the mean."""
    every = torch.empty(PAIR, len(gradients), dtype=torch.bfloat16, device=gradients.device)
    mine = every[dist.get_rank(group)].copy_(gradients)
    work = all_gather(every, mine, group)

    def mean(exchanged: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        exchanged.value()  # raises the error of a failed exchange
        return torch.mean(every, 0, dtype=torch.float32, out=gradients)

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(mean)
    return future


def _sum(
    group: dist.ProcessGroup | None, gradients: torch.Tensor, ranks: int, dtype: torch.dtype
) -> torch.futures.Future[torch.Tensor]:
    """A reduction in `dtype`. Divided before it is rounded: torch's bf16_compress_hook rounds twice
    unless the number of ranks is a power of two."""
    sent = gradients.div_(ranks).to(dtype)
    work = dist.all_reduce(sent, group=group, async_op=True)

    def wide(exchanged: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        exchanged.value()
        return gradients if sent is gradients else gradients.copy_(sent)

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(wide)
    return future

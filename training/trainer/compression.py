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
from training.tasks.memory import PAIR


class Buffers(dict[int, torch.Tensor]):
    """A copy of each bucket in bf16. It serves every step: NCCL keeps what it has sent until the
    host has seen the end, and new copies would pile up while the host queues steps ahead. The next
    step is queued behind the exchanges of this one, for which DDP lets it wait."""

    def of(self, bucket: dist.GradBucket, rows: int) -> torch.Tensor:
        """As many rows as asked for, each as long as the bucket."""
        gradients, index = bucket.buffer(), bucket.index()
        size = rows * gradients.numel()
        if index not in self or self[index].numel() != size:  # DDP has changed its buckets
            self.pop(index, None)
            self[index] = torch.empty(size, dtype=torch.bfloat16, device=gradients.device)
        return self[index].view(rows, -1)


def register(model: DistributedDataParallel) -> None:
    """Before the first forward pass, on every rank."""
    model.register_comm_hook(Buffers(), mean_in_bf16)


def mean_in_bf16(buffers: Buffers, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook of DDP: the mean of one bucket over the ranks, equal on all of them."""
    gradients, ranks = bucket.buffer(), dist.get_world_size()
    # The model is in half precision, or float64 was chosen for its accuracy, so it is not rounded.
    if gradients.dtype != torch.float32:
        return _sum(gradients.div_(ranks), gradients)
    if ranks == PAIR:
        return _pair(buffers.of(bucket, PAIR), gradients)
    # Divided before it is rounded: torch's bf16_compress_hook rounds twice unless the number of
    # ranks is a power of two.
    return _sum(buffers.of(bucket, 1)[0].copy_(gradients.div_(ranks)), gradients)


def _pair(every: torch.Tensor, gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Two ranks send each other their gradients, as many bytes as in a reduction, and each takes
    the mean in fp32: only the gradients are rounded, not the mean."""
    work = all_gather(every, every[dist.get_rank()].copy_(gradients))

    def mean(exchanged: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        exchanged.value()  # raises the error of a failed exchange
        return torch.mean(every, 0, dtype=torch.float32, out=gradients)

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(mean)
    return future


def _sum(sent: torch.Tensor, gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A reduction of `sent`, the gradients themselves or their copy."""
    work = dist.all_reduce(sent, async_op=True)

    def wide(exchanged: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        exchanged.value()
        return gradients if sent is gradients else gradients.copy_(sent)

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(wide)
    return future

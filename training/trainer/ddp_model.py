"""The model as the loop calls it: compiled, and wrapped by DDP if there are several ranks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from training.config.batch import Batch
from training.core import heartbeat, log
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.data import loader
from training.data.batch_dataset import BatchDataset
from training.inspector.checksum import excluded
from training.inspector.distributed import World
from training.plan.exchange import BUCKET_MIB
from training.plan.tuning import BF16
from training.tasks import optim
from training.tasks.base import Task
from training.trainer import compression

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

NEVER = 2**31 - 1  # the largest int in C++


def wrap(raw: torch.nn.Module, task: Task, plan: Plan, world: World) -> torch.nn.Module:
    """`raw` itself on one rank. With several ranks a collective: all get rank 0's weights."""
    if plan["compile"]["value"]:
        task.compile(raw)
        if world.rank == 0:
            log.info(msg("trainer.state.compiles"))
    if world.world_size == 1:
        return raw
    _refuse_sparse(raw, world)
    model = DistributedDataParallel(
        raw,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        **_buffers(raw),
        find_unused_parameters=plan["config"]["find_unused_parameters"],
        static_graph=plan["static_graph"]["value"],
        **_bucket_size(plan),
        gradient_as_bucket_view=True,
    )
    _no_statistics(model)
    if compresses(plan):
        compression.register(model)
    return model


def _refuse_sparse(raw: torch.nn.Module, world: World) -> None:
    """NCCL raises in the first backward pass, without the name of the module."""
    names = [
        name or type(module).__name__
        for name, module in raw.named_modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        and module.sparse
        and module.weight.requires_grad
    ]
    if names and world.backend == "nccl":
        what = msg("trainer.state.sparse", names=", ".join(names))
        problem = Problem("task.sparse", what, msg("trainer.state.dense"))
        raise UserError(problem, said_by_another=world.rank != 0)


def compresses(plan: Plan) -> bool:
    """Whether gradients are in bf16 between the ranks."""
    return "gradient_compression" in plan and plan["gradient_compression"]["value"] == BF16


def gradient_bytes(raw: torch.nn.Module, plan: Plan) -> int:
    """That a rank exchanges in a step."""
    if plan["ranks"] == 1:
        return 0
    compressed = {torch.float32: torch.bfloat16.itemsize} if compresses(plan) else {}
    return sum(
        weight.numel() * compressed.get(weight.dtype, weight.dtype.itemsize)
        for weight in raw.parameters()
        if weight.requires_grad
    )


def _no_statistics(model: DistributedDataParallel) -> None:
    """DDP's logger times the first ten steps and every 100th: at the start of the next step the
    host waits until the GPU has ended that one. Nothing reads the times. torch calls the interface
    a prototype, so a later version may not have it. The first ten have no setting."""
    set_rate = getattr(model, "_set_ddp_runtime_logging_sample_rate", None)
    if set_rate is not None:
        set_rate(NEVER)


def _bucket_size(plan: Plan) -> dict[str, int]:
    """Torch's default is not passed: only then is its first bucket smaller."""
    size = plan["bucket_mib"]["value"] if "bucket_mib" in plan else BUCKET_MIB
    return {} if size == BUCKET_MIB else {"bucket_cap_mb": size}


def _buffers(raw: torch.nn.Module) -> dict[str, bool]:
    """Broadcast rank 0's buffers if they are state changed by a step (batch norm), not constants.
    torch 2.13 renamed the argument and warns about the old name."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {
        "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": bool(
            saved_buffers(raw)
        )
    }


def saved_buffers(raw: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those in a checkpoint, which has rank 0's, by name."""
    saved = raw.state_dict().keys()
    return {name: buffer for name, buffer in raw.named_buffers() if name in saved}


def share_buffers(raw: torch.nn.Module, world: World) -> None:
    """All ranks get the buffers that a checkpoint would have. DDP does the same before the next
    step, so training is not affected. A collective."""
    if world.world_size == 1:
        return
    own = excluded(raw)
    for name, buffer in saved_buffers(raw).items():
        if name not in own:
            sent = buffer.contiguous()
            dist.broadcast(sent, 0)
            if sent is not buffer:
                buffer.copy_(sent)


def settle_buckets(
    model: torch.nn.Module,
    task: Task,
    autocast: torch.autocast,
    optimizer: optim.Optimizers,
    train: BatchDataset,
    batch: Batch,
    workers: int,
) -> None:
    """Run a first pass whose gradients are discarded. After the first backward pass DDP changes its
    bucket layout, and with it the order of sums over more than two ranks: this way all steps have
    the final layout, and a resumed run sums in the same order as an uninterrupted one."""
    heartbeat.current.beat("first pass")
    keys = [(0, [index % len(train) for index in range(batch.device_sequences)])]
    with loader.reading(train, keys, workers=workers) as read:
        some = task.arrive(next(read))
    with _unchanged(model, optimizer):
        with autocast:
            loss = task.checked_loss(model, some)
        loss.backward()
        optimizer.zero_grad()


@contextmanager
def _unchanged(model: torch.nn.Module, optimizer: optim.Optimizers) -> Iterator[None]:
    """Restore what a pass may change besides gradients: buffers (batch norm), also replaced ones,
    weights outside of the optimizer (a teacher), and extra states."""
    own = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    # Kept on the CPU, where the whole model was built: a GPU may have no room for a second one.
    frozen = [
        (w, w.data, w.detach().to("cpu", copy=True)) for w in model.parameters() if id(w) not in own
    ]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    extra = [
        (one, copy.deepcopy(one.get_extra_state()))
        for one in model.modules()
        if _has_extra_state(one)
    ]
    yield
    with torch.no_grad():
        for weight, data, before in frozen:
            weight.data = data.copy_(before)
        for module, name, buffer, was in buffers:
            module._buffers[name] = buffer if buffer is None or was is None else buffer.copy_(was)
    for module, state in extra:
        module.set_extra_state(state)


def _has_extra_state(module: torch.nn.Module) -> bool:
    kind, plain = type(module), torch.nn.Module
    return (
        kind.get_extra_state is not plain.get_extra_state
        and kind.set_extra_state is not plain.set_extra_state
    )

"""Validation: every rank measures its share of the validation data; the scores come from the sums
over all ranks."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from training.core import heartbeat
from training.core.errors import Exit
from training.data import loader
from training.trainer import ddp_model

if TYPE_CHECKING:
    from training.inspector.distributed import World
    from training.tasks.base import Task
    from training.trainer.step_stats import StopRequest
    from training.trainer.train_state import TrainState

Scores = dict[str, float]  # over all ranks, by name
STOP_CHECKS_S = 2.0  # apart: in each the ranks wait for the slowest one


class Stopped(Exception):
    """An evaluation has ended early, on all ranks."""

    def __init__(self, code: Exit) -> None:
        self.code = code


class StopChecks:
    """Stop requests to any rank during an evaluation: all ranks end it before the same batch.
    `batches`: as many as every rank has."""

    def __init__(self, request: StopRequest, world: World, batches: int) -> None:
        self._request, self._world, self._batches = request, world, batches
        self._next = self._gap = 0  # batches
        self._since = time.monotonic()

    def before(self, batch: int) -> None:
        """Raises Stopped. If a check is due, a collective: the ranks agree on when the next one
        is."""
        if batch != self._next or batch >= self._batches:
            return
        if self._world.device.type == "cuda":  # the host has only queued the batches
            torch.cuda.synchronize(self._world.device)
        code, took_s = int(self._request.code), time.monotonic() - self._since
        if self._world.world_size > 1:
            facts = torch.tensor([code, took_s], dtype=torch.float64, device=self._world.device)
            dist.all_reduce(facts, op=dist.ReduceOp.MAX)
            code, took_s = int(facts[0]), float(facts[1])
        if code:
            raise Stopped(Exit(code))
        fitting = int(self._gap * STOP_CHECKS_S / max(took_s, 1e-6))
        self._gap = max(1, min(2 * self._gap, fitting))
        self._next, self._since = batch + self._gap, time.monotonic()


def why_not(session: TrainState) -> str:
    """Why a run with validation enabled has none, or ""."""
    if not session.config.eval_every or session.validation is None:
        return ""
    return session.task.why_not(len(session.validation))


@torch.no_grad()
def evaluate(session: TrainState, stop: StopRequest | None = None) -> Scores | None:
    """Scores; None without validation data. `stop`: ends it. Raises Stopped on all ranks. A
    collective."""
    data, world, task = session.validation, session.world, session.task
    if data is None or not task.share(len(data), 0, world.world_size):
        return None
    mine = task.share(len(data), world.rank, world.world_size)
    size = task.eval_batch or session.batch.device_sequences
    # The score is that of the checkpoint; running statistics of batch norm differ between ranks.
    ddp_model.share_buffers(session.raw, world)
    sums: dict[str, torch.Tensor] = {}
    modes = [(module, module.training) for module in session.raw.modules()]
    session.raw.eval()
    # A rank without samples measures the first one with weight zero, so that all ranks sum the same
    # figures.
    keys = [(0, mine[start : start + size]) for start in range(0, len(mine), size)]
    keys = keys or [(0, range(1))]
    checks = StopChecks(stop, world, _fewest(session, len(data), size)) if stop else None
    try:
        with loader.reading(data, keys, workers=session.config.num_workers) as read:
            for number, rows in enumerate(read):
                heartbeat.current.again()  # the phase begins in loop.validate()
                if checks:
                    checks.before(number)
                found = _measured(session, rows, size)
                task.check_names(found, sums or found, "the batches before")
                for name, value in found.items():
                    sums[name] = sums.get(
                        name, torch.zeros((), dtype=torch.float64, device=world.device)
                    ) + (value if mine else torch.zeros_like(value))  # 0 × ∞ is NaN
    finally:
        for module, trains in modes:  # a task may have frozen some
            module.training = trains
    names = sorted(sums)  # ranks may have them in another order
    total = torch.stack([sums[name] for name in names])
    if world.world_size > 1:
        _agree(names, world, task)
        dist.all_reduce(total)
    totals = dict(zip(names, total.tolist(), strict=True))
    return task.scores({name: totals[name] for name in sums})


def _fewest(session: TrainState, count: int, size: int) -> int:
    """Batches of the rank with the fewest."""
    ranks = session.world.world_size
    samples = min(len(session.task.share(count, rank, ranks)) for rank in range(ranks))
    return max(1, -(-samples // size))


def _measured(session: TrainState, rows: Any, size: int) -> dict[str, torch.Tensor]:
    """The sums over a batch, without the graph: it holds all activations, and none may live on
    beside those of the next batch."""
    task = session.task
    # Another shape, or no gradients, is another graph to compile: minutes on a GPU.
    full = task.fill(rows, size) if session.compiled else None
    batch = task.arrive(rows if full is None else full)
    with session.autocast, torch.set_grad_enabled(full is not None):
        measured = task.measure(session.raw, batch)
    return {name: value.detach() for name, value in measured.items()}


def _agree(names: list[str], world: World, task: Task) -> None:
    """Raises TypeError if a rank has other names: their sums would be added to different ones, or
    the ranks would wait for each other forever. A collective."""
    digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).digest()
    number = int.from_bytes(digest[:7], "big")
    limits = torch.tensor([number, -number], device=world.device)
    dist.all_reduce(limits, op=dist.ReduceOp.MAX)
    largest, negated_smallest = limits.tolist()
    if largest == -negated_smallest:
        return
    every: list[list[str]] = [[] for _ in range(world.world_size)]
    dist.all_gather_object(every, names)
    for rank, others in enumerate(every):
        task.check_names(names, others, f"rank {rank}")

"""Training of a model that is not Duet's, for benchmarks: the same batches in the same order and
the same validation as in Duet's training. Writes records with the keys of metrics.jsonl. The same
command continues an interrupted training, step for step, if its records and its state are there."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn

from training.data.permutation import EpochPermutation
from training.data.token_dataset import TokenDataset

IGNORED = -1  # a target that is not counted


@dataclass(frozen=True)
class Run:
    depth: int
    seq_len: int
    batch: int  # sequences
    steps: int
    rate: float  # of the contender: peak, or a factor of its own rates
    seed: int
    bf16: bool
    device: str  # on a GPU the model is compiled, as Duet's
    vocab: int
    bos: int  # a separator is not a byte and not validated
    train: str
    val: str
    eval_every: int
    eval_tokens: int
    save_every: int
    out: str  # records; the state is beside them

    @property
    def state(self) -> Path:
        return Path(f"{self.out}.pt")


@dataclass(frozen=True)
class Contender:
    """`model` is on the run's device; `loss(inputs, targets, reduction)`: reduction is mean or sum;
    `update(step)`: one optimizer step with the learning rate of this step (0-based), after which
    the gradients are gone."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor, str], Tensor]
    update: Callable[[int], None]
    optimizers: Sequence[torch.optim.Optimizer]


def train(run: Run, make: Callable[[Run], Contender]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    train_data, val_data = (
        TokenDataset([Path(shard)], run.seq_len) for shard in (run.train, run.val)
    )
    per_epoch = len(train_data) // run.batch  # as Duet: an epoch ends with the last full batch
    contender = make(run)
    if run.device != "cpu":
        contender.model.compile(dynamic=False)
    first = _load(run, contender)
    with open(run.out, "a", encoding="utf-8", buffering=1) as records:
        queued: Tensor | None = None  # the loss of the step before
        for step in range(first, run.steps):
            epoch, at = divmod(step, per_epoch)
            order = EpochPermutation(len(train_data), run.seed, epoch)
            inputs, targets = train_data.batch(order.indices(at * run.batch, (at + 1) * run.batch))
            loss = contender.loss(_moved(inputs, run), _moved(targets, run), "mean")
            loss.backward()
            contender.update(step)
            # As in Duet: the host reads a step while the GPU computes the next one.
            if queued is not None:
                _record(records, step, queued)
            queued = loss.detach()
            validated = (step + 1) % run.eval_every == 0 or step + 1 == run.steps
            saved = (step + 1) % run.save_every == 0
            if validated or saved:
                _record(records, step + 1, queued)
                queued = None
            if validated:
                found = {"step": step + 1, "val_bpb": bits_per_byte(contender, val_data, run)}
                records.write(json.dumps(found) + "\n")
            if saved:
                _save(run, contender, step + 1)


def _moved(tokens: Tensor, run: Run) -> Tensor:
    """On the run's device; the host does not wait for the copy."""
    if run.device == "cpu":
        return tokens
    return tokens.pin_memory().to(run.device, non_blocking=True)


def _record(records: TextIO, steps: int, loss: Tensor) -> None:
    """Waits for the loss of step number `steps` (1-based)."""
    found = {"step": steps, "loss": loss.item(), "time": time.time()}
    records.write(json.dumps(found) + "\n")


def _save(run: Run, contender: Contender, steps: int) -> None:
    state = {
        "steps": steps,
        "records": Path(run.out).stat().st_size,
        "model": contender.model.state_dict(),
        "optimizers": [one.state_dict() for one in contender.optimizers],
    }
    temporary = run.state.with_suffix(".new")
    torch.save(state, temporary)
    temporary.replace(run.state)


def _load(run: Run, contender: Contender) -> int:
    """Continue with the saved state. Returns the number of steps made; removes the records after
    them."""
    if not run.state.exists():
        Path(run.out).unlink(missing_ok=True)
        return 0
    state = torch.load(run.state, weights_only=True)
    contender.model.load_state_dict(state["model"])
    for optimizer, own in zip(contender.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(own)
    os.truncate(run.out, state["records"])
    return int(state["steps"])


@torch.no_grad()
def bits_per_byte(contender: Contender, data: TokenDataset, run: Run) -> float:
    nats, count = 0.0, 0
    contender.model.eval()
    sequences = range(min(len(data), run.eval_tokens // run.seq_len))
    for start in range(0, len(sequences), run.batch):
        inputs, targets = data.batch(sequences[start : start + run.batch])
        targets = targets.masked_fill(targets == run.bos, IGNORED)
        nats += contender.loss(inputs.to(run.device), targets.to(run.device), "sum").item()
        count += int((targets != IGNORED).sum())
    contender.model.train()
    return nats / math.log(2) / count

"""Everything a training loop needs, put together: model, optimizer, data, position to start from."""

from __future__ import annotations

import inspect
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from training import console, heartbeat, rundir
from training.config.batch import Batch
from training.config.schema import Config
from training.data.length import Length, plan_length
from training.data.loader import Batches, TokenDataset, dataset
from training.data.prepare import Prepared, content
from training.data.tokenizer import Tokenizer, identity
from training.data.tokenizer import of as tokenizer_of
from training.distributed import World
from training.engine import checkpoint, optim
from training.engine.model import GPT, Frugal
from training.engine.saver import PHASE, Saver
from training.engine.shape import Shape
from training.watch import budget


@dataclass
class Session:
    """One rank's training: `raw` is the bare model, `model` what the loop calls (DDP around it when there are several ranks)."""

    config: Config
    run: rundir.RunDir
    world: World
    batch: Batch
    length: Length
    raw: GPT
    weights: list[torch.nn.Parameter]  # of raw: walking through its modules at each step would cost as much as a small kernel
    model: torch.nn.Module
    optimizer: optim.Optimizers
    batches: Batches
    validation: TokenDataset
    tokenizer: Tokenizer
    autocast: torch.autocast
    position: checkpoint.Position
    saver: Saver
    facts: dict[str, Any]  # of every checkpoint: what a resume compares

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.weights)

    @property
    def barrier_s(self) -> float:
        """The time limit of a barrier of the training."""
        return budget.backstop_s(self.config.hang_timeout, supervised="DUET_SUPERVISED" in os.environ)

    def steps_left(self, position: checkpoint.Position) -> int:
        """Whole steps until the end of this epoch."""
        return max(0, len(self.batches.dataset) - position.used) // self.batches.step_sequences

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged in the last micro-batch of a step only."""
        return nullcontext() if last or not isinstance(self.model, DistributedDataParallel) else self.model.no_sync()

    def save(self, position: checkpoint.Position, *, required: bool) -> None:
        """Rank 0 copies the state and lets it be written; with `required` it is on the disk afterwards (OSError). A collective."""
        self.optimizer.gather()
        heartbeat.current.beat(PHASE)
        if self.world.rank != 0:
            return
        state = {"model": self.raw.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.saver.save(position, state, self.facts, required=required)


def begin(plan: dict[str, Any], run: rundir.RunDir, world: World, data: Prepared) -> Session:
    """Build everything on this rank. The same seed on every rank; DDP copies rank 0's weights anyway."""
    config, batch = Config(**plan["config"]), Batch(**plan["batch"])
    torch.manual_seed(config.seed)
    shape = Shape(config.depth, data.vocab, config.max_seq_len)
    frugal = Frugal(plan["activation_checkpointing"]["value"], plan["loss_chunks"]["value"])
    raw = GPT(shape, frugal, config.dropout).to(world.device)
    optimizer = optim.build(raw, config)
    facts: dict[str, Any] = {
        "shape": asdict(shape),
        "optimizer": config.optimizer,
        "world_size": world.world_size,
        "data": {"folder": Path(data.folder).name, "tokens_sha256": content(data)},
        "tokenizer": identity(data),
        "run": run.name,
    }
    position = checkpoint.Position()
    loaded = checkpoint.latest(run.checkpoints)
    if loaded:
        position = loaded.position
        if not position.tokens:  # saved before that was counted
            position = replace(position, tokens=position.step * batch.total_tokens)
        if loaded.manifest["data"]["tokens_sha256"] != facts["data"]["tokens_sha256"]:  # said when the data was prepared
            position = replace(position, used=0)
        raw.load_state_dict(loaded.state["model"])
        optimizer.load_state_dict(loaded.state["optimizer"])
        _tell_resume(loaded, run, world)
    batches = Batches(
        dataset(data, "train", config.max_seq_len),
        batch,
        rank=world.rank,
        seed=config.seed,
        workers=config.num_workers,
        persistent=config.persistent_workers,
        device=world.device,
    )
    model = _wrap(raw, plan, world)
    autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=plan["precision"]["value"] == "bf16")
    if world.world_size > 2:
        _settle_buckets(model, autocast, optimizer, shape, batch)
    return Session(
        config=config,
        run=run,
        world=world,
        batch=batch,
        length=plan_length(config, batch, data, step=position.step, epoch=position.epoch, used=position.used),
        raw=raw,
        weights=list(raw.parameters()),
        model=model,
        optimizer=optimizer,
        batches=batches,
        validation=dataset(data, "val", config.max_seq_len),
        tokenizer=tokenizer_of(data),
        autocast=autocast,
        position=position,
        saver=_saver(run, config),
        facts=facts,
    )


def _saver(run: rundir.RunDir, config: Config) -> Saver:
    def saved(step: int, path: Path) -> None:
        run.event("checkpoint", step=step, path=str(path))

    def warned(text: str) -> None:
        console.warning(text)
        run.event("warning", text=text)

    return Saver(run.checkpoints, config.keep_checkpoints, saved, warned)


def _wrap(raw: GPT, plan: dict[str, Any], world: World) -> torch.nn.Module:
    if plan["compile"]["value"]:
        raw.compile_parts()
        if world.rank == 0:
            console.info("the first step compiles the model: some ten seconds, less when torch has it in its cache")
    if world.world_size == 1:
        return raw
    return DistributedDataParallel(
        raw,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        **_no_buffer_broadcast(),
        find_unused_parameters=plan["config"]["find_unused_parameters"],
        static_graph=plan["static_graph"]["value"],
        gradient_as_bucket_view=True,
    )


def _settle_buckets(model: torch.nn.Module, autocast: torch.autocast, optimizer: optim.Optimizers, shape: Shape, batch: Batch) -> None:
    """DDP lays out its buckets anew after the first backward pass, which changes the order of sums over more than two ranks. A
    pass that counts for nothing brings the layout of all later steps at once: a resumed run sums as one that never stopped."""
    heartbeat.current.beat("first pass")
    tokens = torch.zeros(batch.device_sequences, shape.max_seq_len, dtype=torch.int64, device=next(model.parameters()).device)
    with autocast:
        loss = model(tokens, tokens)
    loss.backward()
    optimizer.zero_grad()


def _no_buffer_broadcast() -> dict[str, Any]:
    """Buffers are constants here; torch 2.13 renamed the argument and warns about the old name."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def _tell_resume(loaded: checkpoint.Loaded, run: rundir.RunDir, world: World) -> None:
    if world.rank != 0:
        return
    saved_ranks = loaded.manifest["world_size"]
    for text in loaded.skipped:
        console.warning(f"damaged checkpoint skipped: {text}")
        run.event("warning", text=f"damaged checkpoint skipped: {text}")
    console.info(f"resumed from {loaded.path.name} (epoch {loaded.position.epoch + 1})")
    if saved_ranks != world.world_size:
        console.warning(
            f"saved by {saved_ranks} ranks, continued by {world.world_size}: the same samples in the same order, but not bit-exact "
            "(sums are made in another order)"
        )
    run.event("resume", step=loaded.position.step, path=str(loaded.path))

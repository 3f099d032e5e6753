"""Everything a training loop needs, put together: model, optimizer, data, position to start from."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from training import console, rundir
from training.config.batch import Batch
from training.config.schema import Config
from training.data.length import Length, plan_length
from training.data.loader import EpochSampler, Pair, TokenDataset, train_loader
from training.data.prepare import Prepared
from training.data.tokenizer import PADDED_VOCAB
from training.distributed import World
from training.engine import checkpoint, optim
from training.engine.model import GPT, Shape


@dataclass
class Session:
    """One rank's training: `raw` is the bare model, `model` what the loop calls (DDP, compiled)."""

    config: Config
    run: rundir.RunDir
    world: World
    batch: Batch
    length: Length
    raw: GPT
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Pair]
    sampler: EpochSampler
    validation: TokenDataset
    autocast: torch.autocast
    position: checkpoint.Position
    parameters: int

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged in the last micro-batch of a step only."""
        ddp = getattr(self.model, "_orig_mod", self.model)
        return nullcontext() if last or not isinstance(ddp, DistributedDataParallel) else ddp.no_sync()

    def save(self, position: checkpoint.Position) -> None:
        facts = {"shape": asdict(self.raw.shape), "world_size": self.world.world_size, "run": self.run.name}
        path = checkpoint.save(self.run.checkpoints, position, self.raw, self.optimizer, facts, self.config.keep_checkpoints)
        self.run.event("checkpoint", step=position.step, path=str(path))


def begin(plan: dict[str, Any], run: rundir.RunDir, world: World, data: Prepared) -> Session:
    """Build everything on this rank. The same seed on every rank; DDP copies rank 0's weights anyway."""
    config = Config(**plan["config"])
    batch = Batch(**plan["batch"])
    torch.manual_seed(config.seed)
    shape = Shape(config.depth, PADDED_VOCAB, config.max_seq_len)
    raw = GPT(shape).to(world.device)
    optimizer = optim.build(raw, config)
    position = checkpoint.Position()
    loaded = checkpoint.latest(run.checkpoints)
    if loaded:
        checkpoint.check_shape(loaded, shape)
        raw.load_state_dict(loaded.state["model"])
        optimizer.load_state_dict(loaded.state["optimizer"])
        position = loaded.position
        _tell_resume(loaded, run, world)
    dataset = TokenDataset(data.train, config.max_seq_len)
    loader, sampler = train_loader(
        dataset,
        rank=world.rank,
        world_size=world.world_size,
        batch=batch.device_sequences,
        seed=config.seed,
        workers=config.num_workers,
        persistent=config.persistent_workers,
        pin=world.device.type == "cuda",
    )
    bf16 = plan["precision"]["value"] == "bf16"
    return Session(
        config=config,
        run=run,
        world=world,
        batch=batch,
        length=plan_length(config, batch, data),
        raw=raw,
        model=_wrap(raw, plan, world),
        optimizer=optimizer,
        loader=loader,
        sampler=sampler,
        validation=TokenDataset(data.val, config.max_seq_len),
        autocast=torch.autocast(world.device.type, torch.bfloat16, enabled=bf16),
        position=position,
        parameters=sum(p.numel() for p in raw.parameters()),
    )


def _wrap(raw: GPT, plan: dict[str, Any], world: World) -> torch.nn.Module:
    model: torch.nn.Module = raw
    if world.world_size > 1:
        model = DistributedDataParallel(
            raw,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            **_no_buffer_broadcast(),
            find_unused_parameters=plan["config"]["find_unused_parameters"],
            static_graph=plan["static_graph"]["value"],
            gradient_as_bucket_view=True,
        )
    return torch.compile(model) if plan["compile"]["value"] else model


def _no_buffer_broadcast() -> dict[str, Any]:
    """Buffers are constants here; torch 2.13 renamed the argument and warns about the old name."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def _tell_resume(loaded: checkpoint.Loaded, run: rundir.RunDir, world: World) -> None:
    if world.rank != 0:
        return
    saved_ranks = loaded.state["manifest"]["world_size"]
    for text in loaded.skipped:
        console.warning(f"damaged checkpoint skipped: {text}")
        run.event("warning", text=f"damaged checkpoint skipped: {text}")
    console.info(f"resumed from {loaded.path.name} (epoch {loaded.position.epoch + 1})")
    if saved_ranks != world.world_size:
        console.warning(f"saved by {saved_ranks} ranks, continued by {world.world_size}: the order of the data changes, not bit-exact")
    run.event("resume", step=loaded.position.step, path=str(loaded.path))

"""Lightning: a LightningModule in its Trainer, with logger, progress bar, summary and checkpoints
off."""

from __future__ import annotations

import logging
import time
from typing import Any

import lightning
import torch

from benchmarks.contenders import parts


class Module(lightning.LightningModule):
    def __init__(self, job: parts.Job) -> None:
        super().__init__()
        self.model = parts.model(job)
        self.last = torch.zeros(())

    def training_step(self, batch: parts.Pair, number: int) -> torch.Tensor:
        loss = self.model(*batch)
        self.last = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return parts.optimizer(self.model)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clips by hand: with autocast, Lightning's own clipping rejects fused optimizers."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), parts.CLIP)


class Clock(lightning.Callback):
    def __init__(self, trace: parts.Trace) -> None:
        self.trace = trace

    def on_train_batch_end(self, *_: Any) -> None:
        self.trace.stamps.append(time.perf_counter())


def run(job: parts.Job) -> parts.Trace:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module, trace = Module(job), parts.Trace()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if job.bf16 else "32-true",
        max_steps=job.steps,
        callbacks=[Clock(trace)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, parts.loader(job))
    trace.loss = float(module.last)
    return trace

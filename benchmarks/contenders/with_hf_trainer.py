"""Hugging Face's Trainer, with reports, logging, progress bar and checkpoints off."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.contenders import parts


class Wrapped(torch.nn.Module):
    """Model with named inputs that returns a dictionary with the loss, as Trainer requires."""

    def __init__(self, job: parts.Job) -> None:
        super().__init__()
        self.model = parts.model(job)
        self.last = torch.zeros(())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.model(input_ids, labels)
        self.last = loss.detach()
        return {"loss": loss}


class Named(parts.Steps):
    def __getitem__(self, step: int) -> Any:
        inputs, targets = super().__getitem__(step)
        return {"input_ids": inputs, "labels": targets}


class Clock(TrainerCallback):
    def __init__(self, trace: parts.Trace) -> None:
        self.trace = trace

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trace.stamps.append(time.perf_counter())


class Ours(Trainer):
    """Complete batches, as for the other contenders."""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_size=None, shuffle=False)
        )


def run(job: parts.Job) -> parts.Trace:
    model, trace = Wrapped(job), parts.Trace()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=job.steps,
            per_device_train_batch_size=job.batch,
            bf16=job.bf16,
            use_cpu=True,
            max_grad_norm=parts.CLIP,
            lr_scheduler_type="constant",
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        optimizers = (parts.optimizer(model), None)
        Ours(
            model,
            arguments,
            train_dataset=Named(job),
            callbacks=[Clock(trace)],
            optimizers=optimizers,
        ).train()
    trace.loss = float(model.last)
    return trace

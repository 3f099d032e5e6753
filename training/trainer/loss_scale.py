"""Dynamic loss scale of fp16 training, as torch.amp.GradScaler, but without reading anything on the
host.

Small gradients would be zero in fp16, so the loss is multiplied by a scale and the gradients are
divided by it. A scale that is too large makes a gradient infinite: then no rank changes weights or
optimizer state in this step, and the scale is halved; after INTERVAL such steps without one it is
doubled. GradScaler decides with `.item()`, which waits for the GPU; here the decision is a number
on the device (training.tasks.optim), and all ranks have the same (StepAllReduce.overflow).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from training.trainer import gradients

if TYPE_CHECKING:
    from training.core.contracts.run_files import LossScaleRecord
    from training.trainer.step_stats import StepReport

# those of GradScaler
INITIAL, INTERVAL, GROWTH, BACKOFF = 65536.0, 2000, 2.0, 0.5
MINIMUM = 1.0  # below, gradients would be made smaller than they are
# skipped steps in a row at the minimum that end a run: a rare sample may overflow by itself
PATIENCE = 10


class LossScale:
    """`skipped`: steps of the run that changed nothing, `stuck`: those in a row at the minimum, as
    far as their figures were read."""

    def __init__(self, device: torch.device) -> None:
        # Filled on the host: no kernel launch.
        self.scale = torch.tensor(INITIAL).to(device)
        self._good_steps = torch.tensor(0, dtype=torch.int32).to(device)
        self.skipped = self.stuck = 0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.scale

    @torch.no_grad()
    def unscale(self, weights: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        """Divide the gradients by the scale, in place. Returns 1.0 if any is not finite, else
        0.0."""
        found = torch.zeros_like(self.scale)
        # as GradScaler: the reciprocal in float64, then rounded once
        inverse = self.scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients.values(weights), found, inverse)
        return found

    @torch.no_grad()
    def update(self, overflow: torch.Tensor) -> None:
        """After a step. `overflow`: 1.0 if a rank's gradients were not finite, on all ranks the
        same."""
        torch._amp_update_scale_(self.scale, self._good_steps, overflow, GROWTH, BACKOFF, INTERVAL)
        self.scale.clamp_(min=MINIMUM)

    def count(self, report: StepReport) -> None:
        """Count a step whose figures have been read."""
        self.skipped += report.skipped
        at_minimum = report.scale is not None and report.scale <= MINIMUM
        self.stuck = self.stuck + 1 if report.skipped and at_minimum else 0

    def state_dict(self) -> LossScaleRecord:
        """Waits for the GPU. `skipped` is that of all steps once their figures have been read."""
        return {
            "scale": float(self.scale),
            "good_steps": int(self._good_steps),
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: LossScaleRecord) -> None:
        self.scale.copy_(torch.tensor(state["scale"]))
        self._good_steps.copy_(torch.tensor(state["good_steps"], dtype=torch.int32))
        self.skipped = state["skipped"]

"""DDPInspector as a callback of the Hugging Face Trainer:

from training.inspector.transformers import InspectorCallback

trainer = Trainer(callbacks=[InspectorCallback()], …)
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback  # type: ignore[import-not-found,import-untyped]

from .inspector import DDPInspector
from .step_timer import Hook

__all__ = ["InspectorCallback"]


class InspectorCallback(TrainerCallback):  # type: ignore[misc]
    """Accepts the options of DDPInspector except model and loader. A step is one forward pass, also
    with gradient_accumulation_steps.

    Loss and batch are taken from the model's forward pass, since callbacks do not receive them. A
    loss that the Trainer computes elsewhere (label_smoothing_factor, compute_loss_func) is not
    inspected.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._loss: Any = None
        self._batch: Any = None
        self._hook: Any = None
        self.inspector: DDPInspector | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        model = facts["model"]
        # This is the inner model; the Trainer wraps it.
        self.inspector = DDPInspector(
            model, facts.get("train_dataloader"), **{"wrapped": True, **self._options}
        )
        self.inspector.fetches(args.gradient_accumulation_steps)
        self._hook = model.register_forward_hook(Hook(self._forward), with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self._step()

    def on_substep_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self._step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if self.inspector:
            self.inspector.epoch_end()

    def on_train_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if self._hook:
            self._hook.remove()
        if self.inspector:
            self.inspector.close()

    def _forward(self, model: Any, args: Any, inputs: dict[str, Any], outputs: Any) -> None:
        if model.training:
            self._batch = inputs or args
            self._loss = (
                outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
            )
            self._loss = None if self._loss is None else self._loss.detach()

    def _step(self) -> None:
        if self.inspector:
            self.inspector.step(self._loss, self._batch)
        self._loss = self._batch = None

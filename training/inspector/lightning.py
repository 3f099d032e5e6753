"""DDPInspector as a Lightning callback:

from training.inspector.lightning import InspectorCallback

trainer = Trainer(callbacks=[InspectorCallback()], …)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from .inspector import DDPInspector

# From the package that the training uses: each has its own class Callback.
if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback  # type: ignore[import-not-found,import-untyped]
else:
    try:
        from lightning.pytorch import Callback  # type: ignore[import-not-found,import-untyped]
    except ImportError:
        from pytorch_lightning import Callback

__all__ = ["InspectorCallback"]


class InspectorCallback(Callback):
    """Accepts the options of DDPInspector except model and loader. A step is one batch, also with
    accumulate_grad_batches."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self.inspector: DDPInspector | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loader = next(_loaders(trainer.train_dataloader), None)
        self.inspector = DDPInspector(trainer.strategy.model or pl_module, loader, **self._options)
        # Lightning has already begun the first epoch, unobserved; the next one drawn is the second.
        self.inspector.begun(trainer.current_epoch + 1)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.inspector:
            self.inspector.step(
                outputs.get("loss") if isinstance(outputs, dict) else outputs, batch
            )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.inspector:
            self.inspector.epoch_end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.inspector:
            self.inspector.close()


def _loaders(loaders: Any) -> Iterator[Any]:
    """The individual loaders of a combined loader."""
    if hasattr(loaders, "dataset"):
        yield loaders
    elif isinstance(loaders, dict):
        for loader in loaders.values():
            yield from _loaders(loader)
    elif isinstance(loaders, (list, tuple)):
        for loader in loaders:
            yield from _loaders(loader)
    elif loaders is not None:
        yield loaders

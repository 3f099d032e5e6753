"""Imported by each interpreter of Duet's training in this benchmark: a pause for each sequence, in
place of the work of a GPU, so that few cores are enough for many ranks."""

from __future__ import annotations

import importlib.abc
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

MODEL = "training.tasks.gpt.model"
SECONDS, TOKENS = float(os.environ["PACE_S"]), int(os.environ["PACE_TOKENS"])  # of one sequence


class AtImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name == MODEL:
            sys.meta_path.remove(self)
            slow()


def slow() -> None:
    from torch.nn import functional

    original = functional.cross_entropy

    def paced(logits: Any, targets: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(SECONDS * targets.numel() / TOKENS)
        return original(logits, targets, *args, **kwargs)

    functional.cross_entropy = paced  # type: ignore[assignment]


sys.meta_path.insert(0, AtImport())

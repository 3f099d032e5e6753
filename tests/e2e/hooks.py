"""Faults that a test plants into the ranks: Python source for sitecustomize, imported by every interpreter of a run."""

from __future__ import annotations


def in_forward(rank: int, call: int, statement: str) -> str:
    """`statement` runs in this rank instead of its `call`-th loss."""
    return f"""
import os
if os.environ.get("RANK", "0") == "{rank}" and "DUET_RUN_DIR" in os.environ:
    def plant():
        import torch.nn.functional as F
        original, calls = F.cross_entropy, [0]
        def planted(*args, **kwargs):
            calls[0] += 1
            if calls[0] == {call}:
                {statement}
            return original(*args, **kwargs)
        F.cross_entropy = planted
    import sys, importlib.abc
    class AtModel(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == "training.engine.model":
                sys.meta_path.remove(self)
                plant()
            return None
    sys.meta_path.insert(0, AtModel())
"""


def slow_progress_bar(seconds: float) -> str:
    """The bar of rank 0 takes its time to appear."""
    return f"""
import time
import tqdm.std
original = tqdm.std.tqdm.__init__
def slow(self, *args, **kwargs):
    time.sleep({seconds})
    original(self, *args, **kwargs)
tqdm.std.tqdm.__init__ = slow
"""

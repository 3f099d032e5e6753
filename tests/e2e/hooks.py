"""Faults that a test injects into the ranks: Python source for sitecustomize, imported by every
interpreter of a run."""

from __future__ import annotations

from textwrap import dedent, indent


def at_import(module: str, patch: str, processes: str = "True") -> str:
    """`patch` (statements, not indented) runs just before `module` is imported, in the processes
    for which this expression of os is true."""
    return f"""
import os, sys
if {processes}:
    import importlib.abc
    class AtImport(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == "{module}":
                sys.meta_path.remove(self)
                plant()
            return None
    sys.meta_path.insert(0, AtImport())
    def plant():
{indent(dedent(patch), "        ")}
"""


def at_rank(rank: int, patch: str, module: str = "training.trainer.finish") -> str:
    """As at_import, in this rank. The default `module` is imported after the parts of the loop."""
    own = f"""os.environ.get("RANK", "0") == "{rank}" and "DUET_RUN_DIR" in os.environ"""
    return at_import(module, patch, own)


def in_forward(rank: int, call: int, statement: str) -> str:
    """`statement` runs in this rank at its `call`-th loss."""
    patch = f"""
import torch.nn.functional as F
original, calls = F.cross_entropy, [0]
def planted(*args, **kwargs):
    calls[0] += 1
    if calls[0] == {call}:
        {statement}
    return original(*args, **kwargs)
F.cross_entropy = planted
"""
    return at_rank(rank, patch, "training.tasks.gpt.model")


def slow_progress_bar(seconds: float) -> str:
    """The progress bar of rank 0 appears after a delay."""
    return f"""
import time
import tqdm.std
original = tqdm.std.tqdm.__init__
def slow(self, *args, **kwargs):
    time.sleep({seconds})
    original(self, *args, **kwargs)
tqdm.std.tqdm.__init__ = slow
"""

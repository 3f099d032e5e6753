"""Freed memory is kept by the process, measured by page faults of a second allocation."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.conftest import ROOT, clean_environment

# Blocks below 32 MiB, all freed at once like the activations of a step.
CODE = """
import resource, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from training.host import allocator
print(allocator.keep_freed_memory() if sys.argv[2] == "keep" else "")
def step():
    blocks = [np.ones(2 << 20) for _ in range(8)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **more: str) -> tuple[str, int]:
    command = [sys.executable, "-c", CODE, str(ROOT), how]
    done = subprocess.run(
        command, env=clean_environment(**more), capture_output=True, text=True, check=True
    )
    said, count = done.stdout.splitlines()
    return said, int(count)


def test_freed_memory_is_reused() -> None:
    said, kept = faults("keep")
    if said != "True":
        pytest.skip("not the C library of GNU")
    _, given_back = faults("no")
    assert kept < given_back / 10


def test_settings_of_the_user_are_kept() -> None:
    assert faults("keep", MALLOC_ARENA_MAX="2")[0] == "False"

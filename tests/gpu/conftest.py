"""Tests on the GPUs of this machine, also as stages of `make gpu`. They need torch and pytest only,
since a lent machine may have no more; skipped where there are too few GPUs."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import Launched, Launcher
from tests.faults.conftest import inject  # noqa: F401 – the fixture
from training.host import toolchain

if TYPE_CHECKING:
    from training.host.gpus import Gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def need_gpus(count: int) -> None:
    """Skip the test if this machine has fewer GPUs."""
    import torch

    have = torch.cuda.device_count()
    if have < count:
        pytest.skip(f"needs {count} GPUs, torch has {have}")


def need_compiler() -> None:
    """Skip the test if torch.compile lacks something on this machine."""
    import torch

    seen = SimpleNamespace(
        name=torch.cuda.get_device_name(), capability=torch.cuda.get_device_capability()
    )
    if lacks := toolchain.missing("cuda", os.environ, [cast("Gpu", seen)]):
        pytest.skip(f"torch.compile lacks {', '.join(lacks)}")


@pytest.fixture
def launch(tmp_path: Path, token: str) -> Callable[..., Launched]:
    """Scripts of this checkout with this Python: nothing is installed."""
    start = Launcher(ROOT, tmp_path, token)
    return functools.partial(start, env={"DUET_PYTHON": sys.executable})

"""Runs of the communication test in this process, with faults injected into its ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from tests.conftest import TOKEN, processes
from tests.e2e.conftest import HOOK
from training.host import p2p_cache
from training.launcher.communication import runner
from training.launcher.communication.result import CommunicationResult
from training.launcher.communication.run import run

GPUS = [{"uuid": f"GPU-{n}", "index": i, "use_percent": 0} for i, n in enumerate("ab")]
FIGURES = (
    r"all_reduce of 8 MiB over (\d) ranks: [\d.]+ GB/s(?: \(on the bus [\d.]+\))?, 1 KiB in "
    r"[\d.]+ ms; data correct"
)
FOREVER = "__import__('time').sleep(600)"


def before(module: str, statements: str, ranks: str = "01") -> str:
    """`statements` run in these ranks just before `module` is imported."""
    return f"""
import os, sys
if os.environ.get("RANK", "none") in {ranks!r}:
    import importlib.abc
    class AtImport(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == {module!r}:
                sys.meta_path.remove(self)
                plant()
            return None
    sys.meta_path.insert(0, AtImport())
    def plant():
{indent(dedent(statements), "        ")}
"""


def around_all_reduce(statements: str, condition: str, ranks: str = "01") -> str:
    """In these ranks, `statements` replace an all_reduce whose `data` meets `condition`; `real()`
    calls the real one."""
    patch = f"""
import os, signal, torch.distributed as dist
original = dist.all_reduce
def planted(data):
    if not ({condition}):
        return original(data)
    def real():
        return original(data)
{indent(dedent(statements), "    ")}
dist.all_reduce = planted
"""
    return before("training.launcher.communication.collectives", patch, ranks)


def key() -> p2p_cache.Key:
    return p2p_cache.key(["GPU-a - - - -", "GPU-b - - - -"], "580.65.06", "2.13.0")


SMALL, LARGE = "data.numel() == 256", "data.numel() > 256"


def plan(ranks: int = 2, **variables: str) -> Any:
    chosen = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    return {
        "local_ranks": ranks,
        "device": {"value": "cpu", "reason": "as asked"},
        "variables": [
            {"name": n, "value": v, "why": "", "origin": "kept" if n in os.environ else "set here"}
            for n, v in chosen.items()
        ],
        "gpus": GPUS,
        "driver": "580.65.06",
        "torch": "2.13.0",
    }


@pytest.fixture
def place(tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parent of the launcher's temporary folder; must be empty at the end."""
    folder = tmp_path / "temporary files"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # otherwise it is cached
    monkeypatch.setenv(TOKEN, token)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("NCCL_P2P_DISABLE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def left(place: Path) -> list[Path]:
    return list(place.glob(f"{runner.PREFIX}*"))


Attempt = Callable[..., CommunicationResult]


@pytest.fixture
def attempt(place: Path, tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Runs the communication test in this process, with a hook in the ranks; it must leave nothing
    when it returns."""

    def go(
        hook: str = "", ranks: int = 2, limit_s: float = 60.0, **options: Any
    ) -> CommunicationResult:
        if hook:
            (tmp_path / HOOK).write_text(hook)
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        result = run(plan(ranks), limit_s, **options)
        ours = {os.getpid()}
        assert not set(processes(token)) - ours and not left(place)
        return result

    return go


def told(result: CommunicationResult) -> str:
    (check,) = result.checks()
    return check.text

"""GPUs and the plan of a machine with a fake NVIDIA driver."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

from tests.unit.conftest import ROOT, SIMPLE, python
from training.host.gpus import Gpu, GpuInventory

UUID = "GPU-000000a{}-0000-4000-8000-000000000000"
Nvidia = Callable[..., dict[str, Any]]


def look(variables: dict[str, Any]) -> GpuInventory:
    """gpus.inventory() in a process with this environment."""
    code = (
        "import json; from dataclasses import asdict; from training.host import gpus; found = "
        "asdict(gpus.inventory());"
        "found['gpus'] = [g for g in found['gpus']]; print(json.dumps(found))"
    )
    done = python("-c", code, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    gpus = {name: tuple(Gpu(**g) for g in facts[name]) for name in ("gpus", "hidden")}
    return GpuInventory(**facts | gpus | {"silent": tuple(facts["silent"])})


def dry_run(variables: dict[str, Any], *args: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "training.cli.plan", SIMPLE, *args, "--dry_run", cwd=ROOT, **variables)


BALANCED, QUICKSTART = "configs/dual_gpu/balanced.py", "configs/dual_gpu/quickstart.py"

"""A GPU driver that does not answer at a start: the remedies."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases import each
from tests.conftest import ROOT
from tests.unit.conftest import python
from tests.unit.nvidia_machine import Nvidia
from training.core.messages import msg
from training.diagnose import signatures
from training.host import gpus
from training.host.gpus import GpuInventory
from training.plan.preflight import gpu_checks


@each(
    ("status", "known"),
    [
        (18, "gpu.driver.nvml_mismatch"),  # updated, but not reloaded
        (9, "gpu.none.nvidia_smi"),  # no module for this kernel
        (999, "gpu.none.nvidia_smi"),  # lost by a container
        (4, None),  # permissions
    ],
)
def test_a_driver_that_does_not_answer_has_a_remedy(
    status: int, known: str | None, nvidia: Nvidia, tmp_path: Path
) -> None:
    folders = (f"--out_dir={tmp_path}", f"--log_dir={tmp_path}")
    args = ("configs/dual_gpu/quickstart.py", "--device=cuda", *folders)
    code = (
        "import json, os, sys; from training.core.errors import UserError\n"
        "from training.plan import training_plan\n"
        "try: training_plan.make('train_dual_gpu_enhanced.sh', sys.argv[1:], os.environ)\n"
        "except UserError as error: print(json.dumps([p.fixes for p in error.problems]))"
    )
    done = python("-c", code, *args, cwd=ROOT, **nvidia(COUNT=2, INIT=status))
    (fixes,) = json.loads(done.stdout)
    advice = [s.advice.en for s in signatures.signatures() if s.id == known]
    first = list(advice[0]) if known else ["nvidia-smi"]
    assert fixes[: len(first)] == first and len(fixes) > len(first)


def test_no_driver_has_no_remedy() -> None:
    missing = GpuInventory((), msg("host.gpus.no_driver"))
    assert gpu_checks._repairs(missing) == []
    assert gpu_checks._repairs(replace(missing, failure=gpus.FAILED)) == ["nvidia-smi"]


def test_a_driver_that_hangs_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi would hang too, and often cannot be killed."""
    never = threading.Event()
    monkeypatch.setattr(gpus, "inventory", lambda *_, **__: never.wait(9))
    monkeypatch.setattr(gpus, "SLOW_S", 0.01)
    monkeypatch.setattr(gpus, "LIMIT_S", 0.02)
    fixes = gpu_checks._repairs(gpus.inventory_at_start({}))
    never.set()
    assert "dmesg" in fixes[0] and not any("nvidia-smi" in fix for fix in fixes)

"""Help, checks, plan, supervisor and monitor start fast: none of them imports torch or numpy."""

from __future__ import annotations

import pytest

from tests.cases import each
from tests.unit.conftest import python

MODULES = [
    "training.plan.request",
    "training.tasks",
    "training.cli.plan",
    "training.cli.supervise",
    "training.cli.monitor",
    "training.cli.report",
    "training.cli.inspect",
    "training.cli.sample",
    "training.cli.evaluate",
    "training.cli.export",
    "training.cli.option_list",
    "training.plan.preflight",
    "training.cli.communication",
    "training.cli.submit",
    "training.trainer.worker",
]


@each("module", MODULES)
def test_no_torch_and_no_numpy(module: str) -> None:
    code = (
        f"import sys, {module}; print(*sorted(m for m in sys.modules if m.split('.')[0] in "
        f"('torch', 'numpy', 'wandb', 'pandas')))"
    )
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == []


def test_a_plan_needs_neither(tmp_path: object) -> None:
    code = (
        "import sys; from training.cli import plan;"
        "sys.argv = ['x', 'train_dual_gpu_enhanced.sh', '--device=cpu', '--depth=1', '--dry_run'];"
        "code = plan.main(); print([m for m in ('torch', 'numpy') if m in sys.modules], code)"
    )
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr


@pytest.mark.parametrize("module", ["training.plan.request", "training.cli.option_list"])
def test_the_standard_library_suffices_before_the_installation(module: str) -> None:
    done = python(
        "-S", "-c", f"import sys, {module}; assert not any('site-packages' in p for p in sys.path)"
    )
    assert (done.returncode, done.stderr) == (0, "")

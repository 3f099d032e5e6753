"""`pytest -m gpu` where only torch, numpy and pytest are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

ONLY = """
import sys


class Lacking:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in LACKING:
            raise ModuleNotFoundError(f"no {top}", name=top)

LACKING = {"PIL", "av", "lmdb", "pexpect", "prometheus_client", "psutil", "pynvml", "pyte", "re2"}
LACKING |= {"safetensors", "tensorboard", "tokenizers", "tqdm", "transformers", "wandb", "yaml"}
sys.meta_path.insert(0, Lacking())
"""


def test_the_tests_of_gpus_are_collected_with_torch_and_pytest_alone(tmp_path: Path) -> None:
    (tmp_path / "only_torch.py").write_text(ONLY)
    argv = ["-m", "pytest", "-p", "only_torch", "-m", "gpu", "--collect-only", "-qx", "tests"]
    done = subprocess.run(
        [sys.executable, *argv, "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    files = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    named = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/gpu/test_*.py"))
    assert sorted(files) == named

"""`make gpu` on null GPUs: every stage runs to its end. Its figures mean nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy
import pytest

from benchmarks.gpu import speed, stages
from tests.conftest import ROOT, TOKEN
from tests.null_gpu import programs
from tests.null_gpu.conftest import NullGpus
from tests.null_gpu.programs import CUDA_TORCH, GPU

# nanochat's interface in a few lines: its files are not part of this repository.
NANOCHAT = """
from dataclasses import dataclass

import torch

@dataclass
class GPTConfig:
    sequence_len: int = 1
    vocab_size: int = 1
    n_layer: int = 1
    n_embd: int = 1

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)
        self.head = torch.nn.Linear(config.n_embd, config.vocab_size)

    def init_weights(self):
        torch.nn.init.zeros_(self.head.weight)

    def setup_optimizers(self):
        return [torch.optim.AdamW(self.parameters(), fused=True)]

    def forward(self, inputs, targets):
        assert torch.is_autocast_enabled("cuda") == ("COMPUTE_DTYPE" not in globals())
        logits = self.head(self.wte(inputs)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten())
"""


def environment(gpus: NullGpus, token: str) -> dict[str, str]:
    """`make gpu` finds torch in its Python, not in TORCH_LOCAL_PATH."""
    own = {k: v for k, v in gpus.environ.items() if k != "TORCH_LOCAL_PATH"}
    return os.environ | own | {"PYTHONPATH": str(CUDA_TORCH), TOKEN: token}


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python that has torch's CUDA build and numpy, but none of Duet's other packages."""
    folder, packages = tmp_path / "bare", tmp_path / "packages"
    venv.create(folder, symlinks=True)
    packages.mkdir()
    installed = Path(numpy.__file__).parents[1]
    for part in ("numpy", "numpy.libs"):
        if (installed / part).exists():
            (packages / part).symlink_to(installed / part)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "only.pth").write_text(f"{packages}\n{CUDA_TORCH}\n")
    return str(folder / "bin/python")


@pytest.mark.timeout(3600)  # minutes on an idle machine
def test_a_python_with_torch_and_numpy_alone(
    gpus: NullGpus, tmp_path: Path, token: str, bare_python: str
) -> None:
    out, chosen = tmp_path / "out", ["correctness", "oom", "tests"]
    argv = [bare_python, "-m", "benchmarks.gpu", "--smoke", f"--stages={','.join(chosen)}"]
    argv += [f"--out={out}", f"--python={bare_python}", "--limit=2400"]
    env = {k: v for k, v in environment(gpus, token).items() if k != "PYTHONPATH"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (out / "gpu.json").exists(), done.stdout + done.stderr
    result = json.loads((out / "gpu.json").read_text())
    lacking = {"psutil", "pynvml", "tqdm", "tensorboard", "pytest"}
    assert set(result["machine"]["missing"]) == lacking
    records = result["stages"]
    reasons = [record["reason"] for record in records.values()]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *reasons])
    statuses = {name: record["status"] for name, record in records.items()}
    assert statuses == {"correctness": "done", "oom": "done", "tests": "skipped"}
    assert records["oom"]["figures"]["changes"] == [[8, 4]]


@pytest.mark.timeout(3600)  # minutes on an idle machine
def test_every_stage_runs_to_its_end(gpus: NullGpus, tmp_path: Path, token: str) -> None:
    argv = [sys.executable, "-m", "benchmarks.gpu", "--smoke", f"--out={tmp_path}"]
    argv += [f"--python={sys.executable}", "--limit=1200"]
    env = environment(gpus, token)

    def measure() -> dict[str, stages.Record]:
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert (tmp_path / "gpu.json").exists(), done.stdout + done.stderr
        result = json.loads((tmp_path / "gpu.json").read_text())
        reasons = [r["reason"] for r in result["stages"].values() if r["status"] != "done"]
        assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *reasons])
        assert result["machine"]["null_gpu"] and len(result["machine"]["gpus"]) == 2
        return dict(result["stages"])

    records = measure()
    assert {name: r["status"] for name, r in records.items()} == dict.fromkeys(
        stages.STAGES, "done"
    )
    assert "null GPU: a device that computes nothing" in (tmp_path / "gpu.html").read_text()
    loops = records["mfu_conservative"]["figures"]["loops"]
    assert set(loops) == {speed.DUET, speed.BARE, speed.LARGE}
    curves = records["correctness"]["figures"]["curves"]
    assert {len(curve) for curve in curves.values()} == {12}
    assert records["oom"]["figures"]["changes"] == [[8, 4]]
    assert measure() == records, "nothing is measured twice"


@pytest.mark.parametrize("more", ["", "COMPUTE_DTYPE = torch.bfloat16\n"], ids=["first", "later"])
def test_the_loop_of_nanochat(gpus: NullGpus, tmp_path: Path, token: str, more: str) -> None:
    """In its first versions, which train under autocast, and in later ones, which do not."""
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat/gpt.py").write_text(NANOCHAT + more)
    env = environment(gpus, token)
    env["PYTHONPATH"] += f":{tmp_path}"
    job = {
        "depth": 1,
        "sequences": 2,
        "seq_len": 16,
        "vocab": 320,
        "compiled": False,
        "precision": "bf16",
    }
    job |= {"steps": 2, "warm_up": 1}
    argv = [sys.executable, "-m", "benchmarks.gpu.nanochat_loop", json.dumps(job)]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["step_ms"] > 0
    words = ["nanochat", "1", "2", "16", "0"]
    counted = gpus.environ | {"PYTHONPATH": str(tmp_path)}
    assert programs.recorded(counted, tmp_path, 1, "bare_steps.py", words, 300)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_time_to_a_loss(gpus: NullGpus, tmp_path: Path, token: str, bare_python: str) -> None:
    """Both contenders train on the GPU, not compiled here, and are timed in turns on the clock. As on
    a lent machine, only torch and numpy are installed."""
    env = {k: v for k, v in environment(gpus, token).items() if k != "PYTHONPATH"}
    folders = [f"--results={tmp_path / 'results'}", f"--scratch={tmp_path / 'started'}"]
    sizes = ["--steps=4", "--seeds=1", "--shares=1", "--share=1", "--rounds=2", "--eval_every=4"]
    for step in ([], ["--timing"]):
        done = subprocess.run(
            [bare_python, "-m", "benchmarks.target", "--device=cuda", *folders, *sizes, *step],
            cwd=ROOT,
            env=env | {"TORCH_COMPILE_DISABLE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=800,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    kept = {path.name for path in (tmp_path / "results").iterdir()}
    assert {f"gpt2-cuda-fp32-4-rate{rate}-seed1.json" for rate in ("0.0007", "0.0014")} <= kept
    assert "duet-cuda-fp32-4-rate1-seed1.json" in kept
    time = json.loads((tmp_path / "results/time-gpt2-cuda-fp32.json").read_text())
    assert len(time["step_ms"]) == 2 and min(map(min, time["step_ms"])) > 0
    assert time["machine"]["gpu"] == GPU

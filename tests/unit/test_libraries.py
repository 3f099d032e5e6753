"""Files of libraries, by their paths alone."""

from __future__ import annotations

import json
import linecache
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.cases import each
from training.core import libraries
from training.core.project import ROOT
from training.core.rundir import RunDir
from training.diagnose import traceback
from training.trainer import error_file
from training.watchdog.probes import stacks

MINE = "/home/me/torch/distributed"  # a user's folder with a name of torch's


@each(
    ("file", "so"),
    [
        ("/u/.venv/lib/python3.11/site-packages/torch/nn/modules/module.py", True),
        (".../site-packages/torch/_ops.py", True),  # as rich shortens it
        (r"C:\Users\me\env\lib\site-packages\numpy\core.py", True),
        ("/usr/lib/python3/dist-packages/numpy/core.py", True),
        (json.decoder.__file__, True),
        (linecache.__file__, True),
        ("/usr/lib64/python3.9/json/decoder.py", True),  # Fedora
        ("/opt/python3.13t/lib/python3.13t/threading.py", True),
        ("/usr/lib/python312.zip/json/decoder.py", True),
        ("<frozen importlib._bootstrap>", True),
        ("<string>", True),
        ("<eval_with_key>.3", True),  # torch.fx
        ("<ipython-input-3-0f1e2d3c4b5a>", False),
        ("/home/me/pytorch/torch/nn/modules/linear.py", True),
        ("/home/me/pytorch/torch/utils/data/_utils/fetch.py", True),
        ("/home/me/pytorch/torch/_dynamo/eval_frame.py", True),
        ("/home/me/pytorch/torch/functional.py", True),
        ("/built/triton/compiler/compiler.py", True),
        ("/home/me/pytorch/torch/distributions/distribution.py", True),
        ("/home/me/pytorch/torch/utils/hooks.py", True),
        ("/home/me/torch/train.py", False),
        ("/home/me/torch/utils/metrics.py", False),
        ("/home/me/torch experiments/train.py", False),
        ("/home/me/triton/train.py", False),
        ("/home/me/lib/python/train.py", False),
        (f"{ROOT}/training/trainer/worker.py", False),
    ],
)
def test_a_file_of_a_library(file: str, so: bool) -> None:
    assert libraries.contain(file) is so
    # a place in a log, a frame of a stack, the wrapper of a script
    mine = "/home/me/train.py"
    assert traceback.innermost([f"{mine}:7", f"{file}:3"]) == (f"{mine}:7" if so else f"{file}:3")
    frames = [stacks.Frame(file, 3, "f"), stacks.Frame(mine, 7, "main")]
    assert stacks.own(frames) == frames[so]


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize(
    "file", ["/usr/lib64/python3.9/f.py", "/built/torch/nn/functional.py", f"{MINE}/metrics.py"]
)
def test_code_of_the_process_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: bool, file: str
) -> None:
    torch = ModuleType("torch")
    torch.__file__ = "/built/torch/__init__.py"
    monkeypatch.setitem(sys.modules, "torch", torch if imported else None)
    if imported and file.startswith("/built"):
        file = "/built/torch/a_new_part.py"

    def fails() -> None:
        exec(compile("raise ValueError", file, "exec"), {})

    with pytest.raises(ValueError) as caught:
        fails()
    place = runpy.run_path(str(ROOT / "lib/run_script.py"))["_where"]("train.py", caught.value)
    mine = imported and file.startswith(MINE)
    assert place.startswith(f"{file if mine else __file__}:")
    assert error_file._facts(RunDir(tmp_path), 0, caught.value)["where"] == place


def test_a_process_knows_the_torch_and_triton_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    built = SimpleNamespace(__file__="/home/me/build/torch/__init__.py")
    monkeypatch.setitem(sys.modules, "torch", built)
    for file in ("torch/x/new.py", "triton/runtime/jit.py", "triton/knobs.py"):
        assert libraries.contain_here(f"/home/me/build/{file}"), file
    assert not libraries.contain_here("/home/me/torch/distributed/mine.py")

"""Files of libraries, by their paths alone."""

from __future__ import annotations

import json
import linecache
import runpy
from pathlib import Path

import pytest

from tests.cases import each
from training.core import libraries
from training.core.project import ROOT
from training.diagnose import traceback
from training.watchdog.probes import stacks


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


@pytest.mark.parametrize("file", ["/usr/lib64/python3.9/f.py", "/built/torch/nn/functional.py"])
def test_a_script_that_fails_in_a_library(tmp_path: Path, file: str) -> None:
    def fails() -> None:
        exec(compile("raise ValueError", file, "exec"), {})

    with pytest.raises(ValueError) as caught:
        fails()
    place = runpy.run_path(str(ROOT / "lib/run_script.py"))["_where"]("train.py", caught.value)
    assert place.startswith(f"{__file__}:")

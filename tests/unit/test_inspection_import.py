"""Under the launcher `training.inspector` and `duet_inspector` can be imported without hiding a
project's own package `training`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.conftest import ROOT, clean_environment

SCRIPT = """
import importlib.util, os, sys
import training
print("training:", getattr(training, "__file__", None), getattr(training, "MINE", None))
for name in ("training.inspector", "duet_inspector", "training.mine", "tests", "train"):
    spec = importlib.util.find_spec(name)
    print(name + ":", spec and os.path.realpath(spec.origin))
"""
OURS = f"{ROOT}/training/inspector/__init__.py"


@pytest.mark.parametrize("own", ["none", "package", "folder"])
def test_a_package_of_the_same_name_is_not_hidden(tmp_path: Path, own: str) -> None:
    script, folder = tmp_path / "main.py", tmp_path / "training"
    script.write_text(SCRIPT)
    if own != "none":
        folder.mkdir()
        (folder / "mine.py").write_text("")
    if own == "package":
        (folder / "__init__.py").write_text("MINE = 1\n")
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    env = clean_environment()
    del env["PYTHONPATH"]
    run = [sys.executable, str(ROOT / "lib/run_script.py"), str(ranks), str(script)]
    done = subprocess.run(
        run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = dict(line.split(": ") for line in done.stdout.splitlines())
    assert found["training"] == {
        "none": f"{ROOT}/training/__init__.py None",
        "package": f"{folder}/__init__.py 1",
        "folder": "None None",
    }.get(own)
    assert found["training.inspector"] == OURS
    assert found["duet_inspector"] == f"{ROOT}/lib/pythonpath/duet_inspector/__init__.py"
    assert found["training.mine"] == (str(folder / "mine.py") if own != "none" else "None")
    assert (found["tests"], found["train"]) == ("None", "None"), (
        "no other module of Duet can be imported"
    )


def test_both_names_are_the_same_code_without_dependencies(tmp_path: Path) -> None:
    """As with torchrun: PYTHONPATH=…/lib/pythonpath, and another package `training`."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training/__init__.py").write_text("")
    code = """
import sys
from duet_inspector import DDPInspector, InspectionError
import duet_inspector.analysis, training
print(sys.modules[DDPInspector.__module__].__file__)
print(sorted(name for name in sys.modules if name.split(".")[0] == "training"))
"""
    env = clean_environment(PYTHONPATH=f"{ROOT}/lib/pythonpath")
    run = [sys.executable, "-c", code]
    done = subprocess.run(
        run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split("\n")[:2]) == (
        0,
        [f"{ROOT}/training/inspector/inspector.py", "['training']"],
    ), done.stderr

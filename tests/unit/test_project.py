"""The command for an own copy of the project."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.unit.conftest import clean_environment
from training.core import project

OTHER_USER = 65534


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("git", [False, True])
def test_the_command_copies_the_project(git: bool, others: bool, tmp_path: Path) -> None:
    if others and os.geteuid() != 0:
        pytest.skip("needs root, to give a file to another user")
    home, root = tmp_path / "home", tmp_path / "du et"
    home.mkdir()
    root.mkdir()
    for name in ("train.py", "training/data/code.py", "data/text", "experiments/x", ".venv/x"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    env = clean_environment(HOME=str(home))
    if git:
        commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"]
        for words in (["init", "-q"], ["add", "train.py", "training"], commit):
            subprocess.run(["git", *words], cwd=root, env=env, check=True)
    for folder in (root / "training", root):
        folder.chmod(0o555)
    if others:
        for path in (root, *root.rglob("*")):
            shutil.chown(path, OTHER_USER)
    subprocess.run(["bash", "-c", project.own_copy(root)], env=env, check=True)
    copy = home / "du et"
    assert {path.name for path in copy.iterdir()} - {".git"} == {"train.py", "training"}
    assert (copy / "training/data/code.py").is_file() and (copy / ".git").exists() == git
    assert copy.stat().st_mode & (copy / "training").stat().st_mode & stat.S_IWUSR

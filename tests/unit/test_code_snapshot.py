"""The copy of the project that a SLURM job runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from training.launcher.slurm import code_snapshot


def test_files_of_secrets_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "a project"
    for name in (".env", "mine/.env", "mine/.netrc", "mine/task.py", "mine/main.env"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x = 1\n")
    made = code_snapshot.take(root, tmp_path / "plain")  # without git
    assert (made.files, made.left_out) == (2, [])

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True)

    git("init")
    git("add", "mine/.env")  # then it is part of the code
    code_snapshot.take(root, tmp_path / "git")
    copied = {
        name: {str(p.relative_to(tmp_path / name)) for p in (tmp_path / name).rglob("*")}
        for name in ("plain", "git")
    }
    assert copied["plain"] == {"mine", "mine/task.py", "mine/main.env"}
    assert copied["git"] == copied["plain"] | {"mine/.env"}

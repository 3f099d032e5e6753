"""The copy of the project that a SLURM job runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("git", [False, True])
def test_a_folder_of_very_many_files_is_data(
    git: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of videos, the innermost such folder: code above it and within it is copied."""
    monkeypatch.setattr(code_snapshot, "MOST_IN_FOLDER", 5)
    monkeypatch.setattr(code_snapshot, "LARGEST_FOLDER", 1000)
    root = tmp_path / "project"
    frames = [f"mine/frames/{clip}/{i}.png" for clip in "ab" for i in range(3)]
    code = ["mine/task.py", "mine/a.json", "mine/frames/read.py", "main.cu"]
    code += [f"many/{i}.py" for i in range(9)]
    for name in (*frames, *code, "large/x.npy", "large/y.npy"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x" * 600 if name.startswith("large") else "1\n")
    if git:
        for words in (["init"], ["add", "mine/frames/a"]):
            subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True)
        for i in range(3):
            (root / f"mine/frames/b/{i}.jpg").touch()
    made = code_snapshot.take(root, copy := tmp_path / "copy")
    copied = {str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()}
    tracked = {name for name in frames if git and "/a/" in name}
    assert copied == {*code} | tracked and made.left_out == []
    assert made.folders == {"mine/frames/b" if git else "mine/frames": 6, "large": 2}

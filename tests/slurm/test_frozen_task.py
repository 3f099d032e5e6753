"""A user's task file in the frozen code of a job. No SLURM needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training.config.schema import FIELDS
from training.launcher.slurm import options, submission
from training.launcher.slurm.submission import FrozenJob


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a run that was submitted twice: mine/line.py is in both copies."""
    root = tmp_path / "du et"
    run = root / "experiments/run"
    for folder in (root, run / "code", run / "code_2"):
        (folder / "mine").mkdir(parents=True)
        (folder / "mine/line.py").touch()
    monkeypatch.setattr(submission, "ROOT", root)
    return root


def frozen(project: Path, file: Path, code: str = "code_2") -> Path | None:
    return submission._frozen_task(FrozenJob(project / "experiments/run" / code), file)


def test_the_copy_of_a_file_in_the_project(project: Path, tmp_path: Path) -> None:
    run = project / "experiments/run"
    assert frozen(project, project / "mine/line.py", "code") == run / "code/mine/line.py"
    (tmp_path / "link").symlink_to(project)
    found = frozen(project, tmp_path / "link/mine/line.py", "code")
    assert found == run / "code/mine/line.py", "by another path"


def test_a_later_submission_freezes_the_file_again(project: Path) -> None:
    run = project / "experiments/run"
    earlier = run / "code/mine/line.py"
    assert frozen(project, earlier) == run / "code_2/mine/line.py"
    (run / "code_2/mine/line.py").unlink()  # not in the project any more
    assert frozen(project, earlier) == earlier


def test_a_file_that_is_not_copied_stays_where_it_is(project: Path, tmp_path: Path) -> None:
    (tmp_path / "other.py").touch()
    assert frozen(project, tmp_path / "other.py") is None
    (project / "ignored.py").touch()
    assert frozen(project, project / "ignored.py") is None
    for folder in (project, project / "experiments/run/code_2"):
        (folder / "linked.py").symlink_to(tmp_path / "other.py")
    assert frozen(project, project / "linked.py") is None


def test_a_resumed_run_starts_with_the_new_copy(project: Path) -> None:
    request: Any = SimpleNamespace(resume_from=True, kind=SimpleNamespace(fields=FIELDS))
    line = options.split(["--resume=run", "--task=mine/line.py", "--seed=3"])
    copy = project / "experiments/run/code_2/mine/line.py"
    assert sorted(submission._flags(request, line, copy)) == ["--seed=3", f"--task={copy}"]
    assert "--task=mine/line.py" in submission._flags(request, line, None)

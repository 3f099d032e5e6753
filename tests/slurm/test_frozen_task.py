"""A user's task file in the frozen code of a job. No SLURM needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training.config.schema import FIELDS
from training.launcher.slurm import code_snapshot, options, submission
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
    request: Any = SimpleNamespace(
        resume_from=True, start=None, kind=SimpleNamespace(fields=FIELDS)
    )
    line = options.split(["--resume=run", "--task=mine/line.py", "--seed=3"])
    copy = project / "experiments/run/code_2/mine/line.py"
    assert sorted(submission._flags(request, line, copy, {})) == ["--seed=3", f"--task={copy}"]
    assert "--task=mine/line.py" in submission._flags(request, line, None, {})


def links(project: Path, folder: str, *without: Path) -> list[str]:
    """Those beside a task in this folder."""
    code = project / "experiments/run/code"
    made = code_snapshot.link_rest(project, code, Path(folder), without)
    assert made == [
        str(path.relative_to(code)) for path in sorted(code.rglob("*")) if path.is_symlink()
    ]
    assert all((code / name).resolve() == project / name for name in made)
    return made


def test_what_is_not_copied_beside_a_task_is_linked(project: Path) -> None:
    """Data that git ignores or that is large, generated modules."""
    live, copy = project / "mine", project / "experiments/run/code/mine"
    for folder in ("images", "data", "parts", ".git", "__pycache__", "results"):
        (live / folder).mkdir()
    for name in ("train.csv", "parts/made.py", "parts/kept.py", ".env"):
        (live / name).touch()
    (live / "kair.json").write_text('{"logging": {"wandb_api_key": "secret"}}')
    (live / "labels.json").write_text("{}")
    (copy / "parts").mkdir()
    (copy / "parts/kept.py").touch()
    names = ("data", "images", "labels.json", "parts/made.py", "train.csv")
    assert links(project, "mine", live / "results") == [f"mine/{name}" for name in names]


def test_a_task_in_the_project_s_folder_has_no_links_to_results(project: Path) -> None:
    for name in ("logs", ".venv", "images", "large.npy"):
        (project / name).mkdir()
    assert links(project, ".") == ["images", "large.npy"]

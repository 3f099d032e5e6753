"""kill -9 of anything, at any time, again and again: what comes out is what the untouched run gives, bit for bit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.crash_report import END, LOST, RESUME, SURVIVORS, TRACE, WEIGHTS
from tests.conftest import TOKEN
from tests.e2e.hooks import at_rank


def crashes(project: Path, token: str, folder: Path, *flags: str, hook: str = "") -> tuple[int, str]:
    """(exit status, table) of the benchmark, run in a user's copy of the project."""
    variables = {**os.environ, TOKEN: token}
    if hook:
        (folder / "hook").mkdir()
        (folder / "hook/sitecustomize.py").write_text(hook)
        variables["PYTHONPATH"] = str(folder / "hook")
    command = [project / ".venv/bin/python", "-m", "benchmarks.crashes", f"--keep={folder / 'kept'}", *flags]
    done = subprocess.run(
        command, cwd=project, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1500, check=False
    )
    return done.returncode, done.stdout + done.stderr


def check(status: int, output: str, kills: int) -> None:
    assert status == 0, output
    rows = dict(line.rsplit(None, 1) for line in output.splitlines() if line.startswith((WEIGHTS, LOST, RESUME, END, SURVIVORS, TRACE)))
    assert {name.strip(): count for name, count in rows.items()} == dict.fromkeys((WEIGHTS, LOST, RESUME, END, SURVIVORS, TRACE), "0")
    assert f"{kills} in " in output


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_six_kills(project: Path, token: str, tmp_path: Path) -> None:
    check(*crashes(project, token, tmp_path, "--kills=6", "--seed=6"), 6)
    assert not list(tmp_path.iterdir()) and not list(project.glob("data/*crashes*")), "neither a wrong run nor prepared data is left"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_forty_kills(project: Path, token: str, tmp_path: Path) -> None:
    check(*crashes(project, token, tmp_path, "--kills=40", "--seed=40"), 40)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_resume_that_forgets_the_optimizer_is_found(project: Path, token: str, tmp_path: Path) -> None:
    """The proof can fail: the classic mistake, on one of the ranks, gives other weights."""
    hook = at_rank(0, "from training.engine import optim\noptim.Optimizers.load_state_dict = lambda *_: None")
    status, output = crashes(project, token, tmp_path, "--kills=4", "--seed=2", hook=hook)
    assert status == 1 and "other weights than the uninterrupted run" in output, output
    assert list(tmp_path.glob("kept/run*/story.txt"))

"""kill -9 of any process at any time, repeatedly: the result equals that of the undisturbed run,
bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.crash_report import END, LOST, RESUME, SURVIVORS, TRACE, WEIGHTS
from tests.conftest import TOKEN
from tests.e2e.hooks import at_rank

LOOPS = 2  # for more kills: python -m benchmarks.crashes --kills=1000


def crashes(
    project: Path, token: str, folder: Path, *flags: str, hook: str = ""
) -> tuple[int, str]:
    """(exit status, table) of the benchmark, run in a user's copy of the project."""
    variables = {**os.environ, TOKEN: token}
    if hook:
        (folder / "hook").mkdir()
        (folder / "hook/sitecustomize.py").write_text(hook)
        variables["PYTHONPATH"] = str(folder / "hook")
    command = [
        project / ".venv/bin/python",
        "-m",
        "benchmarks.crashes",
        f"--keep={folder / 'kept'}",
        *flags,
    ]
    done = subprocess.run(
        command,
        cwd=project,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def check(status: int, output: str, kills: int) -> None:
    assert status == 0, output
    rows = dict(
        line.rsplit(None, 1)
        for line in output.splitlines()
        if line.startswith((WEIGHTS, LOST, RESUME, END, SURVIVORS, TRACE))
    )
    assert {name.strip(): count for name, count in rows.items()} == dict.fromkeys(
        (WEIGHTS, LOST, RESUME, END, SURVIVORS, TRACE), "0"
    )
    assert f"{kills} in " in output


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "kills", [pytest.param(4, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.soak)]
)
def test_kills_at_random_moments(project: Path, token: str, tmp_path: Path, kills: int) -> None:
    """In two concurrent loops, each of which mostly waits: for a start, or for a moment. Each has
    its own project and data."""
    copies = [tmp_path / f"user {number}" / "du et" for number in range(LOOPS)]
    for copy in copies:
        shutil.copytree(
            project,
            copy,
            symlinks=True,
            ignore=lambda folder, _: ("data",) if Path(folder) == project else (),
        )
    with ThreadPoolExecutor() as pool:
        loops = [
            pool.submit(
                crashes, copy, token, copy.parent, f"--kills={kills // LOOPS}", f"--seed={40 + i}"
            )
            for i, copy in enumerate(copies)
        ]
    for loop in loops:
        check(*loop.result(), kills // LOOPS)
    left = [
        path
        for copy in copies
        for path in (*copy.parent.iterdir(), *copy.glob("data/*crashes*"))
        if path != copy
    ]
    assert not left, "neither a wrong run nor prepared data"


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_resume_without_the_optimizer_is_detected(
    project: Path, token: str, tmp_path: Path
) -> None:
    """The proof can fail: this classic mistake, on one of the ranks, gives other weights."""
    hook = at_rank(
        0, "from training.tasks import optim\noptim.Optimizers.load_state_dict = lambda *_: None"
    )
    status, output = crashes(project, token, tmp_path, "--kills=4", "--seed=2", hook=hook)
    assert status == 1 and "other weights than the uninterrupted run" in output, output
    assert list(tmp_path.glob("kept/run*/story.txt"))

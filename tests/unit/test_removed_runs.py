"""Runs that are removed (`./duet clean`) while a command lists them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from training.core import rundir
from training.core.errors import UserError
from training.core.find_run import RunSelector
from training.diagnose import result
from training.plan import cli_args, corrections
from training.tasks import weights


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, and one that is gone once it is listed."""
    for name in ("a", "b"):
        run = rundir.RunDir(tmp_path / name)
        run.create()
        rundir.write_json(run.plan, {"config": {}})
    glob = Path.glob

    def with_removed(folder: Path, pattern: str) -> Iterator[Path]:
        yield from glob(folder, pattern)
        if folder == tmp_path:
            yield folder / pattern.replace("*", "removed")

    monkeypatch.setattr(Path, "glob", with_removed)


def test_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint yet"):
        weights.find("a", tmp_path, RunSelector("RUN", "./duet sample ", "./duet sample"))


def test_diagnose(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains") as raised:
        result.diagnose([tmp_path])
    (fix,) = raised.value.problems[0].fixes
    assert fix in (f"./duet diagnose {tmp_path / name}" for name in ("a", "b"))


def test_suggestions_for_a_flag(tmp_path: Path) -> None:
    words = ["2", f"--out_dir={tmp_path}", "--resum=c"]
    asked = cli_args.parse_args("launch_train.sh", words, {})
    assert corrections.problems(asked, "launch_train.sh", words, [])

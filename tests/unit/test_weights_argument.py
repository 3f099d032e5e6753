"""RUN of sample, evaluate, export and restore, and of the report: suggestions are the whole
command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import make_run
from tests.unit.trained_runs import stored
from training.cli import evaluate, export, restore, sample, weights_argument
from training.core.errors import Problem, UserError
from training.monitor.report import options as report

Parse = Callable[[list[str]], Any]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the run `tiny`."""
    (tmp_path / "experiments").mkdir()
    stored(tmp_path / "experiments")
    (tmp_path / "a b.txt").write_text("some text " * 999)
    (tmp_path / "in.png").write_bytes(b"")
    monkeypatch.setattr(weights_argument, "WORK", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problem(parse: Parse, words: Sequence[str]) -> Problem:
    with pytest.raises(UserError) as caught:
        parse(list(words))
    return caught.value.problems[0]


def at_home(argv: list[str]) -> report.ReportOptions:
    return report.parse(argv, Path.cwd())


COMMANDS: list[tuple[Parse, list[str], list[str]]] = [
    (export.parse, ["--out=new dir", "--format=torch", "--weights=raw"], []),
    (evaluate.parse, ["--data=a b.txt", "--weights=raw", "--device=cpu"], ["tiny"]),
    (sample.parse, ["--prompt=x y", "--num=2", "--weights=raw"], []),
    (at_home, ["--out=a b.html", "--quiet"], []),
]


def test_a_missing_run_keeps_the_flags() -> None:
    for parse, flags, others in COMMANDS:
        found = problem(parse, ["tinny", *others, *flags])
        assert found.code == "run.missing"
        again = shlex.split(found.fixes[0])[2:]
        assert again == ["tiny", *others, *flags], flags
        parse(again)


def test_other_weights_keep_the_flags() -> None:
    for parse, flags, _ in COMMANDS[:3]:
        words = [flag.replace("raw", "ema") for flag in flags]
        found = problem(parse, ["tiny", *words])
        assert found.code == "weights.other_kind"
        again = shlex.split(found.fixes[0])[2:]
        assert sorted(again) == sorted(["tiny", *flags])
        parse(again)


def test_a_new_output_keeps_the_flags(home: Path) -> None:
    found = problem(export.parse, ["tiny", f"--out={home}", "--format=torch", "--quiet"])
    again = shlex.split(found.fixes[0])[2:]
    assert again == ["tiny", "--format=torch", "--quiet", f"--out={home}_2"]
    found = problem(export.parse, ["tiny", "--format=torch"])
    assert shlex.split(found.fixes[0])[2:] == ["tiny", "--format=torch", "--out=model/"]
    found = problem(restore.parse, ["tinny", "in.png", "--out=a b.png", "--tile=64"])
    assert shlex.split(found.fixes[0])[2:] == ["tiny", "in.png", "--out=a b.png", "--tile=64"]


def test_the_default_is_the_newest_run_with_weights(home: Path) -> None:
    make_run(home / "experiments", "later", depth=2)  # of a job that waits, for example
    run = sample.parse([]).weights.run
    assert run and run.name == "tiny"

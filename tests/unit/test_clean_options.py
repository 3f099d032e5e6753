"""Command line of `./duet clean`."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.cli.cleaning import options
from training.core.errors import UserError


@pytest.mark.parametrize(
    "given",
    ["", ",", "done,,live", "--state=,", "--filter=depth!=", "--filter=name!=", "--filter=,"],
)
def test_an_empty_variable_does_not_select_every_run(tmp_path: Path, given: str) -> None:
    for what in ("--keep=none", "--what=runs"):
        with pytest.raises(UserError) as refused:
            options.parse([f"--dir={tmp_path}", what, "--older_than=1m", given])
        assert [problem.code for problem in refused.value.problems] == ["clean.empty"]
    options.parse([f"--dir={tmp_path}", "--keep=none", "--filter=data=", "done"])


@pytest.mark.parametrize(
    ("argv", "fixes"),
    [
        (["--what=runs", "--state=finishedd,failedd"], ["--what=runs --state=finished,failed"] * 2),
        (
            ["--what=rns", "--state=failedd", "--yes"],
            ["--what=runs --state=failed", "--state=failed --what=runs"],
        ),
        (["--what=runs", "--older_than=-1d", "--yes"], ["--what=runs --older_than=30d"]),
        (["--what=runs", "--yes"], ["--what=runs --state=damaged,empty", "--what=runs NAME"]),
        (["--what=runs", "--stat=failed", "--yes"], ["--what=runs --state=failed"]),
        (
            ["--what=runs", "--older_then=30d", "los<2"],
            ["'los<2' --what=runs --older_than=30d", "'loss<2' --what=runs --older_than=30d"],
        ),
        (["exp_*", "--yes"], ["'exp_*' --keep=last,best", "'exp_*' --what=runs"]),
        (["--keep=first", "--yes"], ["--keep=last,best"]),
        (["--what=logs", "--yes=1"], ["--what=logs"]),
        (["--yess", "--what=runs", "--older_than=3x"], ["--what=runs --older_than=30d"] * 2),
        (["--yes=true", "--what=runs", "--stat=failed"], ["--what=runs --state=failed"] * 2),
        (["--what=runs", "--filter=los<3"], ["--what=runs --filter='loss<3'"]),
        (["--what=runs", "exp_*,los<3", "done"], ["'exp_*,loss<3' done --what=runs"]),
        (
            ["--filter=los<3,age>2d,name>x", "--what=runs", "--state=failedd"],
            ["--filter='loss<3,age>2d,name=x' --what=runs --state=failed"] * 3,
        ),
        (["--state=failed"], ["--state=failed --keep=last,best", "--state=failed --what=runs"]),
        (["--what=runs"], ["--what=runs --state=damaged,empty", "--what=runs NAME"]),
    ],
)
def test_a_suggestion_is_the_whole_command(argv: list[str], fixes: list[str]) -> None:
    with pytest.raises(UserError) as error:
        options.parse(argv)
    found = [fix for problem in error.value.problems for fix in problem.fixes]
    assert sorted(found) == sorted(f"./duet clean {fix}" for fix in fixes)


def test_bad_input_is_answered_at_once(tmp_path: Path) -> None:
    for argv, codes in (
        ([], ["clean.what"]),
        (["--what=runs"], ["clean.all_runs"]),
        (["--what=runs", "--state="], ["flag.no_value"]),
        (["--what=runs", "--filter"], ["flag.no_value"]),
        (["--what=run", "--state=running"], ["flag.value", "flag.value"]),
        (["--keep=first", "--older_than=30"], ["flag.value", "flag.value"]),
        (["--keep=none,last"], ["flag.value"]),
        (["--keep=logs:last"], ["flag.value"]),
    ):
        with pytest.raises(UserError) as error:
            options.parse([f"--dir={tmp_path}", *argv])
        assert sorted(problem.code for problem in error.value.problems) == codes, argv
    with pytest.raises(UserError) as error:
        options.parse(["--keep=last", f"--dir={tmp_path / 'nowhere'}"])
    assert [problem.code for problem in error.value.problems] == ["runs.no_folder"]

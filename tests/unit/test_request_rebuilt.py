"""The command of a request, rebuilt with changes; the request as a program."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.conftest import (
    ENHANCED,
    LAUNCH,
    TRAIN,
    Shell,
    clean_environment,
    python,
)
from training.plan.cli_args import command


@pytest.mark.parametrize(
    ("args", "changes", "expected"),
    [
        ([], {}, "./train_dual_gpu_enhanced.sh"),
        ([], {"depth": 2}, "./train_dual_gpu_enhanced.sh --depth=2"),
        (["--depth=3"], {"depth": 2}, "./train_dual_gpu_enhanced.sh --depth=2"),
        (["--depth", "3", "c.py"], {"depth": 2}, "./train_dual_gpu_enhanced.sh c.py --depth=2"),
        (
            ["--max-seq-len", "3"],
            {"max_seq_len": 2},
            "./train_dual_gpu_enhanced.sh --max_seq_len=2",
        ),
        (
            ["--max-seq-len=3", "--seed=1"],
            {"max_seq_len": 2},
            "./train_dual_gpu_enhanced.sh --seed=1 --max_seq_len=2",
        ),
        (
            ["--dry_run", "c.py"],
            {"depth": 2},
            "./train_dual_gpu_enhanced.sh --dry_run c.py --depth=2",
        ),
        (
            ["--task=own.py", "--width=a", "--width", "b", "c.py"],
            {"width": 64},
            "./train_dual_gpu_enhanced.sh --task=own.py c.py --width=64",
        ),
        (
            ["a b.py", "--data=it's"],
            {},
            "./train_dual_gpu_enhanced.sh 'a b.py' '--data=it'\"'\"'s'",
        ),
    ],
)
def test_the_command_with_changes(
    args: list[str], changes: dict[str, object], expected: str
) -> None:
    assert command(ENHANCED, args, **changes) == expected


def test_the_command_of_the_entry_point() -> None:
    assert command(TRAIN, ["c.py"], depth=2) == "python train.py c.py --depth=2"


def test_a_rebuilt_command_means_the_same(shell: Shell) -> None:
    chance = random.Random(3)
    words = [
        "a b",
        "it's",
        'run "x"',
        "$HOME",
        "`id`",
        "a\nb",
        "*",
        "训练",
        "",
        "--",
        "~",
        "!x",
        "#c",
        "a\\b",
        ";",
        "\t",
    ]
    for _ in range(10):
        args = [
            chance.choice(words) if chance.random() < 0.5 else f"--data={chance.choice(words)}"
            for _ in range(6)
        ]
        assert shell.paste(command(ENHANCED, args)) == (ENHANCED, args)
        script, changed = shell.paste(command(ENHANCED, args, seed=7))
        assert (script, changed) == (ENHANCED, [*args, "--seed=7"])


def test_as_a_program_it_only_checks(tmp_path: Path) -> None:
    good = python("-m", "training.cli.check_request", LAUNCH, "2", "--depth=3", cwd=tmp_path)
    assert (good.returncode, good.stdout, good.stderr) == (0, "", "")
    bad = python(
        "-m", "training.cli.check_request", LAUNCH, "zwei", "--depht=3", cwd=tmp_path, DUET_TYPO="1"
    )
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.count("[ERROR]") == 4
    assert bad.stderr.endswith("3 problems; nothing was launched (exit 2)\n")
    assert bad.stderr.count("    try:     ./launch_train.sh 2 --depth=3\n") == 2
    assert list(tmp_path.iterdir()) == []


def test_it_runs_before_the_installation(tmp_path: Path) -> None:
    # -S: without site-packages, as on a fresh machine.
    code = (
        "import sys, os; from training.cli import check_request; sys.argv = ['x', "
        "'launch_train.sh', '2']; sys.exit(check_request.main())"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")

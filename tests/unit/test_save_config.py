"""`--save_config=FILE` writes a config that gives the same request."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.conftest import ENHANCED, LAUNCH, ROOT, TRAIN, ask, only, python, wrong
from training.core.errors import UserError
from training.plan.request import Request

QUICKSTART = str(ROOT / "configs/dual_gpu/quickstart.py")


def settings(found: Request) -> dict[str, object]:
    return found.values() | found.options


@pytest.mark.parametrize("suffix", ["py", "json"])
def test_a_saved_configuration_gives_the_same_request(suffix: str, home: Path) -> None:
    wanted = ask(
        QUICKSTART,
        "--seed=5",
        "--matrix_lr=-0.0",
        '--notify=echo "it\'s" done',
        "--debug",
        f"--save_config=my plan.{suffix}",
    )
    wanted.save()
    wanted.save()  # the same content is accepted
    again = ask(f"my plan.{suffix}")
    assert settings(again) == settings(wanted) and again.config.seed == 5 and again.config.debug
    text = (home / f"my plan.{suffix}").read_text()
    assert (
        " from " not in text and "--seed on the command line" in text and f"{QUICKSTART}:4" in text
    )
    assert not {"run_name", "resume", "launcher"} & {
        line.strip(' "').partition(" ")[0].rstrip('":') for line in text.splitlines()
    }


@pytest.mark.parametrize("suffix", ["py", "json"])
def test_a_saved_configuration_of_a_user_task(suffix: str, home: Path, line: str) -> None:
    wanted = ask(
        "2",
        f"--task={line}",
        "--width=4",
        "--title=a b",
        f"--save_config=own.{suffix}",
        script=LAUNCH,
    )
    wanted.save()
    assert settings(ask("2", f"own.{suffix}", script=LAUNCH)) == settings(wanted)


def test_nothing_is_overwritten(home: Path) -> None:
    (home / "mine.py").write_text("depth = 3\n")
    with pytest.raises(UserError) as caught:
        ask(QUICKSTART, "--save_config=mine.py").save()
    assert only(caught.value.problems).fixes == ["--save_config=mine_2.py"]
    assert (home / "mine.py").read_text() == "depth = 3\n"
    assert "neither .py nor .json" in only(wrong("--save_config=mine.txt")).what
    assert only(wrong("--save_config=no folder/mine.py")).fixes == ["mkdir -p 'no folder'"]


@pytest.mark.parametrize("script", [ENHANCED, TRAIN])
def test_nothing_is_started(script: str, home: Path) -> None:
    module = "training.cli.plan" if script == ENHANCED else None
    program = (
        [str(ROOT / "lib/run_module.py"), module, script] if module else [str(ROOT / "train.py")]
    )
    done = python(
        *program,
        QUICKSTART,
        "--out_dir=runs",
        "--log_dir=logs",
        "--save_config=saved.json",
        cwd=home,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "configuration saved in saved.json" in done.stderr and sorted(
        p.name for p in home.iterdir()
    ) == ["saved.json"]


def test_save_config_is_rejected_for_a_script(write: Callable[..., str]) -> None:
    done = python(
        str(ROOT / "lib/run_module.py"),
        "training.cli.plan",
        LAUNCH,
        "2",
        "--save_config=x.py",
        "--script",
        write("main.py", ""),
    )
    assert done.returncode == 2 and "--save_config cannot be used with --script" in done.stderr


def test_a_dry_run_names_the_file_that_it_has_written(home: Path) -> None:
    module = [str(ROOT / "lib/run_module.py"), "training.cli.plan", ENHANCED]
    done = python(*module, QUICKSTART, "--device=cpu", "--dry_run", "--save_config=x.py", cwd=home)
    assert (home / "x.py").is_file() and "x.py" in done.stdout.splitlines()[0], done.stderr


def test_a_full_disk_leaves_no_half_of_a_config(home: Path) -> None:
    found = ask(QUICKSTART, "--save_config=mine.py")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(UserError) as caught:
            found.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [problem.code for problem in caught.value.problems] == ["output.unwritable"]
    assert not (home / "mine.py").exists()

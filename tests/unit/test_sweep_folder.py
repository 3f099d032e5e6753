"""The folder of a sweep: who creates it, what a later start finds in it, its page."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import ROOT, clean_environment
from tests.unit.own_task import LINE
from tests.unit.report_runs import ORIGINS, planned, read, trained
from tests.unit.test_sweep import TINY, codes, ended, prepared
from training.cli import report
from training.cli.sweep import __main__ as command
from training.cli.sweep import board, launchers, options, prepare, session
from training.cli.sweep.prepare import Sweep
from training.config import flags
from training.core import file_lock, find_run, rundir, sweep_dir
from training.core.contracts.run_files import SweepRecord
from training.core.errors import Exit, UserError
from training.core.project import LAUNCH_SCRIPT
from training.core.rundir import RunDir
from training.core.sweep_dir import SweepDir
from training.monitor import print_table
from training.monitor.report import options as report_options
from training.plan import request

NOTHING = options.SweepOptions()


def started(sweep: Sweep) -> session.Session:
    return session.Session(sweep, board.Board(sweep, ascii_only=True), fail_fast=False)


def resumed(tmp_path: Path, name: str) -> Sweep:
    """In a shell without variables of Duet."""
    return prepare.resume(options.SweepOptions(resume=name), {}, tmp_path)


def test_a_sweep_that_another_process_created_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    """Both chose the same name; the other one has ended."""
    first, second = prepared(tmp_path, "--depth=1,2"), prepared(tmp_path, "--depth=1,3")
    assert first.folder.name == second.folder.name
    first.folder.create(first.record)
    with pytest.raises(UserError) as raised:
        command._train(second, NOTHING)
    assert [problem.code for problem in raised.value.problems] == ["sweep.name_taken"]
    assert rundir.read_json(first.folder.record) == first.record


def test_two_processes_do_not_run_one_sweep(tmp_path: Path) -> None:
    sweep = prepared(tmp_path, "--depth=1,2")
    sweep.folder.path.mkdir(parents=True)
    with sweep.folder.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError) as raised:
            command._train(sweep, NOTHING)
    assert [problem.code for problem in raised.value.problems] == ["sweep.running"]
    assert not sweep.folder.exists()


def test_a_sweep_runs_where_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    sweep = prepared(tmp_path, "--depth=1,2")
    with command._alone(sweep):
        assert sweep.folder.exists()


def test_a_sweep_moves_to_another_machine(tmp_path: Path) -> None:
    """The disk is shared, or a container has got another host name."""
    sweep = prepared(tmp_path, "--depth=1,2")
    sweep.folder.create(sweep.record)
    record = {"pid": 1, "started": time.time(), "host": "another", "ranks": []}
    rundir.write_json(ended(sweep, 0, "stopped").supervisor, record)
    todo = started(resumed(tmp_path, sweep.folder.name))
    todo.begin()
    assert todo.states == ["waiting", "waiting"]


def test_a_folder_without_a_record_does_not_take_the_name(tmp_path: Path) -> None:
    """A process that was killed between the two has left it."""
    sweep = prepared(tmp_path, "--depth=1,2")
    sweep.folder.path.mkdir(parents=True)
    sweep.folder.lock.touch()
    assert prepared(tmp_path, "--depth=1,2").folder.name == sweep.folder.name


def test_a_start_killed_before_its_plan_is_repeated(tmp_path: Path) -> None:
    sweep = prepared(tmp_path, "--depth=1,2,3,4")
    sweep.folder.create(sweep.record)
    runs = [RunDir(tmp_path / run["name"]) for run in sweep.record["runs"]]
    runs[0].path.mkdir()
    runs[1].create()
    rundir.write_json(runs[1].preflight, {"checks": []})
    runs[2].create()
    (runs[2].checkpoints / "step_00000004").mkdir()  # its plan is damaged
    ended(sweep, 3, "stopped")
    todo = started(sweep)
    for run in runs:
        launchers.remove_remains(run)
    commands = [todo.command(run) for run in sweep.record["runs"]]
    assert [f"--run_name={runs[0].name}" in commands[0], runs[0].path.exists()] == [True, False]
    assert [f"--run_name={runs[1].name}" in commands[1], runs[1].path.exists()] == [True, False]
    assert f"--resume={runs[2].name}" in commands[2]
    assert f"--resume={runs[3].name}" in commands[3]


def test_names_of_any_config_are_names_of_runs(tmp_path: Path) -> None:
    for stem, base in (
        ("my config (2)", "my_config_2"),
        ("中文-a.b", "中文-a.b"),
        ("x" * 90, "x" * 60),
    ):
        config = tmp_path / f"{stem}.py"
        config.write_text("depth = 1\n")
        sweep = prepared(tmp_path / "runs", str(config), "--seed=1,2")
        assert sweep.folder.name == f"{base}_sweep"
        for run in sweep.record["runs"]:
            words = started(sweep).command(run)[2:]  # bash LAUNCH_SCRIPT
            assert request.read(LAUNCH_SCRIPT, words, {}).config.run_name == run["name"]


def test_variables_of_the_first_start_configure_all_runs(tmp_path: Path) -> None:
    argv = [*TINY, "--seed=1,2"]
    variables = {
        "DUET_OUT_DIR": str(tmp_path),
        "DUET_MATRIX_LR": "0.5",
        "DUET_SHOW_RANKS": "0",  # of each start
        "DUET_SEED": "7",  # the flag wins
    }
    sweep = prepare.prepare(options.parse(argv), argv, variables)
    assert sweep.folder.experiments == tmp_path
    sweep.folder.create(sweep.record)
    again = resumed(tmp_path, sweep.folder.name)
    for seed, run in enumerate(again.record["runs"], 1):
        words = started(again).command(run)
        assert {f"--out_dir={tmp_path}", "--matrix_lr=0.5", f"--seed={seed}"} <= set(words)
        assert not any("show_ranks" in word for word in words) and "--seed=7" not in words
    other = prepare.prepare(options.parse(argv), argv, variables | {"DUET_MATRIX_LR": "0.4"})
    assert not other.known and prepare.prepare(options.parse(argv), argv, variables).known


def test_a_moved_sweep_trains_all_its_runs_in_the_new_folder(tmp_path: Path) -> None:
    sweep = prepared(tmp_path / "old", "--depth=1,2")
    sweep.folder.create(sweep.record)
    ended(sweep, 0, "stopped")
    (tmp_path / "old").rename(tmp_path / "new")
    moved = prepare.resume(options.SweepOptions(resume=sweep.folder.name), {}, tmp_path / "new")
    for run in moved.record["runs"]:
        words = started(moved).command(run)
        assert [w for w in words if w.startswith("--out_dir")] == [f"--out_dir={tmp_path}/new"]


@each("installed, cwd, moved", [(True, "original", 1), (True, "copy", 0), (False, "original", 0)])
def test_a_copied_sweep_trains_in_its_own_folder(
    installed: bool, cwd: str, moved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of a launcher is experiments/ in the checkout, or where an installed one runs."""
    experiments = tmp_path / "copy/experiments"
    monkeypatch.setattr(session, "INSTALLED", installed)
    monkeypatch.setattr(session, "WORK", tmp_path / "copy")
    sweep = prepared(experiments, "--depth=1,2")
    sweep.record["cwd"] = str(tmp_path / cwd)
    run = sweep.record["runs"][0]
    run["args"] = flags.without(run["args"], "out_dir")
    words = started(sweep).command(run)
    assert words.count(f"--out_dir={experiments}") == moved


def test_a_changed_config_is_that_of_another_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "my.py"
    config.write_text("matrix_lr = 0.02\n")
    runs = tmp_path / "runs"
    first = prepared(runs, "my.py", "--depth=1,2,3")
    first.folder.create(first.record)
    assert prepared(runs, "my.py", "--depth=1,2,3").folder.name == first.folder.name
    config.write_text("matrix_lr = 0.03\n")
    other = prepared(runs, "my.py", "--depth=1,2,3")
    assert (other.known, other.folder.name) == (False, f"{first.folder.name}_2")

    ended(first, 0, "stopped")  # it has its configuration
    with pytest.raises(UserError) as raised:
        started(resumed(runs, first.folder.name)).begin()
    assert [problem.code for problem in raised.value.problems] == ["sweep.config_changed"]
    config.write_text("matrix_lr = 0.02\n")
    started(resumed(runs, first.folder.name)).begin()
    for run in first.record["runs"]:
        del run["config_sha256"]  # of an earlier version
    first.folder.create(first.record)
    config.write_text("matrix_lr = 0.03\n")
    started(resumed(runs, first.folder.name)).begin()
    assert prepared(runs, "my.py", "--depth=1,2,3").folder.name == first.folder.name


def test_a_sweep_continues_where_its_files_are_after_its_folder_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, runs = tmp_path / "old", tmp_path / "new", tmp_path / "runs"
    old.mkdir()
    monkeypatch.chdir(old)
    Path("line.py").write_text(LINE)
    Path("my.py").write_text("depth = 1\n")
    small = ["--device=cpu", "--tensorboard=false", f"--out_dir={runs}"]

    def of(*words: str) -> Sweep:
        return prepare.prepare(options.parse([*words, *small]), [*words, *small], {})

    line = ("--task=line.py", "--total_batch_size=128", "--slope=1,2")
    both = of("my.py", "--depth=1,2"), of(*line)
    for sweep in both:
        sweep.folder.create(sweep.record)
    monkeypatch.chdir(tmp_path)
    old.rename(new)
    for sweep in both:
        with pytest.raises(UserError) as raised:
            resumed(runs, sweep.folder.name)
        assert [problem.code for problem in raised.value.problems] == ["sweep.folder_lost"]
        assert str(old) in raised.value.problems[0].what
    monkeypatch.chdir(new)
    for sweep in both:
        assert resumed(runs, sweep.folder.name).record["cwd"] == str(new)
    Path("line.py").write_text(f"{LINE}\n")
    again = of(*line)
    assert (again.known, again.folder.name) == (False, f"{both[1].folder.name}_2")
    monkeypatch.chdir(tmp_path)
    for sweep in both:  # nothing is missing
        for index in range(2):
            ended(sweep, index, "stopped")
        assert resumed(runs, sweep.folder.name).record["cwd"] == str(tmp_path)


def test_the_folder_of_the_logs_is_kept_however_it_was_typed(tmp_path: Path) -> None:
    sweep = prepared(tmp_path, "--depth=1,2", "--log-dir", "my logs")
    sweep.folder.create(sweep.record)
    ended(sweep, 0, "stopped")
    assert "--log_dir=my logs" in started(sweep).command(sweep.record["runs"][0])


@each(
    "line, expected",
    [
        ("--run_name=x", ["sweep.refused_flag"]),
        ("--resume=x --nnodes=2", ["sweep.refused_flag"] * 2),
        ('{"run_name": "x"}', ["sweep.refused_flag"]),
        ('--seed="3', ["sweep.list", "field.value"]),
        ("config.py", ["config.missing", "field.value"]),
    ],
)
def test_lines_of_a_list_are_checked_like_the_command(
    line: str, expected: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "runs.txt"
    file.write_text(f"--seed=1\n{line}\n--seed=4\n")
    wrong = [] if "refused" in expected[0] else ["--depth=x"]
    assert sorted(codes(tmp_path, f"--list={file}", *wrong)) == sorted(expected)


def test_problems_of_the_command_and_of_its_runs_are_reported_together(tmp_path: Path) -> None:
    words = ["--depth=1,x,,1", "--jobs=two", "--name=a b"]
    found = codes(tmp_path, *words)
    assert found == ["flag.value", "sweep.name", "sweep.empty_value", "field.value"]


def test_an_occupied_gpu_is_found_before_anything_starts(
    nvidia: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """It would get each run that is left, as fast as they fail."""
    done = subprocess.run(
        [
            *(sys.executable, "lib/run_module.py", "training.cli.sweep", *TINY[:-2]),
            *("--device=cuda", "--seed=1,2,3", "--dry_run", f"--out_dir={tmp_path}"),
        ],
        cwd=ROOT,
        env=clean_environment() | nvidia(COUNT=2, FREE_GIB="31,0"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Exit.RESOURCES, done.stderr
    assert "GPU 1" in done.stderr and "(1 run: seed=2)" in done.stderr


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepDir:
    """A project folder with a sweep of three runs, of which two were trained."""
    monkeypatch.setattr(find_run, "WORK", tmp_path)
    experiments = tmp_path / "experiments"
    folder = SweepDir(experiments, "my sweep")
    runs = ["good", "better", "waiting"]
    record: SweepRecord = {
        "schema_version": sweep_dir.VERSION,
        "duet_version": "0",
        "created": 1.0,
        "command": [],
        "cwd": "/",
        "ranks": 1,
        "device": "cpu",
        "runs": [{"name": n, "args": [], "values": {"data": f"<b>{n}</b>"}} for n in runs],
    }
    folder.create(record)
    origins = ORIGINS | {"out_dir": "default", "log_dir": "default"}
    for name, best in (("good", 1.5), ("better", 0.5)):
        made = trained(planned(experiments / name, origins=origins), 30)
        made.run.event("eval", step=30, val_bpb=best)
        rundir.write_json(made.run.summary, {"status": "done", "steps": 30, "time": made.at + 9})
    return folder


def test_the_report_of_a_sweep_is_its_comparison(
    two_runs: SweepDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("my sweep", str(two_runs.path), f"{two_runs.path}/"):
        assert report_options.parse([word], tmp_path).out == two_runs.page
    elsewhere = tmp_path / "page.html"
    assert report.main([str(two_runs.path), f"--out={elsewhere}"]) == Exit.DONE
    assert capsys.readouterr().out == f"{elsewhere}\n"
    page = elsewhere.read_text()
    assert page.index("&lt;b&gt;better&lt;/b&gt;") < page.index("&lt;b&gt;good&lt;/b&gt;")
    assert "<b>better" not in page and "--resume=better" in read(page).text
    shown = command.main(["--show=my sweep", f"--out_dir={two_runs.experiments}"])
    assert shown == Exit.DONE
    assert read(two_runs.page.read_text()).all("section") == read(page).all("section")


def test_a_sweep_is_not_compared_with_runs(two_runs: SweepDir, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        report_options.parse(["good", "my sweep"], tmp_path)
    assert [problem.code for problem in raised.value.problems] == ["run.several"]
    two_runs.record.write_text("{")
    with pytest.raises(UserError) as raised:
        report_options.parse(["my sweep"], tmp_path)
    assert [problem.code for problem in raised.value.problems] == ["sweep.damaged"]
    # a run of the same name comes first
    planned(two_runs.experiments / "my sweep")
    assert report_options.parse(["my sweep"], tmp_path).sweep is None


def test_the_report_of_a_sweep_without_a_started_run(two_runs: SweepDir, tmp_path: Path) -> None:
    for name in ("good", "better"):
        (two_runs.experiments / name).rename(tmp_path / name)
    assert report.main([str(two_runs.path)]) == Exit.DONE
    assert two_runs.page.exists()


def test_a_table_is_cut_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [("a" * 60 + "…", "")]
    for columns, length in (("20", 20), ("", 61), ("0", 61), ("x", 61)):
        monkeypatch.setenv("COLUMNS", columns)
        print_table.print_lines([line], print_table.columns(), ascii_only=False)
        assert len(capsys.readouterr().out.rstrip("\n")) == length, columns

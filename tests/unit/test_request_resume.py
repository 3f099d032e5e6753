"""Runs by name: what `--resume` and `--run_name` find, refuse and offer instead."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import fields
from pathlib import Path

import pytest

from tests.unit.conftest import (
    ENHANCED,
    Shell,
    Write,
    ask,
    make_run,
    only,
    wrong,
)
from tests.unit.test_export import bpe_file
from training import tasks
from training.core.errors import NothingToDo, UserError
from training.core.messages import msg
from training.core.rundir import read_json, write_json
from training.plan import resume_checks
from training.tasks.video_restoration.options import NAME as VIDEO
from training.tasks.video_restoration.options import VideoOptions

# ── resume ────────────────────────────────────────────────────────────────────────────────────────


def test_a_resumed_run_keeps_its_configuration(home: Path, write: Write) -> None:
    make_run(home / "experiments", "r1", depth=3, seed=5, out_dir="somewhere else", resume="older")
    found = ask("--resume=r1", "--seed=6", write("c.py", "depth = 9\nretries = 7\n"))
    assert (found.config.depth, found.config.seed, found.config.retries) == (3, 6, 7)
    assert found.origins["depth"] == "from resumed run r1"
    assert (found.config.out_dir, found.config.resume) == ("experiments", "r1")
    assert found.notes == ["resumed run wins over c.py: depth stays 3"]
    assert found.reason("depth") == msg("plan.resume.origin", name="r1")
    assert found.reason("seed") == msg("host.decision.as_asked")
    assert found.resume_from is not None
    assert found.resume_from.path == home / "experiments/r1"


def test_the_note_names_only_values_that_stay(home: Path, write: Write) -> None:
    make_run(home / "experiments", "r1", depth=3, save_every=10, num_iterations=50)
    config = write("c.py", "depth = 9\nsave_every = 20\nnum_iterations = 100\n")
    found = ask("--resume=r1", config, "--num_iterations=70", env={"DUET_SAVE_EVERY": "77"})
    assert (found.config.save_every, found.config.num_iterations) == (77, 70)
    (note,) = found.notes
    assert "depth" in note and "save_every" not in note and "num_iterations" not in note
    assert "depth" not in ask("--resume=r1", config, "--depth=3").notes[0]
    found = ask("--resume=r1", config, "--tokens_per_param=3")
    assert found.config.num_iterations > 100 and "num_iterations" not in found.notes[0]


def test_relative_paths_are_those_of_the_first_start(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, now = tmp_path / "first", tmp_path / "now"
    for folder in (first, now):
        (folder / "texts").mkdir(parents=True)
        (folder / "texts" / "a.txt").write_text(f"some text of {folder.name}\n")
    bpe_file(first).rename(first / "own.json")
    run = make_run(home / "experiments", "r1", data="texts", tokenizer="own.json")
    plan = read_json(run.plan) or {}
    write_json(run.plan, plan | {"command": {"script": "", "args": [], "cwd": str(first)}})
    monkeypatch.chdir(first)
    same = ask("--resume=r1").config
    assert (same.data, same.tokenizer) == ("texts", "own.json")
    monkeypatch.chdir(now)
    found = ask("--resume=r1")
    assert (found.config.data, found.config.tokenizer) == (
        str(first / "texts"), str(first / "own.json")
    )  # fmt: skip
    assert found.origins["data"] == "from resumed run r1"
    assert ask("--resume=r1", "--data=texts").config.data == "texts"
    shutil.rmtree(first / "texts")
    assert ask("--resume=r1").config.data == "texts"  # moved along with the command


def test_a_finished_run_is_finished_in_every_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is that of its data, which has another path there."""
    first, now = tmp_path / "first", tmp_path / "now"
    for folder in (first, now):
        folder.mkdir()
        (folder / "a.txt").write_text(f"some text of {folder.name}\n")
    run = make_run(home / "experiments", "r1", data="a.txt", num_epochs=1)
    command = {"script": "", "args": [], "cwd": str(first)}
    write_json(run.plan, (read_json(run.plan) or {}) | {"command": command, "created": 1.0})
    write_json(run.summary, {"status": "done", "steps": 7, "time": time.time()})
    for folder in (first, now):
        monkeypatch.chdir(folder)
        for name in ("r1", "latest"):
            with pytest.raises(NothingToDo):
                ask(f"--resume={name}", f"--out_dir={home / 'experiments'}")
    assert ask("--resume=r1", "--data=a.txt").resume_from  # another one


def test_a_run_without_an_end_is_resumed(home: Path) -> None:
    """Earlier versions had no limit."""
    make_run(home / "experiments", "r1", num_iterations=10**45, num_epochs=10**10)
    config = ask("--resume=r1").config
    assert (config.num_iterations, config.num_epochs) == (10**9, 10**9)
    assert only(wrong("--resume=r1", "--num_iterations=1000000001")).field == "num_iterations"


def test_another_validation_or_place_of_the_clips_learns_the_same() -> None:
    kind, default = tasks.BUILT_IN[VIDEO], VideoOptions()
    names = [f.name for f in fields(VideoOptions)]
    assert kind.harmless <= set(names)
    sure = {
        name
        for name in names
        for old in [{name: (getattr(default, name), "x")}]
        if resume_checks.changes({name: "other"}, old, kind.harmless)
        == [msg("plan.resume.changed", shown=f"{name} {getattr(default, name)} → other")]
    }
    assert {n for n in names if n.startswith("test_") or "_testing" in n} < sure
    assert {"dataroot_gt", "num_frame_overlapping"} < sure
    assert not sure & {"gt_size", "num_frame", "interval_list", "G_optimizer_lr", "spike_h"}


def test_ways_to_name_the_run_to_resume(home: Path, tmp_path: Path) -> None:
    experiments = home / "experiments"
    make_run(experiments, "old", depth=3)
    make_run(experiments, "new run", depth=4)
    os.utime(experiments / "old/plan.json", (1000, 1000))
    make_run(tmp_path / "elsewhere", "x", depth=5)
    for text, depth in {
        "old": 3,
        "new run": 4,
        "latest": 4,
        str(experiments / "old"): 3,
        "experiments/old": 3,
        str(tmp_path / "elsewhere/x"): 5,
    }.items():
        assert ask(f"--resume={text}").config.depth == depth
    assert ask("--resume=latest", f"--out_dir={tmp_path}/elsewhere").config.depth == 5
    assert ask("--resume=", "--depth=6").resume_from is None


def test_a_folder_of_code_with_the_name_of_a_run(home: Path) -> None:
    run = make_run(home / "experiments", "vit", depth=3)
    (home / "vit").mkdir()
    found = ask("--resume=vit").resume_from
    assert found is not None and found.path == run.path
    make_run(home, "vit")
    found = ask("--resume=vit").resume_from
    assert found is not None and found.path == home / "vit"


def test_the_run_above_the_current_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(home / "experiments", "r1", depth=3)
    run.checkpoints.mkdir(exist_ok=True)
    monkeypatch.chdir(run.checkpoints)
    found = ask("--resume=..").resume_from
    assert found is not None and found.path == run.path


def test_nothing_to_resume(home: Path) -> None:
    problem = only(wrong("--resume=latest"))
    assert (
        problem.what
        == f"resume is 'latest' (from --resume on the command line), but there is no run in "
        f"{home}/experiments"
    )
    assert problem.allowed == "a run directory"


def test_an_unknown_run_to_resume(home: Path, shell: Shell) -> None:
    for n in range(5):
        make_run(home / "experiments", f"r{n}", depth=n + 1)
    problem = only(wrong("--resume=nosuch", "--seed=1"))
    assert problem.what.startswith(
        "resume is 'nosuch' (from --resume on the command line): no such run"
    )
    assert problem.fixes == [f"./{ENHANCED} --seed=1 --resume=r{n}" for n in (4, 3, 2)]
    make_run(home / "experiments", "r5 of a user")
    for fix in only(wrong("--resume=nosuch", "--seed=1")).fixes:
        assert shell.read(fix).resume_from is not None
    inside = only(wrong(f"--resume={home}/experiments/r3/checkpoints/step_00000400")).fixes
    assert inside == [f"./{ENHANCED} --resume=r3"]
    assert only(wrong("--resume=yes")).fixes == [f"./{ENHANCED} --resume=latest"]
    assert (
        "(from DUET_RESUME in the environment)" in only(wrong(env={"DUET_RESUME": "nosuch"})).what
    )


@pytest.mark.parametrize(
    "content", ["", "{}", '{"a": 1}', '{"config": [1]}', '{"config": null}', '{"config": {']
)
def test_a_run_with_a_damaged_plan_cannot_be_resumed(content: str, home: Path) -> None:
    make_run(home / "experiments", "r2")
    run = make_run(home / "experiments", "r1")
    run.plan.write_text(content)
    problem = only(wrong("--resume=r1"))
    assert problem.what.startswith("resume is 'r1' (from --resume on the command line)")
    assert (problem.code, problem.fixes) == ("run.damaged", [])
    assert str(run.plan) in problem.what


def test_a_value_of_the_resumed_run_that_is_no_longer_valid(home: Path) -> None:
    make_run(home / "experiments", "r1", depth="twelve", gone=1)
    assert only(wrong("--resume=r1")).what == "depth is 'twelve' (from resumed run r1), a str"


@pytest.mark.parametrize(("text", "code"), [(None, "task.unreadable"), ("x = (", "task.syntax")])
def test_without_the_task_of_a_run_nothing_else_of_it_is_wrong(
    text: str | None, code: str, home: Path
) -> None:
    """The rules of the default task are not those of the run's own."""
    file = home / "sp.py"
    own = {"total_batch_size": 8, "device_batch_size": 8, "precision": "fp8"}
    run = make_run(home / "experiments", "r1", task=str(file), data="mine", **own)
    task = {"name": "sp", "unit": "samples", "file": str(file), "options": {"width": 3}}
    write_json(run.plan, {"config": (read_json(run.plan) or {})["config"], "task": task})
    if text is not None:
        file.write_text(text)
    assert [p.code for p in wrong("--resume=r1")] == [code]
    found = {p.code for p in wrong("--resume=r1", "--keep_best", "--eval_every=0")}
    assert found == {code, "flag.contradiction"}


# ── run_name
# ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["a", "run.1_B-2", "训练", "x" * 128])
def test_good_run_names(name: str, home: Path) -> None:
    assert ask(f"--run_name={name}").config.run_name == name


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "a/b",
        "../a",
        ".",
        "..",
        ".hidden",
        "-x",
        "a\nb",
        "a;b",
        "$(x)",
        "a'b",
        "a\\b",
        "x" * 129,
        "训" * 128,
    ],
)
def test_bad_run_names(name: str, home: Path) -> None:
    problem = only(wrong(f"--run_name={name}"))
    assert problem.what.startswith(f"run_name is {name!r} (from --run_name on the command line)")
    assert problem.allowed == "letters, digits, dot, dash and underscore, at most 128"


def test_a_run_name_that_is_taken(home: Path, shell: Shell) -> None:
    make_run(home / "experiments", "mine")
    problem = only(wrong("--run_name=mine"))
    assert f"{home}/experiments/mine already exists" in problem.what
    found = [shell.read(fix) for fix in problem.fixes]
    assert [(f.resume_from and f.resume_from.name, f.config.run_name) for f in found] == [
        ("mine", "mine"),
        (None, "mine_2"),
    ]
    # Resuming it under its own name is not a conflict.
    assert ask("--resume=mine", "--run_name=mine").resume_from is not None


def test_the_names_offered_instead_of_a_taken_one_are_free(home: Path, shell: Shell) -> None:
    make_run(home / "experiments", "mine")
    make_run(home / "experiments", "mine_2")
    (home / "experiments/folder/of_mine").mkdir(parents=True)
    make_run(home / "experiments", "y" * 127)
    for name in ("mine", "folder", "y" * 127):
        for fix in only(wrong(f"--run_name={name}")).fixes:
            shell.read(fix)


# ── names no file system takes
# ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("flag", ["data", "config", "resume"])
@pytest.mark.parametrize(
    "path",
    ["x" * 300, "x/" * 3000, "~nosuchuser/x", "a\nb", "caf\udce9"],
    ids=["name", "path", "user", "line", "bytes"],
)
def test_an_impossible_path(flag: str, path: str, home: Path) -> None:
    problem = only(wrong(f"--{flag}={path}.py" if flag == "config" else f"--{flag}={path}"))
    assert problem.what.startswith((f"{flag} is ", f"{flag} "))


@pytest.mark.parametrize("flag", ["out_dir", "log_dir"])
def test_an_unknown_users_home_folder(flag: str, home: Path) -> None:
    try:
        found = ask(f"--{flag}=~nosuchuser/x")
    except UserError as error:
        assert flag in only(error.problems).what
    else:  # as in bash: it is a folder of that name
        assert "~nosuchuser" in str(found.experiments if flag == "out_dir" else found.logs)


def test_latest_leaves_a_run_whose_job_has_not_started(home: Path) -> None:
    make_run(home / "experiments", "begun", depth=3)
    waits = {"config": {"depth": 4}, "submission": "code"}
    write_json(make_run(home / "experiments", "waits", depth=4).plan, waits)
    assert ask("--resume=latest").config.depth == 3
    assert ask("--resume=waits").config.depth == 4
    shutil.rmtree(home / "experiments/begun")
    problem = only(wrong("--resume=latest"))
    assert "waits" in problem.what and "--resume=waits" in problem.fixes[0]

"""The run selected by --resume, and whether it is running."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import (
    ENHANCED,
    LAUNCH,
    ROOT,
    SIMPLE,
    TRAIN,
    Shell,
    ask,
    only,
    python,
    wrong,
)
from tests.unit.monitor_runs import Made, old
from training.core import manifest, owner, rundir, standing
from training.core.errors import NothingToDo, UserError
from training.core.rundir import RunDir
from training.plan import finished, resume_run, running
from training.watchdog.probes import procfs

Write = Callable[..., str]


def run_of(
    home: Path,
    name: str,
    config: str | None = None,
    *,
    steps: int = 0,
    status: str = "",
    age_s: float = 0.0,
    used_s: float = 0.0,
    **values: Any,
) -> RunDir:
    """A run of a config, planned `age_s` seconds ago, with this end."""
    run = RunDir(home / "experiments" / name)
    run.create()
    created = time.time() - 1000 - age_s
    command = {"script": SIMPLE, "args": [], "cwd": str(home)}
    plan = {
        "created": created,
        "config_file": config,
        "command": command,
        "config": {"device": "cpu", "num_iterations": 400} | values,
    }
    rundir.write_json(
        run.plan, plan | {"ranks": 2, "origins": {"out_dir": "default", "log_dir": "default"}}
    )
    os.utime(run.plan, (created, created))
    if steps:
        folder = run.checkpoints / manifest.folder_name(steps)
        folder.mkdir()
        facts = {
            "step": steps,
            "epoch": 0,
            "used": 0,
            "shape": {"depth": 12, "vocab": 320, "max_seq_len": 1536, "key_offset": True},
            "optimizer": "muon",
            "world_size": 2,
            "bytes": 0,
            "sha256": "",
        }
        manifest.write(folder, facts | {"data": {}, "tokenizer": "bytes", "used_s": used_s})
        rundir.append_json(run.metrics, {"time": created + 10, "step": steps, "loss": 2.0})
    if status:
        rundir.write_json(
            run.summary, {"status": status, "steps": steps, "time": created + 20, "exit_code": 0}
        )
    return run


def answer(*args: str, script: str = SIMPLE) -> list[str]:
    """Output lines of a request that needs no launch."""
    with pytest.raises(NothingToDo) as caught:
        ask(*args, script=script)
    return str(caught.value).splitlines()


def pasted(line: str) -> str:
    return line.strip().removeprefix("to train longer: ")


@pytest.fixture
def configs(write: Write) -> tuple[str, str]:
    return write("my configs/quick.py", "num_iterations = 400\n"), write(
        "other.py", "num_iterations = 50\n"
    )


# A finished run.


def test_a_finished_run_shows_the_command_to_train_longer(home: Path, shell: Shell) -> None:
    run = run_of(home, "demo run", steps=400, status="done")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    first, more = answer("--resume=demo run", "--seed=3")
    assert "run demo run is finished: step 400 of 400" in first
    assert shell.read(pasted(more)).config.num_iterations == 800, "the pasted command continues it"
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert answer("--resume=demo run", "--num_iterations=300")[0] == first


def test_that_command_is_the_one_of_the_current_folder(home: Path, tmp_path: Path) -> None:
    run_of(home, "demo", steps=400, status="done")
    words = [LAUNCH, "2", "--resume=demo", f"--out_dir={home}/experiments"]
    ended = python(
        "-m", "training.cli.plan", *words, cwd=tmp_path, DUET_STARTED_AS=str(ROOT / LAUNCH)
    )
    assert ended.returncode == 0
    assert (
        f" {shlex.quote(f'{ROOT}/{LAUNCH}')} 2 " in ended.stderr
        and f" ./{LAUNCH}" not in ended.stderr
    )


def test_in_a_job_that_command_submits_another_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(home, "demo", steps=400, status="done")
    rundir.write_json(run.path / "code.json", {"name": "demo", "typed": ["--nodes=2"]})
    monkeypatch.setattr(resume_run, "ROOT", run.path / "code")
    more = answer("--resume=demo")[1]
    assert pasted(more) == "./submit_job.sh --nodes=2 --resume=demo --num_iterations=800"


def test_an_impossible_change_of_a_finished_run_is_an_error(home: Path) -> None:
    run_of(home, "demo", steps=400, status="done")
    for more in ([], ["--num_iterations=800"]):  # the advice to train longer
        assert only(wrong("--resume=demo", "--depth=4", *more)).code == "resume.other_model"


@pytest.mark.parametrize(
    ("status", "asked", "config"),
    [
        ("done", "--num_iterations=401", {}),
        ("stopped", "", {}),
        ("", "", {}),  # killed
        ("done", "--num_epochs=2", {"num_iterations": 0, "num_epochs": 1}),
    ],
)
def test_a_run_with_steps_left_continues(
    status: str, asked: str, config: dict[str, int], home: Path
) -> None:
    run = run_of(home, "demo", steps=400, status=status, **config)
    run.event("start", step=0, steps_per_epoch=400)
    found = ask("--resume=demo", *filter(None, [asked]), script=SIMPLE)
    assert found.resume_from is not None


def test_a_run_that_ends_by_epochs_is_finished(home: Path) -> None:
    run_of(home, "demo", steps=37, status="done", num_iterations=0, num_epochs=2)
    assert "--num_epochs=4" in answer("--resume=demo")[1]
    run_of(home, "one", steps=37, status="done", num_iterations=0)
    assert "--num_iterations=74" in answer("--resume=one")[1], "without a limit one epoch"


def test_a_run_that_has_used_the_time_is_finished(home: Path) -> None:
    limits = {"num_iterations": 0, "max_time": 100.0}
    run_of(home, "demo", steps=37, status="done", used_s=99.0, **limits)
    assert "--max_time=200" in answer("--resume=demo")[1]
    assert "--max_time=198" in answer("--resume=demo", "--max_time=50")[1]
    assert ask("--resume=demo", "--max_time=150", script=SIMPLE).resume_from is not None


def test_a_run_that_ends_by_tokens_is_prolonged_by_them(home: Path, shell: Shell) -> None:
    length = ("--tokens_per_param=0.3", "--depth=12")
    steps = ask(*length).config.num_iterations
    limits = {"num_iterations": steps, "tokens_per_param": 0.3}
    run_of(home, "demo", steps=steps, status="done", **limits)
    for typed in ((), length):
        more = answer("--resume=demo", *typed)[1]
        assert "--tokens_per_param=0.6" in more and "num_iterations" not in more
        found = shell.read(pasted(more)).config.num_iterations
        assert found == pytest.approx(2 * steps, abs=1)
    assert finished.longer(limits, 2 * steps) == {"tokens_per_param": 1.2}
    assert "--tokens_per_param=0.6" in answer("--resume=demo", "--tokens_per_param=0.1")[1]


def test_every_start_script_answers_and_check_still_checks_the_machine(home: Path) -> None:
    run_of(home, "demo", steps=400, status="done")
    assert answer("--resume=demo", script=TRAIN)[1].startswith(
        "    to train longer: python train.py "
    )
    assert answer("2", "--resume=demo", script=LAUNCH)[1].startswith(
        "    to train longer: ./launch_train.sh 2 "
    )
    assert answer("--resume=demo", script=ENHANCED) and ask("--resume=demo", "--check").check


# latest


def test_latest_is_the_newest_unfinished_run_of_that_config(
    home: Path, configs: tuple[str, str]
) -> None:
    quick, other = configs
    run_of(home, "newest", other, steps=20, status="stopped")
    run_of(home, "done", quick, steps=400, status="done", age_s=10)
    run_of(home, "wanted", quick, steps=100, status="stopped", age_s=20)
    run_of(home, "older", quick, steps=50, status="stopped", age_s=30)

    def chosen(*args: str) -> str:
        found = ask(*args, "--resume=latest", script=SIMPLE).resume_from
        return found.name if found else ""

    assert chosen(quick) == "wanted" and chosen(str(home / quick)) == "wanted"
    assert chosen(other) == "newest" and chosen() == "newest"
    assert chosen(quick, "--num_iterations=800") == "done", (
        "with the requested number of steps it is not finished"
    )


def test_a_resumed_run_still_belongs_to_its_config(home: Path, configs: tuple[str, str]) -> None:
    run_of(home, "demo", configs[0], steps=100, status="stopped")
    assert ask("--resume=demo", script=SIMPLE).config_name() == str(home / configs[0])


def test_finished_runs_of_a_config_are_listed_without_an_error(
    home: Path, configs: tuple[str, str], shell: Shell
) -> None:
    quick, other = configs
    run_of(home, "a", quick, steps=400, status="done", age_s=5)
    run_of(home, "b", quick, steps=400, status="done")
    run_of(home, "c", other, steps=20, status="stopped")
    first, *rows = answer(quick, "--resume=latest")
    assert "is finished" in first and [
        "--resume=b" in rows[0],
        "--resume=a" in rows[1],
        len(rows),
    ] == [True, True, 2]
    assert all("quick.py, finished: step 400 of 400, 20" in row for row in rows)
    found = [shell.read(pasted(row)) for row in rows]
    assert [(f.resume_from and f.resume_from.name, f.config.num_iterations) for f in found] == [
        ("b", 800),
        ("a", 800),
    ]


def test_without_a_run_of_the_config_other_runs_are_listed(
    home: Path, configs: tuple[str, str], shell: Shell
) -> None:
    quick, other = configs
    run_of(home, "stopped one", other, steps=20, status="stopped")
    run_of(home, "done", None, steps=400, status="done", age_s=5)
    problem = only(wrong(quick, "--resume=latest", script=SIMPLE))
    assert f"there is no run of {quick} in {home}/experiments" in problem.what
    assert (
        "# other.py, stopped: step 20 of 400, 20" in problem.fixes[0]
        and "finished: step 400 of 400" in problem.fixes[1]
    )
    found = [shell.read(fix) for fix in problem.fixes]
    assert [(f.resume_from and f.resume_from.name, f.config.num_iterations) for f in found] == [
        ("stopped one", 400),
        ("done", 800),
    ]


def test_latest_leaves_the_runs_of_other_users_alone(
    home: Path, configs: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, other = configs
    mine = run_of(home, "mine", quick, steps=50, status="stopped", age_s=30)
    later = run_of(home, "later", quick, steps=99, status="stopped")
    rundir.write_json(later.plan, (rundir.read_json(later.plan) or {}) | {"schema_version": 99})
    run_of(home, "of alice", quick, steps=100, status="stopped")
    alices = ("of alice", "later")
    monkeypatch.setattr(owner, "other", lambda path: "alice" if path.name in alices else "")
    for config in ([], [quick]):
        found = ask(*config, "--resume=latest", script=SIMPLE).resume_from
        assert found and found.name == "mine"
    found = ask("--resume=of alice", script=SIMPLE).resume_from
    assert found and found.name == "of alice", "by its name"
    assert "alice" not in only(wrong(other, "--resume=latest", script=SIMPLE)).what
    run_of(home, "mine", quick, steps=400, status="done")
    assert "alice" in answer(quick, "--resume=latest")[-1]
    shutil.rmtree(mine.path)
    problem = only(wrong(quick, "--resume=latest", script=SIMPLE))
    assert problem.code == "resume.nothing_unfinished" and "alice" in problem.what
    assert ["--resume='of alice'" in fix for fix in problem.fixes] == [True]


def test_runs_of_another_task_are_compared_by_their_own_fields(home: Path, line: str) -> None:
    run_of(
        home,
        "own",
        steps=9,
        status="done",
        task=str(home / line),
        num_iterations=0,
        num_epochs=1,
        total_batch_size=8,
    )
    plan = rundir.read_json(home / "experiments/own/plan.json") or {}
    rundir.write_json(
        home / "experiments/own/plan.json",
        plan | {"task": {"name": "my line", "file": str(home / line), "options": {}}},
    )
    old(home / "experiments/own/plan.json", 500)
    run_of(home, "gpt", steps=100, status="stopped", age_s=900)
    found = ask("--resume=latest", script=SIMPLE)
    assert found.resume_from is not None and (found.resume_from.name, found.kind.name) == (
        "gpt",
        "gpt",
    )


def test_a_run_of_a_later_version_is_refused_by_name_and_by_latest(
    home: Path, configs: tuple[str, str]
) -> None:
    later = run_of(home, "later", configs[0], steps=100, status="stopped")
    run_of(home, "older", configs[0], steps=50, status="stopped", age_s=30)
    planned = later.plan.stat().st_mtime
    rundir.write_json(
        later.plan,
        (rundir.read_json(later.plan) or {}) | {"schema_version": 99, "duet_version": "9.1"},
    )
    os.utime(later.plan, (planned, planned))
    for wanted in ("later", "latest"):
        with pytest.raises(UserError) as caught:
            ask(f"--resume={wanted}", script=SIMPLE)
        assert f"{later.plan} was written by Duet 9.1" in caught.value.problems[0].what
    found = ask("--resume=older", script=SIMPLE).resume_from
    assert found and found.name == "older"
    run_of(home, "newest", configs[0], steps=20, status="stopped", age_s=-10)
    found = ask("--resume=latest", script=SIMPLE).resume_from
    assert found and found.name == "newest", "an older run of another version is ignored"
    assert "no such run" in only(wrong("--resume=oldr", script=SIMPLE)).what, (
        "other errors are not hidden by it"
    )


def test_a_process_is_identified_by_the_ticks_of_its_start() -> None:
    own = {"pid": os.getpid(), "host": os.uname().nodename, "started": 0.0}
    ticks = procfs.began(os.getpid())
    assert standing.lives({**own, "ticks": ticks}), "whatever the clock shows"  # type: ignore[typeddict-item]
    assert not standing.lives({**own, "started": time.time(), "ticks": ticks + 1})  # type: ignore[typeddict-item]
    assert not standing.lives(own), "of an earlier version, by the time"  # type: ignore[arg-type]


def test_the_pid_of_a_killed_supervisor_may_be_that_of_this_launch(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that is started again, with the run directory in the command."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", str(made.run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as script:
        own: dict[str, Any] = {**standing.identity(script.pid)}
        found = []
        for facts in (own, own | {"ticks": own["ticks"] - 1}, {**own, "ticks": None}):
            rundir.write_json(made.run.supervisor, {k: v for k, v in facts.items() if v})
            found.append(running.pid_of(made.run))
        assert found == [script.pid, None, script.pid]
        monkeypatch.setattr(running.os, "getppid", lambda: script.pid)
        assert running.pid_of(made.run) is None
        script.communicate()

"""What a plan leaves behind."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.unit.conftest import ENHANCED
from tests.unit.test_plan import Write, lacking, make
from training.config.schema import FIELDS
from training.core import log as console
from training.core import owner, standing
from training.core.errors import UserError
from training.core.messages import msg
from training.core.rundir import RunDir, read_json, write_json
from training.launcher import rendezvous
from training.plan import training_plan as planner
from training.plan import writer
from training.plan.preflight import startup_checks


@pytest.fixture
def folders(home: Path, tmp_path: Path) -> list[str]:
    """Flags that keep a run out of the project."""
    return [f"--out_dir={tmp_path}/runs", f"--log_dir={tmp_path}/logs"]


# ── what is written
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def written(*args: str, script: str = ENHANCED) -> Path:
    asked, plan, checks = make("--device=cpu", "--depth=1", *args, script=script)
    return writer.write(plan, checks, asked, rendezvous.ask, os.getpid()).path


def nul(path: Path) -> list[str]:
    text = path.read_bytes().decode()
    assert text.endswith("\0")
    return text.split("\0")[:-1]


def test_the_run_directory_of_a_plan(folders: list[str], write: Write, tmp_path: Path) -> None:
    run = written(write("my config.py", "seed = 3\n"), *folders)
    assert run.parent == tmp_path / "runs"
    assert run.name.startswith("my config_20")
    assert sorted(p.name for p in run.iterdir()) == sorted(
        [
            "plan.json",
            "preflight.json",
            "launch.argv",
            "launch.env",
            "heartbeat",
            "ranks",
            "checkpoints",
        ]
    )
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["run_name"], plan["run_dir"], plan["config"]["seed"]) == (run.name, str(run), 3)
    assert Path(plan["log_file"]).parent == tmp_path / "logs"
    assert Path(plan["log_file"]).name.startswith("train_dual_gpu_enhanced_20")
    assert Path(plan["log_file"]).read_text() == ""
    assert {c["name"] for c in json.loads((run / "preflight.json").read_text())["checks"]} >= {
        "host memory",
        "run folder",
    }


def test_the_command_survives_any_character(home: Path, tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s a\n"run" $HOME `id`'
    run = written(f"--out_dir={odd}", f"--log_dir={tmp_path}/logs", "--run_name=x")
    assert run == odd / "x"
    program, *_, module, argument = nul(run / "launch.argv")
    assert (program, module, argument) == (sys.executable, "training.cli.supervise", str(run))
    variables = dict(v.split("=", 1) for v in nul(run / "launch.env"))
    assert variables["DUET_RUN_DIR"] == str(run)
    assert variables["DUET_LOG_FILE"] == json.loads((run / "plan.json").read_text())["log_file"]
    assert variables["OMP_NUM_THREADS"] and variables["PYTHONHASHSEED"] == "0"


def test_only_variables_that_we_set_are_exported(home: Path, tmp_path: Path) -> None:
    asked, plan, checks = planner.make(
        ENHANCED,
        ["--device=cpu", "--depth=1", f"--out_dir={tmp_path}/runs", f"--log_dir={tmp_path}/logs"],
        {"OMP_NUM_THREADS": "3"},
    )
    run = writer.write(plan, checks, asked, rendezvous.ask, os.getpid()).path
    assert not [v for v in nul(run / "launch.env") if v.startswith("OMP_NUM_THREADS")]
    assert {
        "name": "OMP_NUM_THREADS",
        "value": "3",
        "why": "your value is kept",
        "origin": "kept",
    } in plan["variables"]


def test_two_runs_within_a_second_do_not_share_anything(
    folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.time, "strftime", lambda form: "20261121_040000")
    runs = [written(*folders) for _ in range(3)]
    assert [r.name for r in runs] == [
        "run_20261121_040000",
        "run_20261121_040000_2",
        "run_20261121_040000_3",
    ]
    logs = [json.loads((r / "plan.json").read_text())["log_file"] for r in runs]
    assert len(set(logs)) == 3


def test_a_resumed_run_stays_where_it_is(folders: list[str], tmp_path: Path) -> None:
    run = written(*folders, "--run_name=mine", "--seed=5")
    again = written(*folders, "--resume=mine")
    assert again == run
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["resume"], plan["config"]["seed"], plan["origins"]["seed"]) == (
        True,
        5,
        "from resumed run mine",
    )
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["mine"]


def test_a_run_that_is_still_running_is_not_resumed(
    folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = [f"--out_dir={tmp_path}/my runs", folders[1]]
    run = RunDir(written(*place, "--run_name=mine"))
    asked = ["--device=cpu", *place, "--resume=mine"]
    other = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        subprocess.Popen([*other, str(run.path)], stdin=subprocess.PIPE) as supervisor,
        subprocess.Popen(other, stdin=subprocess.PIPE) as stranger,
    ):
        facts = {"pid": supervisor.pid, "host": socket.gethostname()}
        write_json(run.supervisor, facts)
        (problem,) = lacking(*asked, script=ENHANCED)
        assert problem.what == f"mine is still running (pid {supervisor.pid})"
        assert shlex.split(problem.fixes[0]) == ["./monitor_training.sh", f"--run={run.path}"]
        assert problem.fixes[1] == f"kill {supervisor.pid}"
        plan = read_json(run.plan) or {}
        write_json(run.path / "code.json", {"job": "8"})
        write_json(run.plan, plan | {"submission": "code"})
        assert lacking(*asked, script=ENHANCED)[0].fixes[1] == "scancel 8"
        write_json(run.plan, plan)
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", Mock(side_effect=PermissionError))
            user = owner.name(Path(f"/proc/{supervisor.pid}"))
            fixes = [problem.fixes[0], msg("plan.run.ask", user=user)]
            assert lacking(*asked, script=ENHANCED)[0].fixes == fixes
        with pytest.raises(UserError) as refused:
            make("--device=cpu", *place, "--run_name=mine", script=ENHANCED)
        (taken,) = refused.value.problems
        assert (taken.code, taken.fixes[:2]) == ("run_name.taken", problem.fixes)
        assert "--run_name=mine_2" in taken.fixes[2] and len(taken.fixes) == 3
        (tmp_path / "link").symlink_to(run.path.parent)
        for other_name in (f"{tmp_path}/link/mine", f"{tmp_path}/my runs/../my runs/mine"):
            again = lacking("--device=cpu", *place, f"--resume={other_name}", script=ENHANCED)
            assert [one.code for one in again] == [problem.code]
        for harmless in ({"pid": stranger.pid}, {"host": "another"}):
            write_json(run.supervisor, facts | harmless)
            make(*asked, script=ENHANCED)
        stranger.communicate()
        supervisor.communicate()
    write_json(run.supervisor, facts)
    make(*asked, script=ENHANCED)


@pytest.mark.parametrize(
    "there",
    [{"host": "b"}, {"host": socket.gethostname(), "pid_namespace": "pid:[1]"}],
    ids=["machine", "container"],
)
@pytest.mark.parametrize("supervised", [True, False], ids=["supervised", "torchrun"])
def test_a_run_that_is_running_on_another_machine_is_not_resumed(
    there: dict[str, str], supervised: bool, folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what it writes on the common disk is seen from here."""
    run = RunDir(written(*folders, "--run_name=mine"))
    asked = ["--device=cpu", *folders, "--resume=mine"]
    known = {"pid": os.getpid(), **there}
    if supervised:
        write_json(run.supervisor, {**known, "started": time.time()})
    else:  # beside what an earlier start on this machine has left
        write_json(run.supervisor, {"pid": 1, "host": socket.gethostname(), "started": 0.0})
        write_json(run.plan, {**(read_json(run.plan) or {}), "starter": known})
    silence(run)
    make(*asked, script=ENHANCED)
    now = time.time()
    clock = SimpleNamespace(time=lambda: now, monotonic=lambda: now)
    monkeypatch.setattr(startup_checks, "time", clock)

    def waits(seconds: float) -> None:
        nonlocal now
        now += seconds

    def writes(seconds: float) -> None:
        waits(seconds)
        os.utime(run.metrics, (now, now))

    run.metrics.touch()
    os.utime(run.metrics, (now, now))
    clock.sleep = writes
    (problem,) = lacking(*asked, script=ENHANCED)
    assert problem.what == f"mine is still running on {standing.other_host({}, there)}"
    clock.sleep, begin = waits, now
    make(*asked, script=ENHANCED)
    assert now - begin == pytest.approx(startup_checks.WRITTEN_S, abs=1), "it has been killed"
    os.utime(run.metrics, (now, now))
    clock.sleep = lambda _: pytest.fail("not for a dry run, nor for a run that has ended")
    checks = make(*asked, "--dry_run", script=ENHANCED)[2]
    assert [c.status for c in checks if c.name == "run"][-1] == "warning"
    for end in (run.summary, run.failure):
        write_json(end, {"status": "stopped"})
        make(*asked, script=ENHANCED)
        end.unlink()


def silence(run: RunDir) -> None:
    past = time.time() - 2 * startup_checks.WRITTEN_S
    for file in (run.plan, run.supervisor, run.metrics):
        if file.exists():
            os.utime(file, (past, past))


def started_by(host: str, run: RunDir, **facts: str) -> None:
    starter = {"pid": os.getpid(), "host": host}
    write_json(run.plan, {**(read_json(run.plan) or {}), "starter": starter, **facts})


@pytest.mark.parametrize("written_first", ["plan", "supervisor", "heartbeat", "rank_log"])
def test_a_run_that_has_just_been_resumed_on_another_machine_is_not_resumed(
    written_first: str, folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first step it has written neither metrics nor events."""
    run = RunDir(written(*folders, "--run_name=mine"))
    write_json(run.summary, {"status": "stopped", "launch": "the start before"})
    started_by("b", run)
    silence(run)
    file = {
        "plan": run.plan,
        "supervisor": run.supervisor,
        "heartbeat": run.heartbeat(0),
        "rank_log": run.rank_log(0),
    }[written_first]
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=lambda _: file.touch())
    monkeypatch.setattr(startup_checks, "time", clock)
    file.touch()
    (problem,) = lacking("--device=cpu", *folders, "--resume=mine", script=ENHANCED)
    assert problem.what == "mine is still running on b"


def test_a_run_that_another_machine_resumes_meanwhile_is_not_resumed(folders: list[str]) -> None:
    """Its plan is written after this start has looked, and before this one writes its own."""
    run = RunDir(written(*folders, "--run_name=mine"))
    write_json(run.failure, {"launch": (read_json(run.plan) or {})["launch"]})
    asked, plan, checks = make("--device=cpu", *folders, "--resume=mine", script=ENHANCED)
    started_by("b", run, launch="of b")
    before = run.plan.read_bytes()
    with pytest.raises(UserError, match="mine is still running on b"):
        writer.write(plan, checks, asked, rendezvous.ask, os.getpid())
    assert run.plan.read_bytes() == before
    write_json(run.failure, {"launch": "of b"})  # it has ended since
    writer.write(plan, checks, asked, rendezvous.ask, os.getpid())
    assert (read_json(run.plan) or {})["launch"] == plan["launch"]


def test_a_clock_ahead_of_that_of_the_common_disk(
    folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(written(*folders, "--run_name=mine"))
    started_by("b", run)
    run.metrics.touch()

    def writes(seconds: float) -> None:
        os.utime(run.metrics)

    ahead = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic, sleep=writes)
    monkeypatch.setattr(startup_checks, "time", ahead)
    (problem,) = lacking("--device=cpu", *folders, "--resume=mine", script=ENHANCED)
    assert problem.what == "mine is still running on b"
    silence(run)
    make("--device=cpu", *folders, "--resume=mine", script=ENHANCED)


def test_the_whole_plan_for_people(home: Path) -> None:
    _, plan, checks = make(
        "--device=cpu",
        "--depth=1",
        "--max-seq-len=1536",
        "--dry_run",
        script=ENHANCED,
        env={"WANDB_MODE": "offline"},
    )
    text = planner.describe(plan, checks)
    lines = text.splitlines()
    assert lines[0] == "Plan (dry run: nothing was launched or written)"
    checked = planner.describe(plan, checks, checked=True).splitlines()
    assert "written" not in checked[0] and checked[1:] == lines[1:]  # the test's result is written
    start = lines.index("Configuration") + 1
    shown = {x.split()[0]: x for x in lines[start : lines.index("", start)]}
    assert list(shown) == list(FIELDS)
    assert shown["depth"].split(maxsplit=2) == ["depth", "1", "--depth on the command line"]
    assert shown["max_seq_len"].endswith("--max-seq-len on the command line")
    assert shown["wandb_mode"].endswith("WANDB_MODE in the environment")
    assert shown["seed"].endswith("default")
    for v in plan["variables"]:
        assert [
            x
            for x in lines
            if x.startswith(f"  {v['name']}={v['value']}   {v['origin']}: {v['why']}")
        ]
    assert not any(home.iterdir())


def test_the_console_shows_the_main_lines_of_a_plan_and_the_log_file_all(
    folders: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = written(*folders)
    plan = json.loads((run / "plan.json").read_text())
    monkeypatch.setattr(console, "_log", None)
    console.open_log(tmp_path / "run.log")
    planner.announce(plan)
    first, second, third, *notes = capsys.readouterr().err.splitlines()
    assert first.endswith(f" run directory: {run}")
    assert " device cpu: " in second and " recovery: " in third
    assert len(notes) == len(plan["notes"])
    whole = (tmp_path / "run.log").read_text()
    assert all(sentence in whole for sentence in plan["text"])
    assert "set OMP_NUM_THREADS=" in whole
    for part, values in (("config", {"debug": True}), ("place", {"kind": "rank"})):
        planner.announce(plan | {part: plan[part] | values})
        err = capsys.readouterr().err
        assert all(sentence in err for sentence in plan["text"])
        assert "set OMP_NUM_THREADS=" in err

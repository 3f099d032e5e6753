"""Command line of the monitor, and its plain output."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.diagnosed import names
from tests.unit.monitor_runs import COMMAND, PATIENCE_S, ROOT, Made, dead_pid, old, program
from training.cli import monitor
from training.core import project
from training.core.errors import UserError
from training.core.rundir import RunDir
from training.monitor import options, state

# Command line


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Standard error of an invalid command line: exit 2, nothing on standard output, no
    traceback."""
    assert monitor.main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and "nothing to show (exit 2)" in err
    return err


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project folder, without any run."""
    monkeypatch.setattr(project, "WORK", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_unknown_flags_get_the_nearest_match(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = error(
        capsys,
        "--intervall",
        "5",
        "--jsn",
        "-x",
        "--frobnicate",
        "7",
        "--interval=0.01",
        "--once=yes",
    )
    assert (
        "--intervall is not a known flag" in text
        and "try:     ./monitor_training.sh --json --once --interval=5\n" in text
    )
    assert (
        "./monitor_training.sh --interval=0.2 --once --json\n" in text
        and "-x is not" in text
        and "--help" in text
        and "6 problems" in text
    )
    assert (
        "--interval is '0.01'" in text
        and "from 0.2 to 3600" in text
        and "--interval=0.2" in text
        and "--once has the value 'yes'" in text
    )


@pytest.mark.parametrize("value", ["abc", "nan", "-1", "inf", "0"])
def test_wrong_interval(home: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert f"--interval is {value!r}" in error(capsys, f"--interval={value}")


def test_no_run_yet(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = error(capsys)
    assert (
        f"there is no run in {home}/experiments yet" in text
        and "./train_dual_gpu.sh configs/dual_gpu/quickstart.py" in text
    )


def test_invalid_logs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(home / "experiments" / "one")
    assert "no such file" in error(capsys, "--log=missing.log")
    assert "no such file" in error(capsys, "--log=nul\0byte.log")
    assert "not a file" in error(capsys, f"--log={home}")
    assert f"try:     ./monitor_training.sh --run={made.run.path}" in error(
        capsys, f"--log={made.run.path}"
    )
    assert "both given" in error(capsys, f"--log={made.log}", "--run=one")
    assert f"try:     ./monitor_training.sh --log={made.log}" in error(capsys, str(made.log))
    assert "--run=one" in error(capsys, "--run=oen")
    assert f"--run is '{home}'" in error(capsys, f"--run={home}")
    assert f"--run={made.run.path}" in error(capsys, f"--run={made.run.plan}")


@pytest.mark.parametrize("path", ["x" * 300, "~no-such-user/x", "a/" * 3000])
def test_impossible_paths(home: Path, capsys: pytest.CaptureFixture[str], path: str) -> None:
    (home / "lost.log").symlink_to("nowhere")
    assert "no such file" in error(capsys, f"--log={path}")
    assert "--run is " in error(capsys, f"--run={path}")


@pytest.mark.parametrize("flag", ["--once", "--json", "--interval=0.2"])
def test_unwritable_output(made: Made, flag: str) -> None:
    made.supervisor(dead_pid()).summary()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [COMMAND, f"--run={made.run.path}", flag],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (
        done.returncode == 3
        and "No space left on device" in done.stderr
        and "Traceback" not in done.stderr
    )
    closed = subprocess.run(
        ["bash", "-c", f"exec {shlex.quote(str(COMMAND))} '--run={made.run.path}' {flag} >&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        closed.returncode == 2
        and "standard output is closed" in closed.stderr
        and "Traceback" not in closed.stderr
    )


def test_foreign_logs_and_logs_of_removed_runs(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(home / "experiments" / "one")
    logs = {name: home / f"{name}.log" for name in ("empty", "foreign", "moved", "other", "gone")}
    logs["empty"].touch()
    logs["foreign"].write_text("epoch 1\nthe run directory: is elsewhere\nstep 7 loss 0.25\n")
    logs["moved"].write_text(names(RunDir(Path("/elsewhere/one")), made.at))
    logs["other"].write_text(names(RunDir(Path("/elsewhere/one")), made.at + 999))
    logs["gone"].write_text("[INFO] 2026-11-21 03:00:00 run directory: /elsewhere/two\n")
    found = {
        name: options.find(options.parse([f"--log={log}"]), home) for name, log in logs.items()
    }
    assert {name: run and run.path for name, (run, _) in found.items()} == {
        "empty": None,
        "foreign": None,
        "moved": made.run.path,  # the folder of all runs was moved
        "other": None,  # of another machine
        "gone": None,
    }
    for log in logs.values():
        assert monitor.main([f"--log={log}", "--once"]) == 0
    shown = capsys.readouterr().out
    assert "loss 0.25" in shown and "Traceback" not in shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--all", "--run=x"], "--all shows every run, --run a single one"),
        (["--follow-exit", "--json"], "with --json the monitor exits at once"),
        (["--follow-exit", "--all"], "with --all the run to wait for is undefined"),
        (["--prometheus=0"], "a port from 1 to 65535"),
        (["--prometheus=http"], "--prometheus is 'http'"),
        (
            ["--prometheus=9400", "--once"],
            "--prometheus serves until it is stopped, --once exits at once",
        ),
    ],
)
def test_contradictory_flags(
    home: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert words in error(capsys, *flags)


def test_last_run_named_in_a_log(home: Path) -> None:
    first, second = Made(home / "experiments" / "first"), Made(home / "experiments" / "second run")
    log = home / "both.log"
    log.write_text(
        names(first.run, first.at)
        + names(second.run, second.at)
        + " run directory: nowhere\n"
        + "x" * 100_000
    )
    run, shown = options.find(options.parse([f"--log={log}"]), home)
    assert (run.path, shown) == (second.run.path, log)


def test_newest_run_and_run_by_name(home: Path) -> None:
    first, second = Made(home / "experiments" / "first"), Made(home / "experiments" / "second")
    old(first.run.plan)
    assert options.find(options.parse([]), home)[0].path == second.run.path
    assert options.find(options.parse(["--run", "first"]), home)[0].path == first.run.path
    assert options.find(options.parse(["--run=latest"]), home)[0].path == second.run.path
    with pytest.raises(UserError) as caught:
        options.parse(["latest"])
    assert caught.value.problems[0].fixes == [f"{options.COMMAND} --run=latest"]


# Program


def test_once_and_json_write_nothing(made: Made) -> None:
    made.supervisor(os.getpid()).steps(50).beats().summary()

    def content() -> dict[Path, tuple[int, bytes]]:
        return {
            p: (p.stat().st_mtime_ns, p.read_bytes())
            for p in made.run.path.parent.parent.rglob("*")
            if p.is_file()
        }

    before = content()
    once = program(f"--run={made.run.path}", "--once")
    assert (
        (once.returncode, once.stderr) == (0, "")
        and "\x1b" not in once.stdout
        and "FINISHED" in once.stdout
    )
    assert len(once.stdout.splitlines()) <= 24 and max(map(len, once.stdout.splitlines())) <= 80
    answer = program(f"--log={made.log}", "--json")
    value = json.loads(answer.stdout)
    assert (answer.returncode, value["schema_version"], value["run"]["state"]) == (
        0,
        state.SCHEMA_VERSION,
        "finished",
    )
    assert content() == before


def test_non_utf8_output_is_ascii(made: Made) -> None:
    made.steps(50).summary()
    assert program(
        f"--run={made.run.path}", "--once", PYTHONIOENCODING="latin-1", COLUMNS="100"
    ).stdout.isascii()


def test_errors_of_the_program(made: Made) -> None:
    answer = program("--run=/nowhere", "--once")
    assert (answer.returncode, answer.stdout) == (2, "") and "[ERROR]" in answer.stderr
    helped = program("--help", "--nonsense")
    assert (
        helped.returncode == 0
        and helped.stdout.startswith("Watch a training run")
        and "--interval=S" in helped.stdout
    )


def test_without_a_terminal_lines_until_the_run_has_ended(made: Made) -> None:
    supervisor = subprocess.Popen(["sleep", "600"])
    made.supervisor(supervisor.pid).steps(10)
    with subprocess.Popen(
        [COMMAND, f"--run={made.run.path}", "--interval=0.2"], stdout=subprocess.PIPE, text=True
    ) as watching:
        try:
            assert watching.stdout is not None
            first = watching.stdout.readline()
            assert (
                "small run  running  step 10/400  loss 4.1496" in first
                and first.isprintable() is False
                and "\x1b" not in first
            )
            made.summary()
            supervisor.kill()
            supervisor.wait()
            rest, _ = watching.communicate(timeout=PATIENCE_S)
            assert "finished" in rest.splitlines()[-1] and watching.returncode == 0
        finally:
            supervisor.kill()
            watching.kill()


@pytest.mark.parametrize(("end", "status"), [("summary", 0), ("failure", 4), ("nothing", 4)])
def test_follow_exit_returns_the_status_of_the_run(made: Made, end: str, status: int) -> None:
    supervisor = subprocess.Popen(["sleep", "600"])
    made.supervisor(supervisor.pid).steps(10)
    argv = [COMMAND, f"--run={made.run.path}", "--interval=0.2", "--follow-exit"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as watching:
        try:
            assert watching.stdout is not None
            assert " running " in watching.stdout.readline()
            if end != "nothing":
                getattr(made, end)()
            supervisor.kill()
            supervisor.wait()
            watching.communicate(timeout=PATIENCE_S)
            assert watching.returncode == status
        finally:
            supervisor.kill()
            watching.kill()


def test_torch_is_never_imported() -> None:
    code = (
        "import sys, training.cli.monitor, training.monitor.terminal; sys.exit('torch' in "
        "sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0

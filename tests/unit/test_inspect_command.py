"""`./duet inspect`: command line, selected run, screen and JSON."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.unit.conftest import python
from tests.unit.monitor_runs import Made
from training.cli import inspect as command
from training.core import json_text
from training.core.errors import Exit, Problem, UserError
from training.monitor.health import health, options, render
from training.monitor.health.check import BAD, OK, UNKNOWN, HealthCheck, alike, numbers, span
from training.monitor.health.health import HealthReport
from training.monitor.health.options import HealthOptions
from training.monitor.health.target import Target

NOW = re.compile(r"^\[(ERROR)\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)
PGREP = "pgrep -af python   # all Python processes, with their pids"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], HealthOptions()),
        (["latest"], HealthOptions()),
        (["a run"], HealthOptions(run="a run")),
        (["--run=x", "--json"], HealthOptions(run="x", json=True)),
        (["--pid=17"], HealthOptions(pid=17)),
        (["--pid", "17", "--watch"], HealthOptions(pid=17, every_s=10.0)),
        (["--watch=2.5"], HealthOptions(every_s=2.5)),
    ],
)
def test_command_line(argv: list[str], expected: HealthOptions) -> None:
    assert options.parse(argv) == expected


@pytest.mark.parametrize(
    ("argv", "problems"),
    [
        (
            ["--pid=x"],
            [
                Problem(
                    "flag.value",
                    "--pid is 'x'",
                    "the PID of a training process",
                    [PGREP],
                    "pid",
                )
            ],
        ),
        (
            ["--pid"],
            [
                Problem(
                    "flag.no_value",
                    "--pid has no value",
                    "the PID of a training process",
                    [PGREP],
                    "pid",
                )
            ],
        ),
        (
            ["--pid=0"],
            [
                Problem(
                    "flag.value",
                    "--pid is '0'",
                    "the PID of a training process",
                    [PGREP],
                    "pid",
                )
            ],
        ),
        (
            ["--watch=0"],
            [
                Problem(
                    "flag.value",
                    "--watch is '0'",
                    "seconds from 1 to 3600",
                    ["./duet inspect --watch=1"],
                    "watch",
                )
            ],
        ),
        (
            ["--watch=nan"],
            [
                Problem(
                    "flag.value",
                    "--watch is 'nan'",
                    "seconds from 1 to 3600",
                    ["./duet inspect --watch=10"],
                    "watch",
                )
            ],
        ),
        (
            ["--jsn", "a", "b b"],
            [
                Problem(
                    "flag.unknown",
                    "--jsn is not a known flag",
                    "--pid, --run, --json, --watch, --help",
                    ["./duet inspect a 'b b' --json"],
                ),
                Problem(
                    "run.several",
                    "2 runs are given: 'a', 'b b'",
                    "one of them",
                    ["./duet inspect a", "./duet inspect 'b b'"],
                ),
            ],
        ),
        (
            ["a", "--pid=3"],
            [
                Problem(
                    "flag.contradiction",
                    "both a run ('a') and --pid are given",
                    "one of them",
                    ["./duet inspect a", "./duet inspect --pid=3"],
                )
            ],
        ),
    ],
)
def test_wrong_usage(argv: list[str], problems: list[Problem]) -> None:
    with pytest.raises(UserError) as caught:
        options.parse(argv)
    assert caught.value.problems == problems and caught.value.code == Exit.CONFIG


def test_which_run(tmp_path: Path) -> None:
    first = Made(tmp_path / "experiments" / "first run")
    second = Made(tmp_path / "experiments" / "second")
    os.utime(first.run.plan, (1, 1))
    assert options.find("", tmp_path).path == second.run.path
    assert (
        options.find("first run", tmp_path).path
        == options.find(str(first.run.path), tmp_path).path
        == first.run.path
    )
    with pytest.raises(UserError) as caught:
        options.find("secund", tmp_path)
    (problem,) = caught.value.problems
    assert problem.what == "RUN is 'secund': not a run directory"
    assert problem.fixes == ["./duet inspect second", "./duet inspect   # the newest run"]
    with pytest.raises(UserError) as caught:
        options.find("4711", tmp_path)
    assert caught.value.problems[0].fixes[0] == "./duet inspect --pid=4711"


def test_no_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        options.find("", tmp_path)
    assert caught.value.problems[0].what == f"there is no run in {tmp_path / 'experiments'} yet"


def test_user_errors_cause_no_traceback() -> None:
    done = python("-m", "training.cli.inspect", "--pid=4194304")
    assert (done.returncode, done.stdout) == (2, "") and NOW.match(done.stderr)
    assert "4194304" in done.stderr and f"    try:     {PGREP}\n" in done.stderr
    assert "(exit 2)" in done.stderr and "Traceback" not in done.stderr


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "./duet inspect --pid=PID" in out and "0 YES" in out


def test_no_torch_and_no_numpy() -> None:
    done = python(
        "-c",
        "import sys, training.cli.inspect; print([m for m in ('torch', 'numpy') if m in "
        "sys.modules])",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_standard_library_inspect_is_not_shadowed() -> None:
    done = python(
        "-c",
        "import inspect, training.monitor.health; print(inspect.getsource is not None, inspect is "
        "training.monitor.health)",
    )
    assert done.stdout == "True False\n"


def test_rank_numbers_as_text() -> None:
    assert [numbers(n) for n in ([3], [1, 0], [0, 1, 2, 5])] == [
        "rank 3",
        "ranks 0 and 1",
        "ranks 0-2, 5",
    ]
    assert alike({0: "x", 1: "x", 2: "y"}) == "ranks 0 and 1 x; rank 2 y"
    assert (span([1.23, 1.24], "ms", 1), span([1, 20], "ms")) == ("1.2 ms", "1 to 20 ms")


def test_screen_shows_ranks_with_problems() -> None:
    ranks = [
        {"rank": r, "pid": 100 + r, "step": 5, "step_before": 5, "phase": "forward", "phase_s": 1.0}
        for r in range(64)
    ]
    checks = [
        HealthCheck("steps", BAD, "rank 40 hangs", (40,)),
        HealthCheck("data", UNKNOWN, "unknown"),
    ]
    lines = render.screen(
        HealthReport(health.NO, "rank 40 hangs", Exit.HANG, checks, ranks, looked_s=2.0)
    )
    assert lines[0] == "NO: rank 40 hangs" and lines[2:4] == [
        "  bad   steps  rank 40 hangs",
        "  ?     data   unknown",
    ]
    assert lines[5] == "  rank  pid  step  is at"
    assert [line.split()[0] for line in lines[6:-1]] == [*map(str, range(15)), "40"]
    assert lines[-1] == "  … and 48 more ranks (--json shows all)"


def test_control_sequences_are_removed() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07x\ny"
    ranks = [{"rank": 0, "pid": 1, "phase": evil, "where": evil, "state": "running"}]
    report = HealthReport(health.YES, evil, Exit.DONE, [HealthCheck("loss", OK, evil)], ranks)
    plain = render.screen(report)
    assert all(line.isprintable() for line in plain) and plain[0] == "YES: xy"
    coloured = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in render.screen(report, colour=True)]
    assert coloured == plain
    assert "\x1b" not in json.dumps(render.record(report))


def test_json_has_no_nan(made: Made) -> None:
    report = HealthReport(
        health.YES, "x", Exit.DONE, [], [{"rank": 0, "compute_ms_median": float("nan")}]
    )
    assert json.loads(json_text.answer(render.record(report)))["ranks"] == [
        {"rank": 0, "compute_ms_median": None}
    ]


def test_watch_ends_with_the_run(
    monkeypatch: pytest.MonkeyPatch, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = [
        HealthReport(health.YES, "first", Exit.DONE),
        HealthReport(health.NO, "then", Exit.HANG),
        HealthReport(health.HAS_ENDED, "done", Exit.DONE),
    ]
    slept: list[float] = []
    monkeypatch.setattr(health, "of_run", lambda run: reports.pop(0))
    monkeypatch.setattr(command.time, "sleep", slept.append)
    assert command.main([str(made.run.path), "--watch=2"]) == 0
    out = capsys.readouterr().out
    assert slept == [2.0, 2.0] and [line for line in out.splitlines() if ": " in line] == [
        "YES: first",
        "NO: then",
        "IT HAS ENDED: done",
    ]


@pytest.mark.parametrize("others", ["none", "a rank", "a run"])
def test_watch_outlives_the_process_that_was_named(
    monkeypatch: pytest.MonkeyPatch,
    made: Made,
    capsys: pytest.CaptureFixture[str],
    others: str,
) -> None:
    gone, rank = 4194303, os.getpid()
    pids = {0: rank} if others == "a rank" else {0: gone}
    run = made.run if others == "a run" else None
    first = HealthReport(
        health.YES, "first", Exit.DONE, target=Target(run, {}, pids, 1, 1, ""), run=run
    )
    asked: list[object] = []

    def look(what: object) -> HealthReport:
        asked.append(what)
        return first if len(asked) == 1 else HealthReport(health.HAS_ENDED, "then", Exit.DONE)

    monkeypatch.setattr(health, "of_process", look)
    monkeypatch.setattr(health, "of_run", look)
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    code = command.main([f"--pid={gone}", "--watch=1", "--json"])
    answers = [json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines() if line]
    assert answers == [health.YES, health.HAS_ENDED]
    then = {"none": [], "a rank": [rank], "a run": [made.run]}[others]
    assert (code, asked) == (3 if others == "none" else 0, [gone, *then])


def test_protected_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("/environ"))
    assert command.main([f"--pid={os.getpid()}"]) == 3
    pid = os.getpid()
    error = NOW.sub("", capsys.readouterr().err)
    assert error.startswith(f"process {pid} (--pid) ")
    assert f"    try:     sudo ./duet inspect --pid={pid}\n" in error

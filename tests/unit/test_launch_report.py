"""The report after a run, by real programs, however they behave."""

from __future__ import annotations

import os
import shlex
import textwrap
from pathlib import Path

import pytest

from tests.unit.test_launch_ending import failed, finished, log, plan, run
from training.core import messages
from training.core.errors import Exit
from training.core.rundir import RunDir, append_json
from training.launcher import first_failure, notification, post_run, report_program
from training.launcher.post_run import PostRun
from training.watchdog.rank_exit import RankExit

__all__ = ["log", "run"]  # fixtures


def with_report(run: RunDir, monkeypatch: pytest.MonkeyPatch, program: str) -> PostRun:
    """`program` in place of training.cli.report."""
    root = run.path.parent / "root"
    (root / "lib").mkdir(parents=True)
    (root / "lib/run_module.py").write_text(textwrap.dedent(program))
    monkeypatch.setattr(report_program, "ROOT", root)
    end = PostRun(run, plan(report=True))
    end.begun = True
    return end


MAKES = """
import os, pathlib, sys
pathlib.Path(sys.argv[2], 'report.html').write_text(f'{sys.argv[1:]} {os.nice(0)} {os.getsid(0) == os.getpid()}')
"""


def test_the_path_of_the_report_is_logged_after_a_failure(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with_report(run, monkeypatch, MAKES).close(4)
    assert (
        run.report.read_text()
        == f"{['training.cli.report', str(run.path), '--quiet']} {os.nice(0) + report_program.NICE} True"
    )
    assert capfd.readouterr().err.endswith(f" report: {run.report}\n")


def test_the_report_is_written_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    end = with_report(run, monkeypatch, MAKES)
    end.report(0)
    run.report.unlink()
    end.close(0)
    assert not run.report.exists() and capfd.readouterr().err == "", "the summary has its path"


def test_a_preempted_run_is_reported_after_its_message_and_notification(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    end = with_report(run, monkeypatch, MAKES)
    end.plan["config"]["notify"] = f"ls {shlex.quote(str(run.path))}"
    end.report_unless_preempted(Exit.PREEMPTED)
    assert not run.report.exists()
    monkeypatch.setattr(post_run.log, "to_log", lambda text: print(text, end=""))
    end.close(Exit.PREEMPTED)
    said = capfd.readouterr()
    assert "notify: plan.json" in said.out and "notify: report.html" not in said.out
    assert run.report.exists() and said.err.endswith(f" report: {run.report}\n")


def test_a_report_that_fails_is_one_warning(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with_report(
        run, monkeypatch, "print('reading'); raise ValueError('metrics.jsonl: no records')"
    ).close(0)
    logged = capfd.readouterr().err
    assert (
        logged.count("[") == 1
        and "no report was written: exited with status 1: ValueError: metrics.jsonl: no records\n"
        in logged
    )


def test_the_command_of_a_killed_report_is_logged(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    with_report(run, monkeypatch, "import os; os.kill(os.getpid(), 9)").close(0)
    monkeypatch.undo()
    append_json(run.metrics, {"step": 1, "loss": 2.2, "time": 1.0})
    killed, fix = log.read_text().splitlines()
    assert "SIGKILL" in killed and fix.startswith("    try: ")
    assert fix.endswith(f"./duet report {shlex.quote(str(run.path))}"), (
        "the folder name contains a space"
    )


def test_a_refused_report_gives_its_first_reason(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    refusal = (
        "print('[ERROR] 2026-11-21 12:00:00 no space left'); print('[ERROR] 2026-11-21 12:00:00 "
        "1 problem; no report (exit 2)'); raise SystemExit(2)"
    )
    with_report(run, monkeypatch, refusal).close(0)
    monkeypatch.undo()
    assert "exited with status 2: no space left\n" in log.read_text()


@pytest.mark.parametrize("code", [Exit.DONE, Exit.PREEMPTED])
def test_a_slow_report_is_killed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: Exit
) -> None:
    monkeypatch.setattr(post_run, "REPORT_S", 0.5)
    monkeypatch.setattr(post_run, "PREEMPTED_S", 0.3)
    with_report(run, monkeypatch, "import time; time.sleep(1000)").close(code)
    assert (
        f"no report was written: not finished within {'0.3' if code else '0.5'} s: killed\n"
        in capfd.readouterr().err
    )


def test_a_report_that_is_killed_after_it_was_written_counts(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run.report.write_text("of an earlier start")
    with_report(run, monkeypatch, f"{MAKES}\nos.kill(os.getpid(), 9)").close(0)
    assert "training.cli.report" in run.report.read_text()
    logged = capfd.readouterr().err
    assert f"report: {run.report}" in logged and logged.count("[") == 1


def test_no_report_without_permission_or_if_turned_off(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = with_report(run, monkeypatch, MAKES)
    end.plan["config"]["report"] = False
    end.close(0)
    end.plan["config"]["report"] = True
    # tests may run as root, which may write everywhere
    monkeypatch.setattr(os, "access", lambda *_: False)
    end.close(0)
    monkeypatch.undo()
    end.begun = False
    end.close(0)
    assert not run.report.exists()


def test_no_report_for_a_run_stopped_before_its_first_step(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed(run, kind="asked", cause="interrupted")
    monkeypatch.setattr(
        post_run.hook_runner, "run", lambda *_, **__: pytest.fail("a report was written")
    )
    assert PostRun(run, plan(report=True)).report(Exit.INTERRUPTED) is False


@pytest.mark.parametrize("report", [True, False])
def test_the_report_of_an_earlier_start_is_removed_when_this_one_has_none(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, report: bool
) -> None:
    finished(run)
    run.report.write_text("old")
    os.utime(run.report, (1, 1))
    monkeypatch.setattr(post_run.hook_runner, "run", lambda *_, **__: ("killed", ""))
    end = PostRun(run, plan(report=report))
    assert run.report.exists() and not end.report(Exit.DONE) and not run.report.exists()
    assert notification.payload(run, plan(), 0, begun=True)["report"] is None


def test_a_failure_in_one_line_is_in_one_language(monkeypatch: pytest.MonkeyPatch) -> None:
    known = RankExit("error", 0, "a.py:3", "RuntimeError: x")
    lines = {}
    for language in messages.LANGUAGES:
        monkeypatch.setenv("DUET_LANG", language)
        lines[language] = first_failure.line(known, "step 1: forward")
    assert lines == {
        "en": "FAILED rank 0 in 'step 1: forward': RuntimeError: x; at a.py:3",
        "zh": "FAILED rank 0，阶段 'step 1: forward'：RuntimeError: x；位置：a.py:3",
    }

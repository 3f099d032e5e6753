"""A resumed run keeps its previous end until it has a new one: a resume that ends before its first
step leaves the run unchanged."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest

from tests.unit.conftest import Shell
from tests.unit.monitor_runs import Made, dead_pid, look, old
from training.core import evaluations, last_resume, rundir, standing
from training.core.errors import Exit
from training.core.recorded_steps import RecordedSteps
from training.diagnose import run_files
from training.launcher import endings, report_program
from training.launcher.post_run import PostRun
from training.monitor.report import run as report_run
from training.monitor.report import run_page
from training.monitor.runs import facts
from training.plan import writer


def resume(made: Made, created: float) -> None:
    """Resume as a plan does."""
    writer._keep_before(made.run)
    rundir.write_json(
        made.run.plan, made.plan | {"created": created, "config": {"num_iterations": 800}}
    )
    made.run.data.unlink(missing_ok=True)


def ended(made: Made) -> Made:
    made.steps(60).summary(steps=60)
    made.run.report.write_text("the report")
    for file in (made.run.summary, made.run.report, made.run.metrics):
        old(file, 50)
    return made


def test_the_old_end_is_kept_but_hidden_while_the_resumed_run_is_alive(made: Made) -> None:
    resume(ended(made), time.time() - 3)
    made.at = time.time() - 3
    made.supervisor(os.getpid())
    rundir.write_json(
        made.run.supervisor,
        (rundir.read_json(made.run.supervisor) or {}) | {"started": time.time()},
    )
    assert made.run.summary.exists() and made.run.report.exists() and not made.run.data.exists()
    seen = look(made.run)
    assert (seen["run"]["state"], seen["summary"], seen["progress"]["total_steps"]) == (
        "starting",
        None,
        800,
    )
    assert run_files.ended(made.run) is None and report_run.read_run(made.run).summary == {}


def test_a_resume_killed_before_its_first_step_keeps_the_previous_end(
    made: Made,
) -> None:
    resume(ended(made), time.time() - 3)
    rundir.write_json(
        made.run.supervisor,
        {"pid": dead_pid(), "host": os.uname().nodename, "started": time.time(), "ranks": []},
    )
    seen = look(made.run)
    assert (seen["run"]["state"], seen["progress"]["step"], seen["progress"]["total_steps"]) == (
        "finished",
        60,
        60,
    )
    assert (
        report_run.read_run(made.run).state["run"]["state"] == "finished"
        and report_run.read_run(made.run).data["total_steps"] == 400
    )
    assert (run_files.ended(made.run) or {})["summary"] == "the run finished"
    assert standing.read_plan(made.run) == made.plan
    resume(made, time.time())  # the next one keeps the same
    assert (
        rundir.read_json(made.run.plan_before) == made.plan
        and (rundir.read_json(made.run.data_before) or {})["total_steps"] == 400
    )
    assert writer.give_back(made.run) and not writer.give_back(made.run)
    assert (
        rundir.read_json(made.run.plan) == made.plan
        and (rundir.read_json(made.run.data) or {})["total_steps"] == 400
    )


def test_a_stopped_run_shows_the_complete_resume_command(made: Made, shell: Shell) -> None:
    folder = made.run.path.parent
    command = {"script": "launch_train.sh", "args": ["2", "--data=my texts"], "cwd": "/"}
    more = {
        "config": {"num_iterations": 400, "out_dir": str(folder)},
        "origins": {"out_dir": "from the command line", "log_dir": "default"},
    }
    rundir.write_json(made.run.plan, made.plan | more | {"command": command})
    made.steps(60).summary(status="stopped", steps=60)
    reason = look(made.run)["run"]["reason"]
    script, args = shell.paste(reason.partition("to resume: ")[2])
    assert (script, args) == (
        "launch_train.sh",
        ["2", f"--out_dir={folder}", f"--resume={made.run.name}"],
    )
    page = run_page.page(report_run.read_run(made.run)).html()
    text = re.sub("<[^>]*>", "", page)  # no line breaks inside a flag
    assert "./launch_train.sh 2 &#x27;--data=my texts&#x27;" in text, (
        "the pasted command starts the same run"
    )


def test_a_resume_that_died_after_a_step_is_shown_as_dead(made: Made) -> None:
    resume(ended(made), time.time() - 3)
    made.step(61, 2.0, at=time.time())
    rundir.write_json(
        made.run.supervisor,
        {"pid": dead_pid(), "host": os.uname().nodename, "started": time.time(), "ranks": []},
    )
    assert (
        look(made.run)["run"]["state"] == "died" and standing.plan_file(made.run) == made.run.plan
    )


def test_a_step_of_a_resume_counts_after_the_clock_was_set_back(made: Made) -> None:
    resume(ended(made), time.time() + 3600)
    plan: Any = (rundir.read_json(made.run.plan) or {}) | {"launch": "a1b2", "resume": True}
    rundir.write_json(made.run.plan, plan)
    record = {"pid": dead_pid(), "host": os.uname().nodename, "started": 0.0, "launch": "a1b2"}
    rundir.write_json(made.run.supervisor, record | {"ranks": [{"rank": 0, "pid": 1}]})
    made.beats("forward", step=61)
    assert standing.plan_file(made.run) == made.run.plan_before
    made.step(61, 2.0, at=time.time())
    made.beats("saving", step=61)
    assert standing.plan_file(made.run) == made.run.plan
    assert not endings.unbegun(made.run, plan) and made.run.plan_before.exists()
    rundir.write_json(made.run.supervisor, record | {"ranks": []})
    assert standing.plan_file(made.run) == made.run.plan_before, "heartbeats of the start before"


def test_a_new_end_replaces_the_old_one(made: Made) -> None:
    created = time.time() - 3
    resume(ended(made), created)
    made.failure()
    made.run.forget_before({"created": created}, made.run.failure)  # type: ignore[typeddict-item]
    assert (
        made.run.failure.exists()
        and not made.run.summary.exists()
        and not made.run.plan_before.exists()
    )
    assert look(made.run)["run"]["state"] == "failed"


def refused(made: Made, code: Exit, **before: Any) -> Any:
    """The ranks of a resume end with this code before the first step."""
    rundir.write_json(made.run.plan, made.plan | {"launch": "first"} | before)
    writer._keep_before(made.run)
    plan: Any = made.plan | {"created": time.time() - 3, "launch": "second", "resume": True}
    plan["config"] = {"num_iterations": 800, "report": True}
    rundir.write_json(made.run.plan, plan)
    record: Any = {"exit_code": int(code), "kind": "error", "launch": "second"}
    endings.keep_failure(made.run, record, plan)
    return plan


@pytest.mark.parametrize("code", [Exit.CONFIG, Exit.RESOURCES])
def test_a_resume_that_its_ranks_refuse_leaves_the_run_unchanged(
    made: Made, code: Exit, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = refused(ended(made), code)
    seen = look(made.run)
    assert (seen["run"]["state"], seen["progress"]["total_steps"]) == ("finished", 60)
    assert (rundir.read_json(made.run.plan) or {})["launch"] == "first"
    assert made.run.summary.exists() and not made.run.failure.exists()
    ending = PostRun(made.run, plan)
    ending.begun = True
    monkeypatch.setattr(report_program, "write", lambda *_: pytest.fail("not of this start"))
    ending.close(code)
    assert made.run.report.read_text() == "the report"


def test_a_failure_of_a_resume_before_its_first_step_is_kept(made: Made) -> None:
    refused(ended(made), Exit.TRAINING)
    assert made.run.failure.exists() and not made.run.summary.exists()


def test_the_first_start_of_a_slurm_job_fails_if_its_ranks_refuse_it(made: Made) -> None:
    del made.plan["device"]
    refused(made, Exit.CONFIG)
    assert look(made.run)["run"]["state"] == "failed"


def begins(made: Made, at: float) -> None:
    length = {"total_steps": 400, "world_size": 2}
    rundir.append_json(made.run.events, {"time": at, "event": "start", "step": 0, **length})


def test_a_start_from_the_first_step_discards_what_came_before(made: Made) -> None:
    """A run killed before its first checkpoint has no resume."""
    begins(made, made.at + 1)
    made.steps(60)
    made.run.event("eval", step=50, val_bpb=2.5)
    assert look(made.run)["progress"]["step"] == 60
    begins(made, time.time() - 5)
    seen = look(made.run)
    assert (seen["progress"]["step"], seen["training"]["eval_last"]) == (0, None)
    for step in (1, 2):
        made.step(step, 4.0, at=time.time())
    assert evaluations.read(made.run.events)[0] == {} and evaluations.discarded(made.run.events)
    assert RecordedSteps(made.run, 400, ()).evaluations == {}
    found = facts.read(made.run.path)
    assert (found.step, found.best_step) == (2, None)
    assert not report_run.read_run(made.run).metrics.evaluation("val_bpb").points


def test_the_first_start_discards_nothing_whatever_the_clock_shows() -> None:
    first = {"event": "start", "step": 0, "time": 1000.0}
    record = {"step": 5, "time": 10.0}
    found = last_resume.after(None, first)
    assert found and not found.discards(record)
    again = last_resume.after(found, {**first, "time": 20.0})
    assert again and again.discards(record) and last_resume.after(again, record) is again
    resumed = last_resume.after(None, {**first, "event": "resume", "step": 3})
    assert resumed and resumed.discards(record)

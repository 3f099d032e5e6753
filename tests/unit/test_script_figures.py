"""The final figures of a user script, from its output to the table of runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.monitor_runs import Made
from training.core import rundir
from training.core.errors import Exit
from training.diagnose.log_parsers import line_parser
from training.diagnose.log_parsers.log_metrics import LogMetrics
from training.launcher import end_record, endings, failure_report, script_figures
from training.launcher.outcome import Outcome
from training.launcher.post_run import PostRun
from training.launcher.recovery import Recovery
from training.monitor.runs import facts


def script(path: Path, *lines: str) -> Made:
    """A run of a user script whose rank 0 has printed these lines."""
    made = Made(path, launch="x")
    made.plan["script"] = {"path": "main.py", "args": [], "python": "python3"}
    made.plan["launcher"] = {"value": "spawn", "reason": ""}
    made.plan["config"] |= {"notify": "", "retries": "auto"}
    rundir.write_json(made.run.plan, made.plan)
    made.run.rank_log(0).write_text("".join(f"{line}\n" for line in lines))
    return made


def test_the_last_steps_of_all_attempts(tmp_path: Path) -> None:
    first = [f"step {n} loss {1 / n:.3f}" for n in range(1, 13)]
    again = [f"step {n} loss {1 / n:.3f}" for n in range(11, 76)]
    for lines, expected in ((first, (11, 12)), (first + again, (74, 75)), (["hello"], ())):
        assert script_figures.last_steps(script(tmp_path / str(len(lines)), *lines).run) == expected


def finished(path: Path, *lines: str) -> facts.RunFacts:
    made = script(path, *lines)
    ending, recovery = PostRun(made.run, made.plan), Recovery(made.run, made.plan)
    outcome = Outcome(ours=False, ended=[(0, 0), (1, 0)])
    assert endings.regular_end(made.run, made.plan, ending, outcome, recovery) == 0
    return facts.read(path)


def test_step_loss_and_speed_are_those_that_the_script_has_printed(tmp_path: Path) -> None:
    found = finished(
        tmp_path / "run",
        *(f"step {n}/40 loss {4 - n / 20} tokens_per_s 5000" for n in range(10, 41, 10)),
    )
    assert (found.step, found.loss, found.loss_name) == (40, 2.0, "loss")
    assert (found.speed, found.unit) == (5000.0, "tokens")


def fail(made: Made) -> facts.RunFacts:
    made.plan["place"] = {"nnodes": 1}
    outcome = Outcome(ours=False, guilty=(1, 1), here=(1, 1))
    record = failure_report.failure(outcome, made.run, made.plan)
    endings.keep_failure(made.run, record, made.plan)
    return facts.read(made.run.path)


def test_a_failed_script_has_the_figures_that_it_has_printed(tmp_path: Path) -> None:
    made = script(tmp_path / "run", "step 10/40 loss 3.5", "step 20/40 loss 3.0")
    found = fail(made)
    assert (found.state, found.step, found.loss, found.loss_name) == ("failed", 20, 3.0, "loss")
    # stopped before the next start
    end_record.write(made.run, made.plan, Exit.INTERRUPTED, 0, "stopped")
    found = facts.read(made.run.path)
    assert (found.state, found.step, found.loss, found.loss_name) == ("stopped", 20, 3.0, "loss")


def test_a_failed_script_that_has_printed_nothing_has_no_figures(tmp_path: Path) -> None:
    made = script(tmp_path / "run", "hello")
    found = fail(made)
    assert (found.state, found.step, found.loss) == ("failed", None, None)
    assert "figures" not in (rundir.read_json(made.run.failure) or {})


def test_the_best_evaluation_of_a_script_is_its_loss(tmp_path: Path) -> None:
    lines = []
    for step, loss in ((10, 3.0), (20, 1.5), (30, 1.75)):
        lines += [f"step {step} loss 2.0", f"step {step} val_loss {loss}"]
    found = finished(tmp_path / "run", *lines)
    assert (found.loss, found.loss_name, found.best_step) == (1.5, "val_loss", 20)


@pytest.mark.parametrize("lines", [(), ("hello",)])
def test_a_script_without_figures_has_none(tmp_path: Path, lines: tuple[str, ...]) -> None:
    found = finished(tmp_path / "run", *lines)
    assert (found.state, found.step, found.loss, found.speed) == ("finished", None, None, None)
    assert "figures" not in (rundir.read_json(found.run.summary) or {})


def bar(done: int, of: int) -> str:
    return f"{100 * done // of:3}%|████      | {done}/{of} [00:10<00:15,  4.0it/s]"


TRAINED = [
    bar(0, 60),
    *(
        f"{bar(step, 60)}{{'{name}': '{1 + step / 100}', 'epoch': '{step / 20}'}}"
        for step in (20, 40, 60)
        for name in ("loss", "eval_loss")
    ),
    "{'train_runtime': '5.122', 'train_loss': '1.4', 'epoch': '3'}",
    bar(60, 60),  # redrawn
]


@pytest.mark.parametrize("result", ["", "{'eval_loss': '1.1', 'epoch': '3'}"])
def test_evaluations_after_a_training_of_hugging_face_do_not_count(
    result: str, tmp_path: Path
) -> None:
    after = [bar(0, 20), bar(10, 20), bar(20, 20) + result]
    log = LogMetrics(script(tmp_path / "run", *TRAINED, *after).run.rank_log(0))
    log.read(0)
    assert {**log.progress(running=False), "step": 60, "total_steps": 60} == log.progress(
        running=False
    )
    scored = [r["step"] for r in log.records() if "val_loss" in r]
    assert scored == [20, 40, 60, *[60] * bool(result)]


def test_a_second_training_of_hugging_face_counts(tmp_path: Path) -> None:
    second = [bar(0, 20), bar(10, 80), bar(20, 80) + "{'loss': '0.5', 'epoch': '1'}", bar(30, 80)]
    found = finished(tmp_path / "run", *TRAINED, *second)
    assert (found.step, found.loss) == (30, 0.5)


def test_trainings_of_hugging_face_that_log_no_loss_count(tmp_path: Path) -> None:
    """Folds that are shorter than its logging_steps."""
    fold = [*(bar(step, 300) for step in (0, 100, 200, 300)), "{'train_runtime': '5.1'}"]
    found = finished(tmp_path / "run", *fold, *fold, bar(0, 300), bar(120, 300))
    assert found.step == 120


def test_the_bar_of_an_evaluation_after_a_training_is_progress_without_a_step(
    tmp_path: Path,
) -> None:
    made = script(tmp_path / "run", *TRAINED)
    log = LogMetrics(made.run.rank_log(0))
    log.read(0)
    before = log.tally.newest_offset
    with made.run.rank_log(0).open("a") as file:
        file.write(f"{bar(0, 20)}\n{bar(10, 20)}\n")
    log.read(0)
    assert log.tally.newest_offset > before
    assert log.progress(running=True)["step"] == 60


def test_a_download_is_not_training(tmp_path: Path) -> None:
    lines = (
        "100%|██████████| 97.8M/97.8M [00:00<00:00, 103MB/s]",  # torch.hub
        "model.safetensors:  12%|█▏        | 523M/4.35G [00:12<01:31, 41.9MB/s]",
        "vocab.txt: 100%|██████████| 232k/232k [00:00<00:00, 2.1kB/s]",
        "a.zip:   0%|          | 3.00/4.35G [00:12<01:31, 4.00s/B]",
        "  4%|▍         | 4.1M/97.8M [00:01<00:20, 4.0MiB/s]",
        "98.1MB [00:12, 8.1MB/s]",
    )
    assert [line for line in lines if line_parser.parse(line)] == []
    trained = " 12%|█▏        | 120/1000 [01:02<07:30,  1.95it/s]"
    assert finished(tmp_path / "run", *lines, trained, *lines).step == 120


def test_the_seconds_of_a_script_during_which_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, created = time.time, PostRun.__init__

    def init(self: PostRun, *args: Any) -> None:
        created(self, *args)
        monkeypatch.setattr("time.time", lambda: clock() + 3600)

    monkeypatch.setattr(PostRun, "__init__", init)
    found = finished(tmp_path / "run", "hello")
    took = (rundir.read_json(found.run.summary) or {})["seconds"]
    assert 0 <= took < 1000


@pytest.mark.parametrize("asked", [Exit.DONE, Exit.INTERRUPTED])
def test_the_last_message_names_no_folder_that_was_moved_during_the_run(
    asked: Exit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for moved in (False, True):
        made = script(tmp_path / f"run{moved}", "step 10 loss 1.0")
        ending, recovery = PostRun(made.run, made.plan), Recovery(made.run, made.plan)
        if moved:
            made.run.path.rename(tmp_path / "moved")
        outcome = Outcome(ours=False, ended=[(0, int(asked)), (1, int(asked))], asked=asked)
        assert endings.regular_end(made.run, made.plan, ending, outcome, recovery) == asked
        assert (str(made.run.ranks) in capsys.readouterr().err) == (not moved)


def test_the_advice_names_no_folder_that_was_moved_during_the_run(tmp_path: Path) -> None:
    made = script(tmp_path / "run", "step 10 loss 1.0")
    made.plan["place"] = {"nnodes": 1}
    outcome = Outcome(ours=False, guilty=(1, 1), here=(1, 1))
    for moved in (False, True):
        if moved:
            made.run.path.rename(tmp_path / "moved")
        record = failure_report.failure(outcome, made.run, made.plan)
        assert record["cause"] == "exit_status"
        assert any(str(made.run.ranks) in one for one in record["advice"]) == (not moved)

"""The end of real runs: the report and the --notify command, for every outcome."""

from __future__ import annotations

import gzip
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.e2e.conftest import Launched
from tests.e2e.hooks import in_forward
from training.core.contracts.verdict import FailureRecord
from training.core.rundir import read_json
from training.diagnose import card

Launch = Callable[..., Launched]
CONFIG = "configs/dual_gpu/quickstart.py"
RUN = ("./launch_train.sh", "2", CONFIG)
ALONE = (sys.executable, "train.py", CONFIG)
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr=127.0.0.1",
    "--nproc-per-node=2",
    "train.py",
)


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    return tmp_path / "sent.json"


def notify(sent: Path) -> str:
    """Appends each message as a line to a file; the output of the command goes to the log."""
    return f"cat >> '{sent}'; echo \"sent: $DUET_TITLE\""


def messages(sent: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in sent.read_text().splitlines()]


@pytest.mark.slow
def test_a_finished_run_notifies_and_has_a_report(launch: Launch, sent: Path) -> None:
    run = launch(*RUN, report=True, notify=notify(sent), eval_every=6).ok()
    page = run.run.report.read_text()
    assert "<html" in page and "run1" in page
    assert f"\n  Report     {run.run.report}\n" in run.output
    (facts,) = messages(sent)
    assert (facts["status"], facts["exit_code"], facts["title"]) == ("finished", 0, "run1 finished")
    assert (facts["steps"], facts["loss"]) == (12, run.losses[-1])
    assert facts["eval"]["val_bpb"] == run.summary["val_bpb_last"]
    assert (facts["report"], facts["run_dir"]) == (str(run.run.report), str(run.run.path))
    assert "sent: " not in run.output, "its output is in the log"
    (log,) = run.logs.iterdir()
    assert log.read_text().endswith("notify: sent: run1 finished\n")
    records = [run.steps[step] for step in (2, 12)]
    assert all(
        len(r["compute_ms"]) == len(r["memory_bytes"]) == 2 and r["mfu"] is None for r in records
    )
    assert all(0 < own < r["step_ms"] for r in records for own in r["compute_ms"])
    assert min(records[0]["memory_bytes"]) > 50 << 20
    assert run.summary["memory_bytes"] == max(max(r["memory_bytes"]) for r in run.steps.values())

    resumed = launch(
        *RUN,
        resume="run1",
        report=None,
        notify=None,
        num_iterations=14,
        env={"DUET_REPORT": "false"},
    ).ok()
    assert [m["steps"] for m in messages(sent)] == [12, 14], "a resumed run keeps the command"
    assert not run.run.report.exists() and "  Report " not in resumed.output, (
        "the report of the earlier part is removed"
    )


@pytest.mark.slow
def test_a_rank_killed_during_the_final_sample_has_trained(launch: Launch) -> None:
    run = launch(*RUN, inject="kill@rank=0,phase=sample,step=12").ok()
    assert (run.summary["status"], run.summary["steps"], run.summary["sample"]) == (
        "done",
        12,
        None,
    )
    assert not run.run.failure.exists()


@pytest.mark.soak
def test_a_failed_run_notifies_once_after_all_restarts(launch: Launch, sent: Path) -> None:
    """A failing command does not change the outcome."""
    inject = "kill@rank=1,step=5,attempt=any"
    run = launch(
        *RUN,
        report=True,
        retries=1,
        inject=inject,
        notify=f"{notify(sent)}; echo no route >&2; exit 7",
    )
    assert run.wait() == 4
    (facts,) = messages(sent)
    assert (facts["status"], facts["exit_code"], facts["restarts"]) == ("failed", 4, 1)
    assert (facts["cause"], facts["rank"], facts["advice"]) == (
        run.failure["cause"],
        1,
        run.failure["advice"],
    )
    assert facts["text"].startswith("rank 1: killed by SIGKILL") and facts["host"]
    assert f"report: {run.run.report}\n" in run.output.split("training failed")[-1]
    assert "[WARNING]" in run.output.splitlines()[-1]
    assert run.output.endswith("--notify failed: exited with status 7: no route\n")


@pytest.mark.soak
def test_a_stopped_run_notifies(launch: Launch, sent: Path) -> None:
    run = launch(*RUN, num_iterations=100000, notify=notify(sent))
    run.wait_for("Iter: 3,")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75
    (facts,) = messages(sent)
    assert facts["status"] == "preempted" and facts["text"].startswith("stopped at step ")


def test_rejected_data_notifies(launch: Launch, sent: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    run = launch(*RUN, data=tmp_path / "short.txt", report=True, notify=notify(sent))
    assert run.wait() == 2
    (facts,) = messages(sent)
    assert (facts["status"], facts["exit_code"], facts["run_dir"], facts["report"]) == (
        "failed",
        2,
        None,
        None,
    )
    assert facts["text"].startswith("data short has ")
    assert not run.run.path.exists()


def test_a_secret_in_the_command_is_rejected_before_anything_is_written(launch: Launch) -> None:
    run = launch(*RUN, notify="curl -H 'Authorization: Bearer tk_geheim1234' https://host/")
    assert run.wait() == 2
    assert (
        "contains what looks like a secret, after 'Authorization'" in run.output
        and "$NTFY_TOKEN" in run.output
    )
    assert "geheim" not in run.output
    assert not run.run.path.exists() and not run.logs.exists()


def test_a_user_script_notifies(launch: Launch, sent: Path, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import os, sys; sys.exit(9 if os.environ['RANK'] == os.environ.get('FAILS') else 0)"
    )
    flags = {
        "notify": notify(sent),
        "script": script,
        "out_dir": tmp_path / "experiments",
        "log_dir": tmp_path / "logs",
    }
    launch("./launch_train.sh", "2", tiny=False, device="cpu", **flags).ok()
    assert (
        launch(
            "./launch_train.sh", "2", tiny=False, device="cpu", env={"FAILS": "1"}, **flags
        ).wait()
        == 4
    )
    first, second = messages(sent)
    assert (first["status"], first["exit_code"]) == ("finished", 0) and first["text"].startswith(
        "2 ranks, "
    )
    assert (second["status"], second["exit_code"], second["rank"]) == ("failed", 4, 1)


@pytest.mark.soak
def test_a_single_rank_without_a_supervisor(launch: Launch, sent: Path) -> None:
    done = launch(*ALONE, report=True, notify=notify(sent)).ok()
    assert done.run.report.exists() and f"  Report     {done.run.report}\n" in done.output
    failed = launch(*ALONE, notify=notify(sent), inject="raise@rank=0,step=5")
    assert failed.wait() == 4
    assert [(m["status"], m["exit_code"]) for m in messages(sent)] == [
        ("finished", 0),
        ("failed", 4),
    ]
    assert messages(sent)[1]["text"] == "rank 0: ValueError: injected on purpose (exit 4)"
    assert (failed.failure["cause"], failed.failure["rank"]) == ("exception", 0)
    assert card.of_run(cast("FailureRecord", failed.failure)) in failed.output
    assert "Traceback" not in failed.output


@pytest.mark.soak
def test_under_torchrun_rank_0_notifies(launch: Launch, sent: Path) -> None:
    launch(*TORCHRUN, CONFIG, notify=notify(sent)).ok()
    assert [m["status"] for m in messages(sent)] == ["finished"]


@pytest.mark.soak
def test_under_torchrun_the_failed_rank_has_the_only_card(launch: Launch) -> None:
    run = launch(*TORCHRUN, CONFIG, inject="raise@rank=1,step=3")
    assert run.wait() != 0
    found = run.failure["cause"], run.failure["rank"], run.failure["exit_code"]
    assert found == ("exception", 1, 4)
    shown = card.of_run(cast("FailureRecord", run.failure))
    assert run.output.count(shown) == 1
    summary = run.failure["summary"]
    assert run.output.count(summary) == shown.count(summary), "no traceback besides it"
    (log,) = run.logs.iterdir()
    assert shown in log.read_text()


# an expression for a hook
UNTIL_WANDB_HAS_BEGUN = (
    "list(iter(lambda: any(t.name == 'tracker W&B' and t.ready.is_set() for t in "
    "__import__('threading').enumerate()) or __import__('time').sleep(0.05), True))"
)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["STOP", "KILL"])
def test_wandb_without_its_service_is_one_warning(launch: Launch, number: str) -> None:
    """Its exit handler would wait for a frozen service until rank 0 is killed, and print a
    traceback for one that was killed."""
    strikes = f"['pkill', '-{number}', '-P', str(os.getpid()), '-x', 'wandb-core']"
    hook = in_forward(
        0,
        5,
        f"{UNTIL_WANDB_HAS_BEGUN}; __import__('subprocess').run({strikes}, check=True)",
    )
    run = launch(*RUN, wandb_mode="offline", use_dummy_wandb=None, hook=hook).ok()
    warnings = [line for line in run.output.splitlines() if "[WARNING]" in line]
    assert len([line for line in warnings if "W&B" in line]) == 1, run.output
    assert not [line for line in warnings if "rank 0" in line], "it has exited by itself"
    assert "Traceback" not in run.output
    assert list(run.run.ranks.glob("*.sock")) == []


@pytest.mark.soak
def test_a_failing_rank_0_closes_its_trackers(launch: Launch) -> None:
    """The next start continues the same W&B run."""
    fails = in_forward(0, 5, f"{UNTIL_WANDB_HAS_BEGUN}; raise ValueError('planted')")
    run = launch(*RUN, wandb_mode="offline", use_dummy_wandb=None, save_every=4, hook=fails)
    assert run.wait() == 4 and run.failure["summary"] == "ValueError: planted"
    assert "left behind by a rank" not in run.output, "its service has exited by itself"
    launch(*RUN, resume="run1", use_dummy_wandb=None).ok()
    number = (read_json(run.run.wandb_id) or {})["id"]
    parts = list(run.run.wandb.glob("offline-run-*"))
    assert len(parts) == 2 and all(part.name.endswith(f"-{number}") for part in parts)


@pytest.mark.slow
def test_a_profiled_run_has_traces_and_the_same_losses(launch: Launch) -> None:
    plain = launch(*RUN, name="plain").ok()
    run = launch(*RUN, name="profiled", profile=2, report=True).ok()
    assert run.losses == plain.losses, "the profiler only watches"
    assert not plain.run.profile.exists()
    for rank in (0, 1):
        digest = read_json(run.run.profile_digest(rank)) or {}
        assert (digest["first_step"], digest["last_step"]) == (11, 12)
        assert sum(digest["shares"].values()) == pytest.approx(1, abs=0.01)
        assert min(digest["shares"][part] for part in ("forward", "backward", "optimizer")) > 0
        trace = json.loads(gzip.decompress(run.run.trace(rank).read_bytes()))["traceEvents"]
        assert sum(e["name"] == "duet: backward" for e in trace) == 2
    page = run.run.report.read_text()
    assert 'id="profile"' in page and "aten::" in page

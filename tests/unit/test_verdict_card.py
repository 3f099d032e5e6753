"""Failure cards of hangs, exceptions and stops, and the exit codes."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.cases import each
from tests.unit.verdicts import failed, finding, new_run, plan, report_error, verdict
from training.core import find_run
from training.core.errors import Exit
from training.core.rundir import RunDir
from training.diagnose import card, full_disk, signatures
from training.diagnose.advice import of_end, of_kind, values
from training.launcher import failure_report
from training.launcher.outcome import Outcome
from training.watchdog.hang_report import DESYNC, UNEVEN
from training.watchdog.probes.stacks import Frame, Stack, Thread

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import EndRecord


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(find_run, "WORK", tmp_path)  # the run is in its experiments/
    return new_run(tmp_path)


CARD = """\
  Cause      hang: rank 1 is stuck at model.py:12, for 3.2 s
  Who        rank 1, in step 7: forward
  Where      model.py:12
  Others     rank 0: step 7: backward, waits in backward
"""


def test_failure_record_and_card_of_a_hang(run: RunDir) -> None:
    report_error(run, 0, "RuntimeError", "Connection reset by peer")  # a consequence of the hang
    record = failed(run, 0, finding=finding())
    expected = {
        "cause": "hang",
        "kind": "hang",
        "rank": 1,
        "where": "model.py:12",
        "phase": "step 7: forward",
        "since_s": 3.2,
    }
    expected |= {
        "waiting": {"0": "step 7: backward, waits in backward"},
        "stacks": "/runs/hangs/1",
        "exit_code": 5,
        "victim": False,
    }
    assert {name: record[name] for name in expected} == expected
    assert record["summary"] == "rank 1 is stuck at model.py:12, for 3.2 s"
    text = card.of_run(record)
    assert text.partition("  Try")[0] == CARD and "  Stacks     /runs/hangs/1\n" in text


def test_a_hang_without_a_guilty_rank(run: RunDir) -> None:
    report_error(run, 0, "RuntimeError", "Connection reset by peer")
    record = failed(run, 0, None, finding=finding(rank=None))
    assert record["rank"] is None and "no single rank" in card.of_run(record)


@pytest.mark.parametrize(
    ("asked", "cause"), [(Exit.INTERRUPTED, "interrupted"), (Exit.PREEMPTED, "preempted")]
)
def test_no_rank_is_guilty_of_a_stop_request(run: RunDir, asked: Exit, cause: str) -> None:
    """The ranks die of it, one of them first, perhaps with an exception."""
    report_error(run, 1, "RuntimeError", "Connection reset by peer")
    record = failed(run, -15, killed=True, asked=asked)
    assert verdict(record) == (cause, "asked", None)
    assert (record["where"], record["phase"]) == (None, None)
    assert "rank 1\n" not in card.of_run(record)


def test_advice_for_an_interrupted_script_without_a_stop_request(run: RunDir) -> None:
    """A closed terminal does not stop a run, so the advice is not about terminals."""
    report_error(run, 1, "KeyboardInterrupt", "")
    trained = failed(run)
    script = {name: value for name, value in plan().items() if name not in ("config", "batch")}
    asked = failed(run, -15, killed=True, asked=Exit.INTERRUPTED)
    by_code, by_request = (
        of_end(end, None, {}, values(run, cast("Plan", script))) for end in (trained, asked)
    )
    assert trained["cause"] == asked["cause"] == "interrupted"
    assert "checkpoint" in by_request[0] and by_code[0] == by_request[0]
    assert ["model.py:1" in sentence for sentence in by_code[1:]] == [True]
    assert by_request[1:] == asked["advice"][1:] == []
    assert trained["advice"] == ["./launch_train.sh 2 --resume=run", by_code[1]]


TORCH = "/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
IN_LOADER = (
    Frame("/usr/lib/python3.11/selectors.py", 415, "select"),
    Frame(TORCH, 1291, "_MultiProcessingDataLoaderIter._try_get_data"),
    Frame("model.py", 12, "main"),
)
IN_WANDB = (
    Frame("/usr/lib/python3.11/threading.py", 327, "Condition.wait"),
    Frame("/env/lib/python3.11/site-packages/wandb/sdk/wandb_run.py", 2282, "Run.finish"),
    Frame("model.py", 12, "main"),
)
ELSEWHERE = (Frame("model.py", 12, "main"),)


@each(
    ("frames", "retries", "named"),
    [
        (IN_LOADER, 0, {"num_workers=0", "timeout=60", "forkserver", "--retries"}),
        (IN_WANDB, 0, {"WANDB_MODE=disabled", "WANDB_MODE=offline", "--retries"}),
        (ELSEWHERE, 0, {"--retries"}),
        (ELSEWHERE, 3, set[str]()),
    ],
)
@each("language", ["en", "zh"])
def test_advice_for_a_hang_of_a_script_is_by_the_stack_of_the_rank(
    frames: tuple[Frame, ...],
    retries: int,
    named: set[str],
    language: str,
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DUET_LANG", language)
    stack = Stack(0, "py-spy", (Thread("MainThread", True, False, False, frames),))
    found = replace(finding(), stacks={1: stack})
    script = {name: value for name, value in plan().items() if name not in ("config", "batch")}
    script |= {"script": {"path": "model.py"}, "retries": {"value": retries, "reason": ""}}
    outcome = Outcome(guilty=(1, 0), here=(1, 0), finding=found)
    record = failure_report.failure(outcome, run, cast("Plan", script))
    assert "model.py:12" in record["advice"][0] and "/runs/hangs/1/rank1.txt" in record["advice"][0]
    all_of_them = "\n".join(record["advice"])
    words = [
        "num_workers=0",
        "timeout=60",
        "forkserver",
        "WANDB_MODE=disabled",
        "WANDB_MODE=offline",
        "--retries",
    ]
    assert {word for word in words if word in all_of_them} == named
    assert "--hang_timeout" in all_of_them and "--resume" not in all_of_them
    assert of_end(record, None, {}, values(run, cast("Plan", script))) == record["advice"]


def test_advice_for_a_hang_of_a_training_that_waits_for_its_workers(run: RunDir) -> None:
    stack = Stack(0, "py-spy", (Thread("MainThread", True, False, False, IN_LOADER),))
    of_run = plan()
    of_run["config"]["num_workers"] = 2
    for stacks, expected in (({1: stack}, 1), ({}, 0)):
        outcome = Outcome(guilty=(1, 0), here=(1, 0), finding=replace(finding(), stacks=stacks))
        record = failure_report.failure(outcome, run, cast("Plan", of_run))
        assert sum("--num_workers=0" in one for one in record["advice"]) == expected
        assert "DataLoader(" not in "\n".join(record["advice"])


@pytest.mark.parametrize(
    ("kind", "advice"),
    [(DESYNC, "every rank must call the same collectives"), (UNEVEN, "the same number of batches")],
)
def test_advice_for_ranks_that_differ(run: RunDir, kind: str, advice: str) -> None:
    record = failed(run, 0, finding=finding(kind))
    assert record["kind"] == kind and advice in record["advice"][0]
    assert record["summary"].startswith("rank 1 is stuck") == (kind == UNEVEN)


def test_a_reported_error_has_the_advice_of_its_signature(run: RunDir) -> None:
    """Not only the general one of its cause, which is about a rejected configuration."""
    text = "put_ does not have a deterministic implementation, but you set 'torch.use_…(True)'."
    report_error(run, 1, "RuntimeError", text)
    record = failed(run)
    assert verdict(record) == ("config_error", "error", 1)
    assert [word in " ".join(record["advice"]) for word in ("put_", "--deterministic")] == [
        True
    ] * 2


@each(
    ("kind", "message", "command"),
    [
        ("OSError", "[Errno 27] File too large", "ulimit -f unlimited "),
        ("FileExistsError", "[Errno 17] File exists: 'runs'", "os.makedirs(path"),
    ],
)
def test_advice_on_a_known_exception_precedes_the_general_one(
    run: RunDir, kind: str, message: str, command: str
) -> None:
    report_error(run, 1, kind, message)
    record = failed(run)
    assert verdict(record) == ("exception", "error", 1)
    assert record["advice"][0].startswith(command)
    assert str(run.ranks) in record["advice"][-2] and "--report-issue" in record["advice"][-1]
    assert not any("df -h" in sentence for sentence in record["advice"])


def test_a_file_limit_is_in_the_advice_on_a_file_that_could_not_be_written(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save does not report whether the disk or the limit was the reason."""
    report_error(run, 1, "RuntimeError", "[enforce fail at a.cc:6] . unexpected pos 576 vs 534")
    known = failed(run)
    most = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2_000_000, most))
    limited = failed(run)
    assert known["cause"] == limited["cause"] == "disk_full"
    assert "ulimit -f" not in " ".join(known["advice"])
    assert limited["advice"][0].startswith("ulimit -f unlimited ")
    assert "2.0 MB" in limited["advice"][0] and limited["advice"][1:] == known["advice"]


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((64, 4096), "ulimit -n 4096 "),
        ((64, resource.RLIM_INFINITY), "ulimit -n unlimited "),
        ((64, 64), None),
    ],
)
def test_the_limit_of_open_files_is_raised_only_below_the_hard_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: str | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    report_error(run, 1, "OSError", "[Errno 24] Too many open files: 'x'")
    record = failed(run)
    assert record["cause"] == "too_many_open_files" and "64" in record["advice"][0]
    assert record["advice"][0].startswith(raised or "ulimit -Hn ")
    assert len([s for s in record["advice"] if "ulimit" in s]) == 1
    assert "/proc/PID/fd" in record["advice"][1]


@pytest.mark.parametrize(("line", "saves"), [("torch.save(net, path)", 1), ("f.write(data)", 0)])
def test_a_script_fills_the_disk_of_its_own_file(
    run: RunDir, tmp_path: Path, line: str, saves: int
) -> None:
    """Its folder is named, not the run directory, which may be on another disk."""
    run.rank_log(1).write_text(f"{line}\n")
    file = tmp_path / "missing" / "out.bin"
    text = f"[Errno 28] No space left on device: '{file}'"
    report_error(run, 1, "OSError", text, disk_full=True, file=str(file))
    record = failed(run, ours=False)
    assert verdict(record) == ("disk_full", "error", 1) and record["where"] == "model.py:1"
    assert record["summary"] == f"OSError: {text}" and record["full_folder"] == str(tmp_path)
    resume = 1  # the plan of these tests has a command
    assert record["advice"][0].startswith(f"df -h {tmp_path}; ")
    assert len(record["advice"]) == 1 + saves + resume
    assert of_end(record, None, {}, {"run": "run"}) == record["advice"][: 1 + saves]


def test_a_full_disk_without_a_file(run: RunDir) -> None:
    """The system's error of a write names none: in a script nothing else is known."""
    report_error(run, 1, "OSError", "[Errno 28] No space left on device", disk_full=True)
    record = failed(run, ours=False)
    assert record["summary"] == "OSError: [Errno 28] No space left on device"
    assert "full_folder" not in record and str(run.path) not in record["summary"]
    assert str(run.path) in failed(run)["summary"]  # Duet's training writes only there


@pytest.mark.parametrize("file", [False, True])
def test_a_compiler_fills_the_disk_of_temporary_files(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: bool
) -> None:
    """In a training of Duet, whose own disk is another one."""
    monkeypatch.setattr(full_disk, "elsewhere", lambda *_: True)
    (folder := tmp_path / "torchinductor_u").mkdir()
    named: dict[str, Any] = {"file": f"{folder}/x"} if file else {}
    text = "OSError: [Errno 28] No space left on device: '/tmp/torchinductor_u/x'"
    report_error(run, 1, "InductorError", text, **named)
    record = failed(run)
    assert verdict(record) == ("disk_full", "error", 1)
    assert not any(f"free space in {tmp_path} " in sentence for sentence in record["advice"])
    assert record["full_folder"] == (str(folder) if file else "")
    general = signatures.causes()["disk_full"].advice.sentences()[0]
    assert (general in record["advice"]) != file
    assert any(f"free space in {folder}," in sentence for sentence in record["advice"]) == file


def test_a_disk_that_has_become_read_only(run: RunDir) -> None:
    report_error(run, 1, "OSError", "[Errno 30] Read-only file system: '/runs/x'")
    record = failed(run)
    assert verdict(record) == ("exception", "error", 1)
    assert any("dmesg" in sentence for sentence in record["advice"])
    assert not any("chmod" in sentence for sentence in record["advice"])


def test_duets_training_names_another_disk(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"[Errno 28] No space left on device: '{tmp_path}/x'"
    report_error(run, 1, "OSError", text, disk_full=True, file=f"{tmp_path}/x")
    same = failed(run)
    assert str(run.path) in same["summary"] and "full_folder" not in same
    monkeypatch.setattr(full_disk, "elsewhere", lambda *_: True)
    other = failed(run)
    assert other["summary"] == f"OSError: {text}" and other["full_folder"] == str(tmp_path)


@pytest.mark.parametrize(
    ("places", "root"),
    [
        (("broadcast at a.py:3", "broadcast at a.py:3"), True),
        (("broadcast at a.py:3", "reduce at a.py:3"), False),
        (("broadcast at a.py:3", "all_reduce at a.py:3"), False),
        (("all_reduce at broadcast.py:3", "all_reduce at broadcast.py:3"), False),
    ],
)
def test_a_collective_with_a_root_has_advice_on_it(
    run: RunDir, places: tuple[str, str], root: bool
) -> None:
    waiting = {rank: f"waits in {place} (main)" for rank, place in enumerate(places)}
    record = failed(run, 0, None, finding=replace(finding(rank=None), waiting=waiting))
    assert (of_kind("root", {})[0] == record["advice"][0]) == root


def test_a_card_without_evidence_has_no_section_for_it(run: RunDir) -> None:
    record = failed(run, -9)
    assert "Evidence" not in card.of_run(record) and "Stacks" not in card.of_run(record)
    run.rank_log(1).write_text("last line\n    ~~~~^^^\n")
    lines = card.of_run(failed(run, -9)).split("\n")
    (at,) = (i for i, line in enumerate(lines) if line.startswith("  Evidence   "))
    assert lines[at + 1] == "      │ last line" and lines[at + 2].startswith("  Try")


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(ended=[(0, 0), (1, 0)]), 0),
        (Outcome(ended=[(0, 75), (1, 75)]), 75),
        (Outcome(guilty=(1, -9)), 4),
        (Outcome(guilty=(1, 2)), 2),
        (Outcome(guilty=(1, 2), ours=False), 4),
        (Outcome(guilty=(1, 0), finding=finding()), 5),
        (Outcome(guilty=(1, -15), asked=Exit.PREEMPTED), 75),
        (Outcome(killed=True, asked=Exit.INTERRUPTED), 130),
        # a watched command ends by itself, or is ended because of a rank
        (Outcome(watched="x", ours=False, ended=[(None, 3)], guilty=(1, 0), here=(None, 3)), 3),
        (Outcome(watched="x", ours=False, ended=[(None, -9)], guilty=(1, 1), here=(1, 1)), 4),
    ],
)
def test_exit_codes(outcome: Outcome, code: int) -> None:
    assert failure_report.exit_code(outcome) == code


def test_ranks_that_wait_in_different_places_get_advice_on_branches(run: RunDir) -> None:
    uneven = failed(run, 0, finding=finding(UNEVEN))["advice"]
    branch = failed(run, 0, None, finding=finding(UNEVEN, None))["advice"]
    assert branch[1:] == uneven and "if rank == 0" in branch[0]


def test_advice_on_nan_has_the_halved_learning_rates(run: RunDir) -> None:
    rates = {"matrix_lr": "auto", "embedding_lr": 0.3, "unembedding_lr": 0.0, "optimizer": "muon"}
    of_run = plan()
    of_run["config"] |= rates
    known = values(run, cast("Plan", of_run))
    slower = "./launch_train.sh 2 --resume=run --matrix_lr=0.01 --embedding_lr=0.15"
    assert known["slower_command"] == slower
    end = {"cause": "nan_loss", "kind": "error", "phase": None, "summary": ""}
    first = of_end(cast("EndRecord", end), None, {}, known)[0]
    assert first.endswith(f": {slower}")


def test_a_user_s_task_has_learning_rates_of_its_own(run: RunDir) -> None:
    options = {"lr": 0.5, "head_lr": 1e-3, "learning_rate": 0, "scale": 2.0}
    task = {"name": "mine.py", "unit": "samples", "file": "mine.py", "options": options}
    known = values(run, cast("Plan", plan(task=task)))
    assert known["slower_command"].endswith("--lr=0.25 --head_lr=0.0005")


@each("cause", ["gpu_hardware", "batch_not_divisible"])
def test_commands_in_advice_are_complete(run: RunDir, cause: str) -> None:
    end = {"cause": cause, "kind": "error", "phase": None, "summary": ""}
    sentences = of_end(cast("EndRecord", end), None, {}, values(run, cast("Plan", plan())))
    commands = [s.partition("./launch_train.sh ")[2] for s in sentences if "./launch" in s]
    flag = {"gpu_hardware": "--check", "batch_not_divisible": "--dry_run"}[cause]
    assert commands == [f"2 --resume=run {flag}"]


def test_an_error_that_all_ranks_report_is_not_that_of_one(run: RunDir) -> None:
    missing = ("ModuleNotFoundError", "No module named 'absent'")
    for rank in (0, 1):
        report_error(run, rank, *missing, where="main.py:1")
    record = failed(run)
    assert (record["rank"], record["ranks"]) == (1, [0, 1])
    shown = card.of_run(record)
    assert "ranks 0, 1, in" in shown and "Others" not in shown
    report_error(run, 0, *missing, where="main.py:2")
    assert "ranks" not in failed(run)


def test_a_rank_that_only_noticed_the_error_of_another_does_not_share_it(run: RunDir) -> None:
    for rank in (0, 1):
        report_error(run, rank, "NotFinite", "loss is nan on rank 1", guilty=1, where="")
    record = failed(run)
    assert record["rank"] == 1 and "ranks" not in record

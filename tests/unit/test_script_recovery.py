"""Restarts of user scripts: which failures are tried again, and what the script has saved."""

from __future__ import annotations

import json
import os
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from tests.cases import each
from training.core.cause_ids import KILLED, RAISED
from training.launcher import replan, script_snapshot
from training.launcher.recovery_policy import NEVER
from training.launcher.restart import Failure, GiveUp, Restart
from training.launcher.script_recovery import remedy
from training.launcher.script_snapshot import Snapshot

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

PLAN = cast("Plan", {"retries": {"value": 2, "reason": "as asked"}})
KILL = Failure(KILLED, "died", 1, -9, 0, 0, "", "killed by SIGKILL")
RAISE = Failure(RAISED, "error", 0, 1, 0, 0, "", "ValueError: planted")


ELASTIC = {
    "min_ranks": 2,
    "ranks": 3,
    "device_batch_size": None,
    "bindings": [],
    "seats": [0, 1, 2],
    "lost": [],
    "rejoined": [],
}


def test_which_failures_are_tried_again() -> None:
    assert remedy(KILL, PLAN, []) == Restart(1)
    assert remedy(KILL, PLAN, [KILL]) == Restart(2), "a signal may not come again"
    assert isinstance(remedy(KILL, PLAN, [KILL, KILL]), GiveUp)
    assert remedy(RAISE, PLAN, []) == Restart(1), "as under torchrun"
    assert isinstance(remedy(RAISE, PLAN, [RAISE]), GiveUp), "the same exception"
    assert remedy(replace(RAISE, summary="OSError: other"), PLAN, [RAISE]) == Restart(2)
    full = replace(RAISE, cause="disk_full")
    assert remedy(full, PLAN, []) == GiveUp(NEVER["disk_full"])
    memory = replace(RAISE, cause="host_oom_killed")
    assert remedy(memory, PLAN, []) == GiveUp(NEVER["host_oom_killed"])
    assert remedy(replace(memory, worker=True), PLAN, []) == Restart(1)
    for below in (replace(memory, oom_kill=True), replace(memory, oom_kill=True, status=137)):
        assert remedy(below, PLAN, []) == Restart(1), "a process that the rank has started"
        assert remedy(below, PLAN, [below]) == Restart(2), "as one of the rank itself"
    for status in (-6, -7, -9, -11):
        broken = replace(KILL, cause="gpu_hardware", status=status)
        assert remedy(broken, PLAN, []) == GiveUp(NEVER["gpu_hardware"])
    assert remedy(replace(KILL, cause="host_oom_killed"), PLAN, []) == Restart(1)
    network = replace(RAISE, cause="nccl_network")
    assert [remedy(network, PLAN, [network] * n) for n in (0, 1)] == [
        Restart(1, pause_s=1.0),
        Restart(2, pause_s=5.0),
    ]
    port = replace(RAISE, cause="port_in_use")
    assert remedy(port, PLAN, []) == Restart(1, pause_s=1.0)
    assert isinstance(remedy(replace(port, spawns=True), PLAN, []), GiveUp), "of its other ranks"
    desync = Failure("collective_timeout", "desync", None, -6, 0, 0, "", "other collectives")
    assert remedy(desync, PLAN, []) == Restart(1, pause_s=1.0)
    assert isinstance(remedy(desync, PLAN, [desync]), GiveUp), "a code error recurs"
    none = cast("Plan", {"retries": {"value": 0, "reason": ""}})
    assert remedy(KILL, none, []) == GiveUp("")


def test_the_same_exception_is_tried_again_after_a_newer_checkpoint() -> None:
    plan = cast("Plan", {"retries": {"value": 3, "reason": "as asked"}})
    third, sixth = (Snapshot(Path("last.pt"), n, f"epoch {n}") for n in (3.0, 6.0))
    none, first, second = (replace(RAISE, snapshot=s) for s in (None, third, sixth))
    assert remedy(second, plan, [none, first]) == Restart(3)
    again = GiveUp("the same failure for the second time")
    assert remedy(second, plan, [none, first, second]) == again
    rewritten = replace(second, snapshot=replace(sixth, written=7.0))
    assert remedy(rewritten, plan, [second]) == again, "the same epoch"
    earlier = replace(first, snapshot=replace(third, written=7.0))
    assert remedy(earlier, plan, [second]) == again, "from the beginning"


def test_the_same_exception_is_tried_again_after_later_steps() -> None:
    """Its checkpoints may be in a folder of its configuration file."""
    again = GiveUp("the same failure for the second time")
    before = replace(RAISE, printed=(11, 12))
    for steps, expected in {
        (74, 75): Restart(2, pause_s=0.0),
        (12, 13): again,  # by another rank, which is one step further this time
        (4, 5): again,
        (): again,
    }.items():
        assert remedy(replace(RAISE, printed=steps), PLAN, [before]) == expected
    assert remedy(before, PLAN, [RAISE]) == again, "nothing was printed before"


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("step 9", "step 10", True),
        ("step 10", "step 9", False),
        ("epoch 1, step 90", "epoch 2, step 10", True),
        ("step 90, epoch 1", "epoch 2, step 10", True),
        ("epoch 2, step 10", "epoch 1, step 90", False),
        ("epoch -1", "epoch 0", True),
        ("checkpoint 500", "epoch 1", True),  # not comparable
    ],
)
def test_checkpoints_are_compared_by_their_numbers(before: str, now: str, expected: bool) -> None:
    old, new = (Snapshot(Path("last.pt"), 1.0, text) for text in (before, now))
    assert script_snapshot.moved(old, new) is expected


@pytest.mark.parametrize(
    ("folder", "progress", "expected"),
    [
        ("out/fold0/step_8", "epoch 3", False),
        ("out/fold0/step_3", "epoch 3", False),
        ("out/fold1/step_3", "epoch 3", True),
        ("out/fold1/step_8", "epoch 8", True),  # the last epoch of each fold
        ("out/fold0/best", "epoch 8", False),
        ("out/other0", "epoch 8", False),
    ],
)
def test_a_checkpoint_in_another_folder(folder: str, progress: str, expected: bool) -> None:
    """A script of several folds or phases counts from the beginning in each."""
    old = Snapshot(Path("out/fold0/step_8/last.pt"), 1.0, "epoch 8")
    new = Snapshot(Path(folder, "last.pt"), 2.0, progress)
    assert script_snapshot.moved(old, new) is expected


@each(
    ("before", "now", "expected"),
    [
        ("logs/version_0/checkpoints", "logs/version_1/checkpoints", False),  # Lightning
        ("outputs/2026-11-30/10-00-00", "outputs/2026-11-30/10-20-00", False),  # Hydra
        ("runs/Nov30_10-00-00_host", "runs/Nov30_10-20-00_host", False),
        ("out/run_20261130_1000", "out/run_20261130_1020", False),
        ("out/1130_100000", "out/1130_102000", False),
        ("out/261130_100000", "out/261130_102000", False),
        ("out/2026-11-30_10.00.00", "out/2026-11-30_10.20.00", False),
        ("out/2026-11-30 10:00:00.123456", "out/2026-11-30 10:20:00.654321", False),
        ("out/20261130-100000.123456", "out/20261130-102000.654321", False),
        ("out/1764500000.12", "out/1764501000.55", False),
        ("project/4f0kx2ab/checkpoints", "project/x71b0kza/checkpoints", False),  # W&B
        ("runs/detect/train/weights", "runs/detect/train2/weights", False),  # YOLO
        ("out/best", "out/last", False),
        ("out/step_8", "out", False),
        ("out/ckpt_500", "out/ckpt_300", False),
        ("out/model_10", "out/model_9", False),
        ("out/0005", "out/0003", False),
        ("out/model_1", "out/model_2", True),  # of an ensemble
        ("out/fold_09", "out/fold_10", True),
        ("cv/05-01", "cv/05-02", True),
        ("out/10_20", "out/10_21", True),
        ("out/phase001", "out/finetun2", True),
        ("out/version_0/phase1", "out/version_0/phase2", True),
        ("cv/fold1of5", "cv/fold2of5", True),
        ("out/gpt2tiny", "out/gpt3tiny", True),
        ("out/pretrain/best", "out/finetune/last", True),
        ("out/train", "out/finetune", True),
    ],
)
def test_smaller_numbers_in_another_folder(before: str, now: str, expected: bool) -> None:
    """A script that repeats its work may have a new folder too."""
    old = Snapshot(Path("/w", before, "a.pt"), 1.0, "epoch 8")
    new = Snapshot(Path("/w", now, "a.pt"), 2.0, "epoch 3")
    assert script_snapshot.moved(old, new) is expected


@each(
    ("before", "now", "expected"),
    [
        ("sacred/3", "sacred/4", False),
        ("out/name-1", "out/name-2", False),
        ("out/00000-name-x", "out/00001-name-x", False),
        ("out/job_481", "out/job_482", False),
        ("out/pid12345", "out/pid12390", False),
        ("out/100000", "out/102000", False),
        ("out/2026-11-30_10h00m00s", "out/2026-11-30_10h20m00s", False),
        ("out/2026-11-30 10:00", "out/2026-11-30 10:20", False),
        ("cv/fold0/run-a-3", "cv/fold0/run-a-4", False),
        ("out/scaffold-3", "out/scaffold-4", False),
        ("cv/fold1of5", "cv/fold2of5", True),
        ("out/fold_09/weights", "out/fold_10/weights", True),
        ("out/folds/3/weights", "out/folds/4/weights", True),
        ("cv/05-01", "cv/05-02", True),
        ("out/kfold=3", "out/kfold=4", True),
        ("out/Stage-1", "out/Stage-2", True),
    ],
)
def test_equal_numbers_in_a_later_folder(before: str, now: str, expected: bool) -> None:
    """A script that repeats its work numbers its folders, so only one of a fold or phase counts."""
    old, new = (Snapshot(Path("/w", folder, "a.pt"), 1.0, "epoch 8") for folder in (before, now))
    assert script_snapshot.moved(old, new) is expected


def test_a_script_continues_without_a_lost_gpu() -> None:
    gpus = [{"index": n, "uuid": f"GPU-000000a{n}", "name": "Card"} for n in range(4)]
    elastic = ELASTIC | {"gpus": gpus}  # one without a rank
    begun = {"ranks": 3, "local_ranks": 3, "gpus": gpus[:3], "variables": [], "config": {}}
    plan = cast("Plan", {**PLAN, **begun, "place": {"nnodes": 1}, "elastic": elastic})
    lost = replace(RAISE, cause="gpu_hardware", rank=1)
    chosen = remedy(lost, plan, [KILL, KILL])
    assert isinstance(chosen, Restart) and chosen.team and chosen.number == 0
    fewer = replan.with_team(plan, chosen.team, chosen.why)
    assert (fewer["ranks"], fewer["elastic"]["seats"]) == (2, [0, 2])
    (variable,) = fewer["variables"]
    assert variable["value"] == "GPU-000000a0,GPU-000000a2,GPU-000000a3"
    assert isinstance(remedy(lost, fewer, []), GiveUp), "below the minimum"
    assert remedy(KILL, fewer, [replace(lost, changed=True), KILL]) == Restart(2)


def test_a_rank_that_fails_again_after_progress_is_left_out() -> None:
    elastic = ELASTIC | {"gpus": [], "ranks": 2, "min_ranks": 1, "seats": [0, 1]}
    begun = {"ranks": 2, "local_ranks": 2, "gpus": [], "variables": [], "config": {}}
    plan = cast("Plan", {**PLAN, **begun, "place": {"nnodes": 1}, "elastic": elastic})
    kernel = replace(RAISE, cause="cuda_device_assert", rank=1, suspect_gpu=True)
    assert remedy(kernel, plan, []) == Restart(1)
    assert isinstance(remedy(kernel, plan, [kernel]), GiveUp), "the same exception"
    path = Path("snapshot.pt")
    old, new = Snapshot(path, 1.0, "epoch 1"), Snapshot(path, 2.0, "epoch 2")
    for failure in (KILL, kernel):
        for first, second, lost in (
            (None, old, True),
            (old, new, True),
            (old, replace(old, written=3.0), False),  # the same work again
            (replace(old, progress=""), replace(old, written=3.0), True),
            (old, old, False),
            (old, None, False),
        ):
            before = replace(failure, snapshot=first)
            chosen = remedy(replace(failure, snapshot=second), plan, [before])
            assert bool(isinstance(chosen, Restart) and chosen.team) is lost, (first, second)


def test_the_newest_checkpoint_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    (out / "checkpoint-40").mkdir(parents=True)
    old = work / "old.pt"
    old.write_bytes(b"")
    os.utime(old, (1.0, 1.0))
    since = time.time() - 60
    words = ["--epochs=3", f"--out={out}", "--name=x"]
    assert script_snapshot.search(str(work), words, since)[0] is None
    torch.save({"MODEL_STATE": {"w": torch.zeros(3)}, "EPOCHS_RUN": 7}, work / "snapshot.pt")
    found = script_snapshot.search(str(work), words, since)[0]
    assert found and (found.path.name, found.progress) == ("snapshot.pt", "epoch 7")
    state = out / "checkpoint-40/trainer_state.json"
    state.write_text(json.dumps({"global_step": 40, "epoch": 1.5}))
    os.utime(state, (time.time() + 5,) * 2)
    found = script_snapshot.search(str(work), words, since)[0]
    assert found and (found.path.name, found.progress) == ("checkpoint-40", "step 40")


def test_a_checkpoint_beside_and_deep_below_crowded_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_snapshot, "CROWDED", 10)
    monkeypatch.setattr(script_snapshot, "MOST_ENTRIES", 60)
    for folder in ("data/train", "data", "more"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for number in range(11):
            (tmp_path / folder / f"{number}.pt").touch()
    deep = tmp_path / "runs/a/b/c/d/e/f/checkpoints"
    deep.mkdir(parents=True)
    (deep / "last.pt").touch()
    found = script_snapshot.search(str(tmp_path), [], 0.0)[0]
    assert found and found.path == deep / "last.pt"


def test_a_search_that_stops_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = cast(
        "Plan",
        {"command": {"cwd": str(tmp_path)}, "script": {"args": []}, "created": time.time() + 60},
    )
    (tmp_path / "notes.txt").touch()
    assert script_snapshot.look(plan) == (None, "no checkpoint of this launch was found")
    monkeypatch.setattr(script_snapshot, "MOST_ENTRIES", 1)
    assert script_snapshot.look(plan) == (
        None,
        f"no checkpoint of this launch was found in the first 1 files below {tmp_path}, "
        "where the search stopped",
    )


@pytest.mark.parametrize(
    ("counters", "progress"),
    [
        ({"epoch": 0, "global_step": 20}, "epoch 0, step 20"),  # Lightning
        ({"global_steps": 20, "iter_num": 40}, "step 20, iter 40"),  # DeepSpeed
    ],
)
def test_a_checkpoint_within_an_epoch_is_progress(
    tmp_path: Path, counters: dict[str, int], progress: str
) -> None:
    import torch

    before = None
    for later in (0, 1):
        torch.save(
            {name: n + later * (name != "epoch") for name, n in counters.items()},
            tmp_path / "last.ckpt",
        )
        now = script_snapshot.search(str(tmp_path), [], 0.0)[0]
        assert script_snapshot.moved(before, now) and now and (later or now.progress == progress)
        before = now


@pytest.mark.parametrize("first", ["optimizer", "step"])
def test_the_step_of_a_script_is_not_that_of_its_optimizer(tmp_path: Path, first: str) -> None:
    """Adam has a tensor named `step` for each parameter. The second `step` in the file is a
    reference to the first one."""
    import torch

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "step": 4711}
    torch.save({first: state[first]} | state, tmp_path / "snapshot.pt")
    assert script_snapshot.progress(tmp_path / "snapshot.pt") == "step 4711"


def test_progress_of_files_that_cannot_be_read(tmp_path: Path) -> None:
    names = {"epoch=3-step=40.ckpt": "epoch 3, step 40", "model.safetensors": ""}
    for name, progress in names.items():
        (tmp_path / name).write_bytes(b"half a file")
        assert script_snapshot.progress(tmp_path / name) == progress
    (tmp_path / "checkpoint-12").mkdir()
    assert script_snapshot.progress(tmp_path / "checkpoint-12") == "checkpoint 12"
    (tmp_path / "checkpoint-12/trainer_state.json").write_text("[]")
    assert script_snapshot.progress(tmp_path / "checkpoint-12") == "checkpoint 12"


@pytest.mark.parametrize(
    ("member", "content"), [("version", b"3"), ("archive/data.pkl", b"\x80\x02\xff")]
)
def test_an_archive_of_another_program_is_a_checkpoint_without_progress(
    tmp_path: Path, member: str, content: bytes
) -> None:
    with zipfile.ZipFile(tmp_path / "other.ckpt", "w") as archive:
        archive.writestr(member, content)
    found = script_snapshot.search(str(tmp_path), [], 0.0)[0]
    assert found and (found.path.name, found.progress) == ("other.ckpt", "")


def test_a_damaged_archive_is_a_checkpoint_without_progress(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0123456789" * 100)
    data = bytearray(path.read_bytes())
    begin = len("archive/data.pkl") + 30  # of the compressed data, after the local header
    data[begin : begin + 8] = b"\xff" * 8
    path.write_bytes(data)
    assert script_snapshot.progress(path) == ""


def test_an_argument_may_be_longer_than_a_name_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_bytes(b"")
    words = ["--config=" + '{"lr": 1}' * 40, "--prompt", "once upon a time " * 300]
    found = script_snapshot.search(str(tmp_path), words, 0.0)[0]
    assert found and found.path.name == "last.pt"

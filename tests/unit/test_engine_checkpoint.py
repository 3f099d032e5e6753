from __future__ import annotations

import errno
import json
import math
import os
import random
import resource
import shutil
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from training.config.schema import Config
from training.core import checkpoint_folder, manifest
from training.core.errors import UserError
from training.tasks import optim
from training.tasks.base import Task
from training.tasks.gpt import optim as gpt_optim
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims
from training.trainer import checkpoint
from training.trainer.checkpoint import TrainProgress

SHAPE = ModelDims(1, 64, 8)
FACTS = {
    "shape": asdict(SHAPE),
    "optimizer": "muon",
    "world_size": 2,
    "run": "x",
    "data": {},
    "tokenizer": "bytes",
}
Parts = tuple[GPT, optim.Optimizers]


@pytest.fixture
def parts() -> Parts:
    model = GPT(SHAPE)
    optimizer = gpt_optim.build(model, Config())
    tokens = torch.randint(0, 64, (2, 8))
    model(tokens, tokens).backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, step: int, parts: Parts, keep: int = 3) -> Path:
    state = {"model": parts[0].state_dict(), "optimizer": parts[1].state_dict()}
    path = checkpoint.save(folder, TrainProgress(step, 1, step, 8 * step), state, FACTS)
    assert checkpoint.prune(path, keep) == ""
    return path


def test_round_trip_is_exact(tmp_path: Path, parts: Parts) -> None:
    save(tmp_path, 7, parts)
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position == TrainProgress(7, 1, 7, 56) and not loaded.skipped
    for name, value in parts[0].state_dict().items():
        assert torch.equal(loaded.state["model"][name], value)
    for saved, part in zip(loaded.state["optimizer"], parts[1].state_dict(), strict=True):
        for index, moments in part["state"].items():
            assert moments and all(
                torch.equal(saved["state"][index][name], value) for name, value in moments.items()
            )


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, (1, 2)])
def test_facts_that_json_lacks_leave_a_valid_checkpoint(
    tmp_path: Path, parts: Parts, value: Any
) -> None:
    """A user's task may have them; its data count as the same when the run is resumed."""
    facts: Any = FACTS | {"shape": {"scale": value}, "data": {"mean": [value]}}
    checkpoint.save(tmp_path, TrainProgress(1), {"model": parts[0].state_dict()}, facts)
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position.step == 1 and not loaded.skipped

    class Own(Task):
        def facts(self) -> Any:
            return facts

    Own.__abstractmethods__ = frozenset()
    task = Own(SimpleNamespace(), Config(), torch.device("cpu"))  # type: ignore[abstract]
    assert task.same_data(loaded.manifest)
    facts["data"] = {"mean": [2.0]}
    assert not task.same_data(loaded.manifest)


def test_facts_that_json_lacks_are_read_in_every_form(tmp_path: Path, parts: Parts) -> None:
    """Early versions wrote a bare NaN, or its name with the checksum of the bare one."""
    facts: Any = FACTS | {"data": {"mean": math.nan, "range": [-math.inf, math.inf]}}
    path = checkpoint.save(tmp_path, TrainProgress(1), {"model": parts[0].state_dict()}, facts)
    file = path / manifest.NAME
    stored = json.loads(file.read_text())
    del stored[manifest.OWN_SHA256]
    bare = {**stored, "data": facts["data"]}
    sealed = {manifest.OWN_SHA256: manifest._checksum(bare)}
    for form in (bare, stored):
        file.write_text(json.dumps({**form, **sealed}))
        loaded = checkpoint.latest(tmp_path)
        assert loaded and not loaded.skipped
        manifest.rewrite(path, json.loads(file.read_text()))  # as on another machine
        assert manifest.read(path)[0] is not None
        file.write_text(json.dumps({**form, **sealed, "step": 2}))
        assert manifest.read(path)[0] is None


def test_any_flipped_bit_is_detected(tmp_path: Path, parts: Parts) -> None:
    save(tmp_path, 1, parts)
    state = save(tmp_path, 2, parts) / "state.pt"
    good = state.read_bytes()
    chooser = random.Random(0)
    for _ in range(20):
        bad = bytearray(good)
        bad[chooser.randrange(len(bad))] ^= 1 << chooser.randrange(8)
        state.write_bytes(bad)
        loaded = checkpoint.latest(tmp_path)
        assert loaded and loaded.position.step == 1
        assert "step_00000002" in loaded.skipped[0] and "checksum" in loaded.skipped[0]


@pytest.mark.parametrize(
    "damage", ["truncated", "no state", "no manifest", "half a manifest", "another format"]
)
def test_damage_is_reported_and_the_previous_checkpoint_used(
    tmp_path: Path, parts: Parts, damage: str
) -> None:
    save(tmp_path, 1, parts)
    newest = save(tmp_path, 2, parts)
    if damage == "truncated":
        (newest / "state.pt").write_bytes((newest / "state.pt").read_bytes()[:-10])
    elif damage == "no state":
        (newest / "state.pt").unlink()
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    elif damage == "another format":
        (newest / "manifest.json").write_text('{"format": 1}')
    else:
        (newest / "manifest.json").write_text('{"format": 1, "st')
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position.step == 1 and len(loaded.skipped) == 1


def test_only_damaged_checkpoints_are_an_error(tmp_path: Path, parts: Parts) -> None:
    (save(tmp_path, 1, parts) / "state.pt").write_bytes(b"")
    with pytest.raises(UserError, match="every checkpoint"):
        checkpoint.latest(tmp_path)


@pytest.mark.parametrize("keep", [1, 3])
def test_old_checkpoints_are_pruned_after_the_new_one_is_saved(tmp_path: Path, keep: int) -> None:
    for step in range(1, 6):
        checkpoint.prune(checkpoint.save(tmp_path, TrainProgress(step), {}, FACTS), keep)
        kept = range(max(1, step - keep + 1), step + 1)
        assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_{n:08d}" for n in kept]


def test_files_of_the_user_are_kept(tmp_path: Path, parts: Parts) -> None:
    copy = shutil.copytree(save(tmp_path, 1, parts), tmp_path / "step_00000001.mine")
    (tmp_path / "step_00000002.tar").touch()
    (tmp_path / "step_00000003").touch()
    for step in (4, 5):
        save(tmp_path, step, parts, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        copy.name,
        "step_00000002.tar",
        "step_00000003",
        "step_00000005",
    ]
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position.step == 5 and not loaded.skipped


def test_a_large_state_is_synced_in_parts(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synced all at once at the end, it could exceed the hang timeout of a save; one tensor can be
    most of it."""
    events: list[str] = []
    sync = os.fdatasync
    monkeypatch.setattr(checkpoint, "SYNCED", 4096)
    monkeypatch.setattr(os, "fdatasync", lambda file: (events.append("on the disk"), sync(file)))
    state = {"weights": torch.arange(10_000, dtype=torch.float32)}
    path = checkpoint.save(tmp_path, TrainProgress(1), state, FACTS, lambda: events.append("moved"))
    assert events.count("on the disk") >= 9, "of 40 kB"
    assert all(events[i + 1] == "moved" for i, what in enumerate(events) if what == "on the disk")
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.path == path and torch.equal(loaded.state["weights"], state["weights"])


def test_a_checkpoint_that_cannot_be_removed_is_reported(tmp_path: Path, parts: Parts) -> None:
    elsewhere = save(tmp_path, 1, parts).rename(tmp_path / "elsewhere")
    (tmp_path / "step_00000001").symlink_to(elsewhere)  # rejected by rmtree
    save(tmp_path, 2, parts, keep=9)
    text = checkpoint.prune(checkpoint.save(tmp_path, TrainProgress(3), {}, FACTS), 1)
    assert (
        text == f"old checkpoints cannot be removed: {tmp_path / 'step_00000001'}: a symbolic link"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "elsewhere",
        "step_00000001",
        "step_00000003",
    ]


def test_a_file_that_cannot_grow_is_reported_as_a_disk_error(tmp_path: Path, parts: Parts) -> None:
    """The kernel refuses in the middle of torch.save, which hides the reason in an error of its
    own."""
    save(tmp_path, 1, parts)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        with pytest.raises(OSError) as caught:
            save(tmp_path, 2, parts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.errno == errno.EFBIG
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_an_error_of_torch_is_not_reported_as_a_disk_error(tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, AttributeError, TypeError)):
        checkpoint.save(tmp_path, TrainProgress(1), {"w": threading.Lock()}, FACTS)
    assert not list(tmp_path.iterdir())


def test_files_are_synced_before_the_folder_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, bool]] = []
    real = os.fsync

    def noted(handle: int) -> None:
        synced.append((os.fstat(handle).st_ino, any(tmp_path.glob("step_*"))))
        real(handle)

    monkeypatch.setattr(checkpoint.os, "fsync", noted)
    path = checkpoint.save(tmp_path, TrainProgress(1), {}, FACTS)
    assert (path.stat().st_ino, False) in synced and synced[-1] == (tmp_path.stat().st_ino, True)


def test_a_failed_save_keeps_earlier_checkpoints_and_leaves_nothing(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, parts)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2, parts)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_step_that_is_saved_again_is_there_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """Removing gigabytes takes long: a process that is killed then has published the new one."""
    work, final = tmp_path / ".writing-x", tmp_path / "step_00000001"
    for folder in (work, final):
        folder.mkdir()
        (folder / "state.pt").write_text(folder.name)
    if not exchanges:
        monkeypatch.setattr(checkpoint_folder, "_exchange", lambda *_: False)
    remove, found = shutil.rmtree, []

    def killed(path: Path, **more: Any) -> None:
        if path.exists():
            found.append((final / "state.pt").read_text())
        remove(path, **more)

    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", killed)
    checkpoint_folder.publish(work, final)
    assert found == [".writing-x"] and [p.name for p in tmp_path.iterdir()] == [final.name]
    assert checkpoint_folder._exchange(tmp_path / "a", tmp_path / "b") is False


def test_saving_a_step_again_replaces_it(tmp_path: Path, parts: Parts) -> None:
    save(tmp_path, 1, parts)
    save(tmp_path, 1, parts)
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position.step == 1


@pytest.mark.parametrize("act", ["prune", "save again"])
def test_a_kill_during_removal_leaves_no_partial_checkpoint(
    tmp_path: Path, parts: Parts, act: str
) -> None:
    paths = [save(tmp_path, step, parts) for step in (1, 2, 3)]
    child = os.fork()
    if not child:  # a separate process, which dies at the first file it removes
        real = os.unlink

        def last(*args: Any, **more: Any) -> None:
            real(*args, **more)
            os.kill(os.getpid(), signal.SIGKILL)

        os.unlink = last
        try:
            checkpoint.prune(paths[-1], 1) if act == "prune" else checkpoint.save(
                tmp_path, TrainProgress(3), {}, FACTS
            )
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = manifest.all_in(tmp_path)
    assert left == (paths[1:] if act == "prune" else paths)
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.path == left[-1] and not loaded.skipped
    assert all(
        {"state.pt", "manifest.json"} == {file.name for file in path.iterdir()} for path in left
    )
    checkpoint_folder.remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == left


def test_leftovers_of_a_killed_save_are_ignored(tmp_path: Path, parts: Parts) -> None:
    whole = save(tmp_path, 1, parts)
    shutil.copytree(whole, tmp_path / ".writing-abc")
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.path == whole


def test_the_step_of_a_cut_save_is_known(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, parts)
    child = os.fork()
    if not child:  # a separate process, which dies while it writes
        try:
            monkeypatch.setattr(
                checkpoint_folder, "publish", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            )
            save(tmp_path, 5, parts)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    # being removed, replaced by a complete one, of an earlier version, and of another machine
    for name in ("step_00000007", "step_00000001-abc", "k3d_0x", "replica"):
        (tmp_path / f".writing-{name}").mkdir()
    assert checkpoint_folder.cut_saves(tmp_path) == [5]
    checkpoint_folder.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_data_that_reads_back_differently_is_not_a_checkpoint(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All earlier checkpoints are kept: pruning waits until the new one is verified."""
    for step in (1, 2):
        save(tmp_path, step, parts, keep=2)
    monkeypatch.setattr(manifest, "sha256", lambda *args: "something else")
    with pytest.raises(OSError, match="differs from what was written"):
        save(tmp_path, 3, parts, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


@pytest.mark.parametrize("change", ["step", "used", "sha256", "lost key", "another folder"])
def test_a_changed_manifest_is_detected(tmp_path: Path, parts: Parts, change: str) -> None:
    save(tmp_path, 1, parts)
    newest = save(tmp_path, 2, parts)
    facts = json.loads((newest / "manifest.json").read_text())
    if change == "lost key":
        del facts["used"]
    elif change == "another folder":
        newest.rename(tmp_path / "step_00000009")
    else:
        facts[change] = 1
    if change != "another folder":
        (newest / "manifest.json").write_text(json.dumps(facts))
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position.step == 1 and len(loaded.skipped) == 1


def test_a_new_checkpoint_is_kept_and_later_ones_are_pruned(tmp_path: Path, parts: Parts) -> None:
    """A resume from step 2, since step 9 was damaged."""
    *_, damaged = (save(tmp_path, step, parts) for step in (1, 2, 9))
    checkpoint.prune(save(tmp_path, 5, parts), 1, discarded=[damaged])
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]


def test_a_checkpoint_with_foreign_objects_is_skipped(tmp_path: Path, parts: Parts) -> None:
    save(tmp_path, 1, parts)
    checkpoint.save(tmp_path, TrainProgress(2, 0, 0, 0), {"lr": np.float64(0.5)}, FACTS)  # type: ignore[dict-item]
    found = checkpoint.latest(tmp_path)
    assert found and found.position.step == 1
    assert found.skipped[0].startswith("step_00000002: ")

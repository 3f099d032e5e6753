"""Checkpoints on a disk or file server that returns errors, or cannot exchange two names."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.test_engine_checkpoint import FACTS
from training.core import checkpoint_folder, manifest
from training.core.errors import Exit, UserError
from training.tasks import optim
from training.trainer import checkpoint, checkpoint_transfer, start_weights
from training.trainer.checkpoint import TrainProgress

PLAIN: Any = {**FACTS, "task_sha256": "b", "optimizer": "AdamW"}
STATE = {"model": {"weight": torch.ones(2)}}


def save(folder: Path, step: int) -> Path:
    path = checkpoint.save(folder, TrainProgress(step), STATE, FACTS)
    assert checkpoint.prune(path, 3) == ""
    return path


def failing(monkeypatch: pytest.MonkeyPatch, broken: Path, number: int, times: int = 100) -> None:
    """The file cannot be opened `times` times, with this error."""
    left, real = times, Path.open

    def opened(path: Path, *args: Any, **options: Any) -> Any:
        nonlocal left
        if path == broken and left > 0:
            left -= 1
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(checkpoint, "BETWEEN_S", 0.0)


@pytest.mark.parametrize("name", [manifest.NAME, manifest.STATE])
def test_a_checkpoint_that_cannot_be_read_now_is_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk or file server may return errors for a while."""
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    with monkeypatch.context() as disk:
        failing(disk, newest / name, errno.EIO, times=1)
        once = checkpoint.latest(tmp_path)
    assert once and once.position.step == 20
    with monkeypatch.context() as disk:
        failing(disk, newest / name, errno.ESTALE)
        loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position.step == 10 and list(loaded.unreadable) == [newest]
    path = checkpoint.save(tmp_path, TrainProgress(11), STATE, FACTS)
    checkpoint.prune(path, 3, discarded={newest}, unreadable={newest})
    assert [manifest.step_of(p) for p in manifest.all_in(tmp_path)] == [10, 11]
    (kept,) = tmp_path.glob("unreadable-*")
    assert {file.name for file in kept.iterdir()} == {manifest.NAME, manifest.STATE}


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume would begin at step 0, and its first save remove all checkpoints."""
    path = save(tmp_path, 10)
    with monkeypatch.context() as disk:

        def refused(folder: Path) -> object:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(folder))

        disk.setattr(manifest.os, "scandir", refused)
        with pytest.raises(UserError) as stopped:
            checkpoint.latest(tmp_path)
        assert stopped.value.code == Exit.RESOURCES
        assert checkpoint.prune(path, 1) and manifest.all_in(tmp_path) == []
    assert manifest.all_in(tmp_path) == [path] and manifest.listed(tmp_path / "none") == []


def test_checkpoints_of_a_process_that_has_taken_over_are_kept(tmp_path: Path) -> None:
    """This one was suspended after it had saved step 20."""
    for step in (20, 60, 70, 80):
        checkpoint.save(tmp_path, TrainProgress(step), STATE, FACTS)
    mine, *others = manifest.all_in(tmp_path)
    for _ in range(2):
        assert checkpoint.prune(mine, 3) == ""
        assert manifest.all_in(tmp_path)[-3:] == others
        shutil.rmtree(mine, ignore_errors=True)  # as the other one does


def test_a_kill_while_a_step_is_replaced_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that cannot exchange two names, as NFS."""
    save(tmp_path, 10)
    monkeypatch.setattr(checkpoint_folder, "_exchange", lambda one, other: False)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if target.name == "step_00000010" and path.name.startswith(manifest.TEMPORARY):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as power:
        power.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 10)
    checkpoint_folder.remove_leftovers(tmp_path)
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position.step == 10 and not (tmp_path / "step_00000010").exists()
    again = save(tmp_path, 10)
    checkpoint_folder.remove_leftovers(tmp_path)
    assert manifest.all_in(tmp_path) == [again] == list(tmp_path.iterdir())


def test_a_step_that_cannot_be_replaced_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 10)
    monkeypatch.setattr(checkpoint_folder, "_exchange", lambda one, other: False)
    rename = Path.rename

    def full(path: Path, target: Path) -> Path:
        if path.name.startswith(manifest.TEMPORARY):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "rename", full)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            save(tmp_path, 10)
    assert manifest.all_in(tmp_path) == [path] == list(tmp_path.iterdir())


class Packed(torch.Tensor):
    """A tensor of a class that this process does not load, as torchao's without an import."""


def of_packed(folder: Path, step: int, **other: Any) -> Path:
    moments = {0: {"exp_avg": torch.zeros(2, 2).as_subclass(Packed)}}
    state = {
        "model": nn.Linear(2, 2).state_dict(),
        "optimizer": [{"state": moments, "param_groups": [{"params": [0, 1]}]}],
    }
    facts: Any = {**PLAIN, "optimizer": "AdamW8bit"}
    return checkpoint.save(folder, TrainProgress(step), {**state, **other}, facts)


def test_weights_are_continued_without_the_optimizer_s_classes(tmp_path: Path) -> None:
    newest = [of_packed(tmp_path, step) for step in (10, 20)][1]
    loaded = checkpoint.latest(tmp_path)
    assert loaded and (loaded.path, loaded.skipped, loaded.unreadable) == (newest, [], [])
    assert checkpoint_transfer._empty(checkpoint_transfer._form(loaded.state))["model"]
    model = nn.Linear(2, 2)
    made = optim.Optimizers([torch.optim.AdamW(model.parameters())])
    assert not start_weights.load(model, made, loaded, PLAIN)
    assert torch.equal(model.weight, loaded.state["model"]["weight"])
    same: Any = {**PLAIN, "optimizer": "AdamW8bit"}  # its class of tensors has another name by now
    assert not start_weights.load(model, made, loaded, same)


@pytest.mark.parametrize("part", ["model", "extra"])
def test_a_checkpoint_with_other_objects_is_kept(part: str, tmp_path: Path) -> None:
    """Its file is intact."""
    save(tmp_path, 10)
    given: Any = torch.zeros(2).as_subclass(Packed) if part == "model" else Path("x")
    newest = of_packed(tmp_path, 20, **{part: {"given": given}})
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position.step == 10 and list(loaded.unreadable) == [newest]
    assert len(loaded.skipped) == 1


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_checkpoint_with_a_class_that_was_registered_is_kept(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataclass that the task no longer registers; what replaces it takes other
    arguments."""
    of = dataclasses.make_dataclass("Settings", [f"field{n}" for n in range(count)])
    of.__module__ = __name__
    monkeypatch.setattr(sys.modules[__name__], "Settings", of, raising=False)
    save(tmp_path, 10)
    group = {"state": {0: {"settings": of(*range(count))}}, "param_groups": []}
    newest = of_packed(tmp_path, 20, optimizer=[group])
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position.step == 10 and list(loaded.unreadable) == [newest]
    assert f"{__name__}.Settings" in loaded.skipped[0]

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import wait_until
from training.core import heartbeat, manifest
from training.core.errors import Exit, RunStopped
from training.tasks import module_versions, trained
from training.trainer import checkpoint, host_copy
from training.trainer.async_checkpoint import AsyncCheckpointer
from training.trainer.checkpoint import TrainProgress

FACTS = {
    "shape": {"depth": 1},
    "optimizer": "muon",
    "world_size": 1,
    "data": {},
    "tokenizer": "bytes",
}


class Log:
    def __init__(self) -> None:
        self.saved: list[int] = []
        self.missed: list[str] = []
        self.codes: list[str] = []

    def miss(self, code: str, text: str) -> None:
        self.codes.append(code)
        self.missed.append(text)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def saver(tmp_path: Path, log: Log) -> AsyncCheckpointer:
    return AsyncCheckpointer(tmp_path, 2, lambda step, path: log.saved.append(step), log.miss)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing waits for this event."""
    opened, real = threading.Event(), checkpoint.save

    def slow(*args: object) -> Path:
        assert opened.wait(30)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "save", slow)
    return opened


def test_later_changes_do_not_affect_a_save_in_progress(
    tmp_path: Path, saver: AsyncCheckpointer, gate: threading.Event
) -> None:
    state = {
        "model": {"w": torch.zeros(1000)},
        "optimizer": [
            {"state": {0: {"m": torch.ones(3)}}, "param_groups": [{"betas": (0.9, 0.95)}]}
        ],
    }
    with saver:
        saver.save(TrainProgress(1, 0, 8), state, FACTS, required=False)
        state["model"]["w"].fill_(7.0)
        gate.set()
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position == TrainProgress(1, 0, 8)
    assert torch.equal(loaded.state["model"]["w"], torch.zeros(1000))
    assert loaded.state["optimizer"][0]["param_groups"][0]["betas"] == (0.9, 0.95)


def test_a_step_does_not_wait_for_the_disk_but_a_second_save_does(
    saver: AsyncCheckpointer, log: Log, gate: threading.Event
) -> None:
    with saver:
        # returns although nothing is written
        saver.save(TrainProgress(1), {"w": torch.zeros(3)}, FACTS, required=False)
        assert log.saved == []
        second = threading.Thread(
            target=saver.save,
            args=(TrainProgress(2), {"w": torch.ones(3)}, FACTS),
            kwargs={"required": False},
        )
        second.start()
        second.join(0.2)
        assert second.is_alive(), "at most one copy exists"
        gate.set()
        second.join(30)
        assert 1 in log.saved
    assert log.saved == [1, 2]


def test_a_required_save_is_on_disk(tmp_path: Path, saver: AsyncCheckpointer) -> None:
    with saver:
        saver.save(TrainProgress(4), {"w": torch.zeros(3)}, FACTS, required=True)
        assert (tmp_path / "step_00000004/manifest.json").exists()


def test_a_full_disk_is_reported_and_the_next_save_succeeds(
    tmp_path: Path, saver: AsyncCheckpointer, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.save

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with saver:
        monkeypatch.setattr(checkpoint, "save", full)
        saver.save(TrainProgress(1), {"w": torch.zeros(3)}, FACTS, required=False)
        wait_until(lambda: log.missed, 30)
        assert "step 1 was not saved" in log.missed[0] and "No space" in log.missed[0]
        monkeypatch.setattr(checkpoint, "save", real)
        saver.save(TrainProgress(3), {"w": torch.zeros(3)}, FACTS, required=False)
        assert log.saved == [3], "a save after a failed one is synchronous"
        monkeypatch.setattr(checkpoint, "save", full)
        with pytest.raises(OSError, match="No space"):
            saver.save(TrainProgress(4), {"w": torch.zeros(3)}, FACTS, required=True)


@pytest.mark.parametrize(("required", "number"), [(False, 28), (True, 122), (True, 30)])
def test_the_second_failure_in_a_row_stops_the_run(
    required: bool,
    number: int,
    tmp_path: Path,
    saver: AsyncCheckpointer,
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    saver.resume = "./launch_train.sh 2 --resume=x"
    state = {"model": {"w": torch.zeros(1_000_000)}, "optimizer": [torch.zeros(250_000)]}
    with pytest.raises(RunStopped) as caught, saver:
        saver.save(
            TrainProgress(2), state, FACTS | dict.fromkeys(("epoch", "used"), 0), required=True
        )
        monkeypatch.setattr(checkpoint, "save", full)
        saver.save(TrainProgress(4), state, FACTS, required=False)
        saver.save(TrainProgress(6), state, FACTS, required=required)
    (warning,) = log.missed
    (problem,) = caught.value.problems
    full_disk = number != 30  # a read-only one needs no room
    for text in (warning, problem.what):
        assert (f"; a checkpoint needs 5.0 MB; free in {tmp_path}: " in text) == full_disk
    used = f"df -h {tmp_path}; df -i {tmp_path}"
    check = used if full_disk else f"findmnt -T {tmp_path}"
    assert (check in warning, problem.fixes[0], bool(problem.allowed)) == (True, check, full_disk)
    assert (caught.value.code, caught.value.cause.errno) == (Exit.RESOURCES, number)
    assert "(steps 4 and 6)" in problem.what
    assert problem.fixes[-1].startswith(saver.resume)
    assert ("keep_checkpoints" in problem.fixes[-1]) == full_disk
    assert caught.value.closing == "stopped at step 6, the newest checkpoint is from step 2"
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position.step == 2


def test_any_other_error_ends_the_training(
    saver: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ValueError("a mistake in the code")

    monkeypatch.setattr(checkpoint, "save", broken)
    with pytest.raises(ValueError, match="a mistake"), saver:
        saver.save(TrainProgress(1), {"w": torch.zeros(3)}, FACTS, required=False)


def test_a_failing_training_still_finishes_a_save_in_progress(
    tmp_path: Path, saver: AsyncCheckpointer
) -> None:
    with pytest.raises(RuntimeError, match="training"), saver:
        saver.save(TrainProgress(1), {"w": torch.zeros(1 << 20)}, FACTS, required=False)
        raise RuntimeError("training failed")
    assert (tmp_path / "step_00000001").is_dir()


def test_leftovers_of_a_killed_process_are_removed(
    tmp_path: Path, saver: AsyncCheckpointer
) -> None:
    (tmp_path / f"{manifest.TEMPORARY}abc").mkdir()
    with saver:
        assert not list(tmp_path.iterdir())


def test_the_memory_of_the_copy_is_reused(saver: AsyncCheckpointer) -> None:
    state = {"w": torch.zeros(1000)}
    with saver:
        saver.save(TrainProgress(1), state, FACTS, required=True)
        first = saver._copy["w"].data_ptr()
        saver.save(TrainProgress(2), state, FACTS, required=True)
        assert saver._copy["w"].data_ptr() == first


class OnGpu(torch.Tensor):
    """A tensor that seems to be on a GPU: this build of torch refuses to pin memory for it."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


def test_without_pinned_memory_a_checkpoint_is_copied_into_ordinary_memory(
    tmp_path: Path, saver: AsyncCheckpointer, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may pin little under WSL, in containers and under a limit of the driver."""
    said: list[str] = []
    monkeypatch.setattr("training.core.log.info", said.append)
    tried: list[bool] = []
    real = torch.empty_like

    def empty_like(like: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        tried.append(pin_memory)
        return real(like, device=device, pin_memory=pin_memory)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    state = {"plain": torch.zeros(2), "w": torch.full((3,), 5.0).as_subclass(OnGpu)}
    more = {**state, "new": torch.ones(3).as_subclass(OnGpu)}
    with saver:
        saver.save(TrainProgress(1), state, FACTS, required=True)
        saver.save(TrainProgress(2), more, FACTS, required=True)
    assert log.saved == [1, 2] and not log.missed
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.state["w"].tolist() == [5.0, 5.0, 5.0]
    assert tried == [False, True, False, False, False]  # once
    assert len(said) == 1 and "pin_memory=True requires a CUDA" in said[0]


def test_under_wsl_no_copy_of_a_checkpoint_is_pinned(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("training.core.log.info", said.append)
    monkeypatch.setattr("training.host.env_vars.under_wsl", lambda: True)
    state = {"w": torch.ones(3).as_subclass(OnGpu)}
    with AsyncCheckpointer(tmp_path, 2, lambda step, _: log.saved.append(step), log.miss) as saver:
        saver.save(TrainProgress(1), state, FACTS, required=True)
    assert log.saved == [1] and not said


def test_a_really_full_disk_is_reported_and_training_continues(
    tmp_path: Path, saver: AsyncCheckpointer, log: Log
) -> None:
    """Not simulated: the kernel lets no file grow beyond the limit."""
    state, limit = {"w": torch.zeros(100_000)}, resource.getrlimit(resource.RLIMIT_FSIZE)
    with saver:
        saver.save(TrainProgress(1), state, FACTS, required=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
        try:
            saver.save(TrainProgress(2), state, FACTS, required=False)
            wait_until(lambda: log.missed, 30)
            with pytest.raises(RunStopped, match="File too large"):
                saver.save(TrainProgress(3), state, FACTS, required=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        saver.save(TrainProgress(4), state, FACTS, required=True)
    assert "checkpoint of step 2 was not saved: [Errno 27] File too large" in log.missed[0]
    assert log.saved == [1, 4] and len(log.missed) == 1


def test_a_checkpoint_is_saved_although_pruning_fails(
    tmp_path: Path, saver: AsyncCheckpointer, log: Log
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step_00000001").symlink_to(tmp_path / "elsewhere")
    with saver:
        for step in (2, 3):
            saver.save(TrainProgress(step), {"w": torch.zeros(3)}, FACTS, required=True)
    assert log.saved == [2, 3]
    assert len(log.missed) == 1 and log.missed[0].startswith("old checkpoints cannot be removed: ")


def test_a_wait_for_a_slow_disk_shows_progress(
    tmp_path: Path, saver: AsyncCheckpointer, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat changes with each piece that is written, and not otherwise: no writes are a
    hang."""
    heartbeat.start(tmp_path / "beat.bin", 0)
    monkeypatch.setattr(heartbeat, "current", heartbeat.current)  # restored afterwards
    monkeypatch.setattr("training.trainer.async_checkpoint.POLL_S", 0.005)

    def beats() -> int:
        beat = heartbeat.read(tmp_path / "beat.bin")
        return beat.beats if beat else 0

    with saver:
        saver.save(TrainProgress(1), {"w": torch.zeros(3)}, FACTS, required=False)
        waiting = threading.Thread(target=saver._finish)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive() and beats() == 0
        for _ in range(3):
            before = beats()
            saver._moved()
            wait_until(lambda before=before: beats() > before, 30)  # type: ignore[misc]
        gate.set()
        waiting.join(30)
    assert saver._pieces > 6, "written pieces are counted too"


class Versioned(torch.nn.Linear):
    """Refuses weights of an unknown version, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *rest: Any) -> None:
        assert local.get("version") == 2
        super()._load_from_state_dict(state, prefix, local, *rest)


def test_the_versions_of_modules_are_saved(tmp_path: Path, saver: AsyncCheckpointer) -> None:
    own = torch.nn.Sequential(Versioned(2, 2))
    average = {"0.weight": torch.ones(2, 2)}
    with saver:
        state = {"model": own.state_dict(), trained.AVERAGE: average}
        saver.save(TrainProgress(1), state, FACTS, required=True)
    loaded = checkpoint.latest(tmp_path)
    assert loaded
    own.load_state_dict(loaded.state["model"])
    found = trained.tensors(loaded.path / manifest.STATE, averaged=True)
    own.load_state_dict(found)
    assert torch.equal(own[0].weight, average["0.weight"])


def test_weights_of_a_wrapped_model_keep_the_versions_of_its_modules(tmp_path: Path) -> None:
    own = torch.nn.Sequential(Versioned(2, 2))
    wrapped = torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"_orig_mod": own})})
    torch.save(wrapped.state_dict(), tmp_path / "wrapped.pt")
    found = trained.fitted(trained.tensors(tmp_path / "wrapped.pt"), own.state_dict())
    assert sorted(found) == ["0.bias", "0.weight"]
    assert sorted(module_versions.of(found)) == ["", "0"]
    own.load_state_dict(found)


class Marked(torch.Tensor):
    """A tensor of a class that torch.load refuses."""


def test_tensors_of_other_classes_are_saved(tmp_path: Path, saver: AsyncCheckpointer) -> None:
    """torchao's optimizers keep two tensors in one; others only have another class."""
    small = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit.zeros((16, 16))
    state = {"w": torch.ones(2).as_subclass(Marked), "m": small}
    with saver:
        for step in (1, 2):
            small.codes.fill_(step)
            state["w"].fill_(step)
            saver.save(TrainProgress(step), state, FACTS, required=True)
            if step == 1:
                place = saver._copy["m"].codes.data_ptr()
        assert saver._copy["m"].codes.data_ptr() == place != small.codes.data_ptr()
    assert host_copy.size({"m": small}) == 256 + 4 + 256 * 4
    for step in (1, 2):
        found = torch.load(tmp_path / f"step_{step:08d}" / manifest.STATE, weights_only=True)
        assert type(found["w"]) is torch.Tensor and found["w"].tolist() == [step] * 2
        assert type(found["m"]) is type(small) and (found["m"].codes == step).all()


def test_weights_are_read_without_the_optimizer_s_classes(
    tmp_path: Path, saver: AsyncCheckpointer
) -> None:
    small = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit.zeros((16, 16))
    with saver:
        state = {"model": {"w": torch.ones(2)}, "optimizer": [{"m": small}]}
        saver.save(TrainProgress(1), state, FACTS, required=True)
    read = """
import sys; from pathlib import Path; from training.tasks import trained
print(trained.tensors(Path(sys.argv[1]))["w"].tolist(), "torchao" in sys.modules)"""
    file = tmp_path / "step_00000001" / manifest.STATE
    found = subprocess.run(
        [sys.executable, "-c", read, str(file)], capture_output=True, text=True, check=False
    )
    assert found.stdout == "[1.0, 1.0] False\n", found.stderr


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    state = {"groups": [{"lr": np.float64(0.5), "steps": np.int32(3), "size": torch.Size([2])}]}
    copied = host_copy.copied(state, None, pin=False)
    assert [type(value) for value in copied["groups"][0].values()] == [float, int, torch.Size]
    checkpoint.save(tmp_path, TrainProgress(1, 0, 0, 0), copied, FACTS)
    assert checkpoint.latest(tmp_path)


def test_a_state_that_could_not_be_read_again_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"pathlib.*Path at \['extra'\]\[1\]"):
        host_copy.copied({"extra": [1, Path("x")]}, None, pin=False)

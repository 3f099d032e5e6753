"""Two machines without a common disk, here two supervisors on one machine with different folders:
the first one has the checkpoints, and the other gets what it needs from it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.conftest import Launched, Launcher
from tests.e2e.hooks import at_rank
from training.core import manifest
from training.core.find_run import LATEST
from training.core.rundir import RunDir, read_records
from training.host.placement import LOOPBACK
from training.launcher.local_ranks import free_port

Launch = Callable[..., Launched]
CONFIG = "configs/dual_gpu/quickstart.py"
SAVING: dict[str, Any] = {"save_every": 5, "optimizer": "muon"}


@pytest.fixture
def machine(launch: Launcher, tmp_path: Path) -> Callable[..., Launched]:
    """Starts one machine's part of a run of two."""

    def start(number: int, port: int, **flags: object) -> Launched:
        disk = tmp_path / f"disk{number}"
        place = {
            "nnodes": 2,
            "node_rank": number,
            "master_addr": LOOPBACK,
            "master_port": port,
            "out_dir": disk,
            "log_dir": disk / "logs",
        }
        script, config = (str(launch.project / name) for name in ("launch_train.sh", CONFIG))
        run = launch(script, "1", config, name="both", **{**place, **flags})
        run.run = RunDir(disk / "both", number or None)
        return run

    return start


Machine = Callable[..., Launched]


def both(machine: Machine, **flags: object) -> tuple[Launched, Launched]:
    port = free_port(LOOPBACK)
    second, first = machine(1, port, **flags), machine(0, port, **flags)
    return first, second


def ended(first: Launched, second: Launched) -> tuple[int, int]:
    return first.wait(), second.wait()


@pytest.mark.slow
def test_a_restart_and_a_replaced_machine_need_no_common_disk(
    machine: Machine, launch: Launch
) -> None:
    """A rank of the second machine is killed twice: the first time both restart, the second time
    the run ends. Then the second machine is replaced by an empty one."""
    whole = launch("./launch_train.sh", "2", CONFIG, **SAVING).ok()
    faults = "kill@rank=1,step=7;kill@rank=1,step=7,attempt=2"
    first, second = both(machine, **SAVING, retries=1, inject=faults)
    assert ended(first, second) == (4, 4), first.output[-3000:] + second.output[-3000:]
    assert (
        "restarting from step 5" in first.output and "step_00000005 sent to 1 rank" in first.output
    )
    log = second.run.rank_log(1)
    assert first.failure["log"] == f"{socket.gethostname()}:{log}" and log.exists()
    assert not manifest.all_in(second.run.checkpoints)
    shutil.rmtree(second.run.path.parent)
    first, second = both(machine, resume="both")
    assert ended(first, second) == (0, 0), first.output[-3000:] + second.output[-3000:]
    assert first.losses == whole.losses, "bit for bit"
    resumed = [r["step"] for r in read_records(first.run.events) if r["event"] == "resume"]
    assert resumed == [5, 5]


@pytest.mark.slow
def test_the_second_machine_has_a_copy_and_resumes_alone(
    machine: Machine, launch: Launcher, tmp_path: Path
) -> None:
    flags = {"num_iterations": 100000, "min_ranks": 1, "tensorboard": True}
    first, second = both(machine, **SAVING, **flags)
    wait_until(lambda: copied(first), 90, "a copy")
    wait_until(lambda: manifest.all_in(second.run.checkpoints), 5, "the copy")
    first.process.send_signal(signal.SIGTERM)
    assert ended(first, second) == (75, 75), first.output[-3000:] + second.output[-3000:]
    newest = manifest.all_in(first.run.checkpoints)[-1]
    step = manifest.step_of(newest)
    files = [newest / manifest.STATE, newest / manifest.NAME, first.run.metrics, first.run.summary]
    files += first.run.tensorboard.iterdir()
    for file in files:
        copy = second.run.path / file.relative_to(first.run.path)
        assert copy.read_bytes() == file.read_bytes(), file
    assert "warning.replica" not in first.run.events.read_text()

    shutil.rmtree(tmp_path / "disk0")
    disk = {"out_dir": tmp_path / "disk1", "log_dir": tmp_path / "disk1" / "logs"}
    script = str(launch.project / "launch_train.sh")
    run = launch(script, "2", resume="both", num_iterations=step + 2, **disk).ok()
    run.run = RunDir(tmp_path / "disk1" / "both")
    assert sorted(run.steps) == list(range(1, step + 3))
    assert [r["step"] for r in read_records(run.run.events) if r["event"] == "resume"] == [step]


def copied(run: Launched) -> list[int]:
    return [r["step"] for r in read_records(run.run.events) if r["event"] == "replica"]


@pytest.mark.soak
def test_a_killed_receiver_costs_no_step_and_later_checkpoints_are_copied(
    machine: Machine, token: str
) -> None:
    first, second = both(machine, **SAVING, num_iterations=100000, min_ranks=1)
    wait_until(lambda: copied(first), 90, "a copy")
    (pid,) = (pid for pid, command in processes(token).items() if "receive_program" in command)
    os.kill(pid, signal.SIGKILL)
    before = len(copied(first))
    wait_until(lambda: len(copied(first)) > before, 90, "another copy")
    first.process.send_signal(signal.SIGTERM)
    assert ended(first, second) == (75, 75), first.output[-3000:] + second.output[-3000:]
    assert not [r for r in read_records(first.run.events) if r["event"] == "restart"]
    assert "it is started again" in second.output
    assert manifest.all_in(first.run.checkpoints)[-1].name == copies(second)[-1]


def copies(run: Launched) -> list[str]:
    return [path.name for path in manifest.all_in(run.run.checkpoints)]


@pytest.mark.soak
def test_older_checkpoints_on_another_machine_are_not_used(
    machine: Machine, launch: Launch, tmp_path: Path
) -> None:
    """The second machine has a later state of a run of the same name, trained otherwise."""
    whole = launch("./launch_train.sh", "2", CONFIG, **SAVING).ok()
    first, second = both(machine, **SAVING, inject="kill@rank=1,step=7")
    assert ended(first, second) == (4, 4), first.output[-3000:] + second.output[-3000:]
    other = tmp_path / "disk1"
    shutil.rmtree(other)
    launch("./launch_train.sh", "1", CONFIG, name="both", out_dir=other, save_every=4, seed=5).ok()
    before = sorted(other.glob("both/checkpoints/*/*"))
    first, second = both(machine, resume="both")
    assert ended(first, second) == (0, 0), first.output[-3000:] + second.output[-3000:]
    assert first.losses == whole.losses, "bit for bit"
    assert sorted(other.glob("both/checkpoints/*/*")) == before != []


@pytest.mark.soak
def test_a_stop_on_the_second_machine_is_resumed_by_both(machine: Machine) -> None:
    first, second = both(machine, num_iterations=100000, save_every=0)
    first.wait_for("Iter: 3,")
    second.process.send_signal(signal.SIGTERM)
    assert ended(first, second) == (75, 75)
    (saved,) = manifest.all_in(first.run.checkpoints)
    step = int(saved.name.removeprefix("step_"))
    first, second = both(machine, resume=LATEST, num_iterations=step + 2)
    assert ended(first, second) == (0, 0), first.output[-3000:] + second.output[-3000:]
    assert max(first.steps) == step + 2 and f"{saved.name} sent to 1 rank" in first.output


@pytest.mark.soak
def test_damaged_checkpoints_are_reported_once_and_end_both(machine: Machine) -> None:
    first, second = both(machine, **SAVING)
    assert ended(first, second) == (0, 0), first.output[-3000:] + second.output[-3000:]
    for state in first.run.checkpoints.glob("*/state.pt"):
        state.write_bytes(state.read_bytes()[:-1])
    first, second = both(machine, resume="both", num_iterations=20)
    assert ended(first, second) == (2, 2), first.output[-3000:] + second.output[-3000:]
    assert "is damaged" in first.output and "is damaged" not in second.output


@pytest.mark.soak
def test_a_bit_flipped_on_the_way_is_detected_and_the_machine_named(machine: Machine) -> None:
    flips = """
        import torch.distributed as dist
        original, calls = dist.broadcast, [0]
        def flip(tensor, *args):
            original(tensor, *args)
            calls[0] += 1
            if calls[0] == 2:  # after the structure
                tensor[100] ^= 1
        dist.broadcast = flip
    """
    first, second = both(machine, **SAVING)
    assert ended(first, second) == (0, 0), first.output[-3000:] + second.output[-3000:]
    hook = at_rank(1, flips, "training.trainer.checkpoint_transfer")
    first, second = both(machine, resume="both", num_iterations=20, hook=hook)
    assert ended(first, second) == (4, 4), first.output[-3000:] + second.output[-3000:]
    assert (first.failure["rank"], first.failure["node"]) == (1, 1)
    assert f"{socket.gethostname()}: received a damaged step_00000012" in first.output


@pytest.mark.soak
def test_different_data_on_a_machine_is_rejected_by_name(machine: Machine, tmp_path: Path) -> None:
    port, started = free_port(LOOPBACK), []
    for number in (1, 0):
        folder = tmp_path / f"machine{number}"
        folder.mkdir()
        (folder / "text.txt").write_text(f"a text of machine {number}\n" * 4000)
        started.append(machine(number, port, data="text.txt", cwd=folder))
    second, first = started
    assert ended(first, second) == (2, 2), first.output[-3000:] + second.output[-3000:]
    assert f"on {socket.gethostname()} differs" in first.output

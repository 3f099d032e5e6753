"""Epoch switches without deadlock, and bit-exact resume."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, wait_until
from tests.e2e.conftest import Launched
from tests.e2e.hooks import at_rank, slow_progress_bar
from training.core import heartbeat, manifest
from training.core.rundir import RunDir, read_records
from training.launcher.local_ranks import free_port
from training.monitor.state import RunWatch

Launch = Callable[..., Launched]
RUN = ("./launch_train.sh", "2", "configs/dual_gpu/quickstart.py")
EPOCHS = {"num_iterations": 0, "device_batch_size": 2, "total_batch_size": 128}


@pytest.fixture
def small_text(tmp_path: Path) -> Path:
    """A text of ten steps per epoch."""
    path = tmp_path / "small text.txt"
    path.write_bytes((ROOT / "LICENSE").read_bytes()[:1500])
    return path


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_many_epochs_with_workers_and_a_slow_progress_bar(
    launch: Launch, small_text: Path, persistent: bool
) -> None:
    """The two traps of the original incident: workers at the epoch switch, and a progress bar that
    blocks rank 0 longer than a collective's limit would allow between barriers."""
    hook = slow_progress_bar(0.5)
    run = launch(
        *RUN,
        data=small_text,
        num_epochs=6,
        num_workers=2,
        persistent_workers=persistent,
        hang_timeout=10,
        hook=hook,
        **EPOCHS,
    ).ok()
    records = list(run.steps.values())
    per_epoch = [sum(r["epoch"] == e for r in records) for e in range(1, 7)]
    assert len(set(per_epoch)) == 1 and per_epoch[0] >= 5, per_epoch
    assert {r["epoch"] for r in records} == set(range(1, 7))


@pytest.mark.soak
def test_workers_change_nothing(launch: Launch, small_text: Path) -> None:
    without = launch(*RUN, data=small_text, num_epochs=2, num_workers=0, **EPOCHS).ok()
    with_two = launch(*RUN, data=small_text, num_epochs=2, num_workers=2, **EPOCHS).ok()
    assert without.losses == with_two.losses


@pytest.mark.parametrize(
    "workers", [pytest.param(0, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.slow)]
)
def test_resume_after_kill_is_bit_exact(launch: Launch, small_text: Path, workers: int) -> None:
    """SIGKILL of the launcher in the middle of an epoch, with everything random or stateful:
    dropout, workers, accumulation."""
    settings = {
        "data": small_text,
        "num_epochs": 8,
        "save_every": 7,
        "num_workers": workers,
        **EPOCHS,
        "total_batch_size": 256,
    }
    settings |= {"dropout": 0.2, "activation_checkpointing": 1}
    whole = launch(*RUN, **settings).ok()
    cut = launch(*RUN, name="cut", **settings)
    cut.wait_for("Epoch: 4, Iter: 17,")
    cut.process.send_signal(signal.SIGKILL)
    cut.wait()
    resumed = launch("./launch_train.sh", "2", tiny=False, resume="cut").ok()
    assert resumed.losses == whole.losses
    final = [
        next(r.run.checkpoints.glob(f"step_{max(whole.steps):08d}/state.pt")).read_bytes()
        for r in (whole, resumed)
    ]
    assert final[0] == final[1], "weights and optimizer state, bit for bit"


@pytest.mark.soak
def test_an_evaluation_is_not_lost_between_it_and_the_checkpoint(launch: Launch) -> None:
    """Rank 0 is killed at the checkpoint of an evaluated step: no checkpoint may be newer than its
    evaluation."""
    hook = at_rank(
        0,
        """
        import os, signal
        from training.trainer.async_checkpoint import AsyncCheckpointer
        original = AsyncCheckpointer.save
        def last(self, position, state, facts, *, required):
            original(self, position, state, facts, required=True)
            if position.step == 8:
                os.kill(os.getpid(), signal.SIGKILL)
        AsyncCheckpointer.save = last
""",
    )
    cut = launch(*RUN, name="cut", save_every=8, eval_every=8, hook=hook)
    assert cut.wait() == 4
    assert (cut.run.checkpoints / "step_00000008").is_dir()
    resumed = launch("./launch_train.sh", "2", tiny=False, resume="cut").ok()
    assert {r["step"] for r in read_records(resumed.run.metrics) if "val_bpb" in r} == {8, 12}


SLOW_METRICS = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from training.tasks.base import Task

OPTIONS = {"each_s": 0.2}

class Slow(Task):
    eval_batch = 1

    def model(self):
        return nn.Linear(1, 1)

    def train_data(self):
        return TensorDataset(torch.linspace(0, 1, 800)[:, None])

    def val_data(self):
        return TensorDataset(torch.linspace(0, 1, 1600)[:, None])

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def metrics(self, model, batch):
        print("measured", flush=True)
        time.sleep(self.options.each_s)
        return {"square": model(batch[0])[:, 0] ** 2}
"""


def stopped_in_the_evaluation(launch: Launch, folder: Path, steps: int) -> Launched:
    """A run that was asked to stop in the evaluation of step 4."""
    (folder / "slow.py").write_text(SLOW_METRICS)
    flags = {"device": "cpu", "use_dummy_wandb": True, "tensorboard": False, "report": False}
    flags |= {"device_batch_size": 4, "num_iterations": steps, "eval_every": 4, "save_every": 0}
    task = f"--task={folder / 'slow.py'}"
    run = launch("./launch_train.sh", "2", task, tiny=False, name="cut", **flags)
    run.wait_for("measured")
    run.process.send_signal(signal.SIGTERM)
    return run


@pytest.mark.slow
def test_a_stop_during_an_evaluation_saves_and_the_resume_begins_with_it(
    launch: Launch, tmp_path: Path
) -> None:
    """The whole evaluation would take 160 s, 800 batches of each rank."""
    cut = stopped_in_the_evaluation(launch, tmp_path, 6)
    assert cut.wait() == 75
    assert max(cut.steps) == 4 and cut.output.count("measured") < 200
    saved = manifest.newest(cut.run.checkpoints)
    assert saved and (saved["step"], saved["unevaluated"]) == (4, True)
    resumed = launch("./launch_train.sh", "2", tiny=False, resume="cut", each_s=0.0).ok()
    scored = [r["step"] for r in read_records(resumed.run.metrics) if "val_square" in r]
    assert scored == [4, 6] and max(resumed.steps) == 6


@pytest.mark.soak
def test_a_kill_in_the_last_evaluation_loses_no_steps(launch: Launch, tmp_path: Path) -> None:
    """After a stop request, as SLURM kills what does not end in time."""
    cut = stopped_in_the_evaluation(launch, tmp_path, 4)
    wait_until(lambda: manifest.newest(cut.run.checkpoints), 20, "the checkpoint is written")
    cut.process.kill()
    cut.wait()
    resumed = launch("./launch_train.sh", "2", tiny=False, resume="cut", each_s=0.0).ok()
    assert [r["step"] for r in read_records(resumed.run.metrics) if "val_square" in r] == [4]
    assert [r["step"] for r in read_records(resumed.run.events) if r["event"] == "resume"] == [4]


@pytest.mark.soak
def test_a_stop_in_the_last_step_finishes_the_run(launch: Launch) -> None:
    hook = at_rank(
        1,
        """
        import os, signal
        from training.tasks import optim
        original, calls = optim.Optimizers.schedule, [0]
        def asked(self, step, share):
            if step == 11:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, step, share)
        optim.Optimizers.schedule = asked
""",
    )
    run = launch(*RUN, eval_every=100, hook=hook).ok()
    assert (
        run.summary["status"] == "done"
        and run.summary["steps"] == 12
        and run.summary["val_bpb_last"]
        and run.summary["sample"]
    )


@pytest.mark.soak
def test_objects_from_before_the_first_epoch_are_frozen_for_gc(
    launch: Launch, small_text: Path, tmp_path: Path
) -> None:
    seen = tmp_path / "frozen"
    patch = f"""
        import gc
        original = gc.collect
        def noted(*args):
            with open({str(seen)!r}, "a") as file:
                file.write(f"{{gc.get_freeze_count()}}\\n")
            return original(*args)
        gc.collect = noted
"""
    launch(*RUN, data=small_text, num_epochs=3, hook=at_rank(0, patch), **EPOCHS).ok()
    first, *epochs = map(int, seen.read_text().split())
    assert first == 0 and len(epochs) == 3 and min(epochs) > 10_000


@pytest.mark.soak
def test_a_finished_run_stays_finished_after_a_stopped_resume(
    launch: Launch,
) -> None:
    done = launch(*RUN, name="done", report=True).ok()
    before = {path: path.read_bytes() for path in done.run.path.rglob("*") if path.is_file()}
    again = launch("./launch_train.sh", "2", tiny=False, resume="done").ok()
    assert "step 12 of 12" in again.output and "--num_iterations=24" in again.output
    assert {
        path: path.read_bytes() for path in done.run.path.rglob("*") if path.is_file()
    } == before
    old_pids = done.pids
    more = launch("./launch_train.sh", "2", tiny=False, resume="done", num_iterations=100000)
    wait_until(lambda: more.pids and more.pids != old_pids, what="the ranks")
    assert done.run.summary.exists() and done.run.report.exists()
    assert RunWatch(done.run).read()["run"]["state"] == "starting"
    more.process.send_signal(signal.SIGINT)
    assert more.wait() == 130
    state = RunWatch(done.run).read()
    assert (state["run"]["state"], state["progress"]["step"], state["progress"]["total_steps"]) == (
        "finished",
        12,
        12,
    )
    assert all(
        path.read_bytes() == before[path]
        for path in (done.run.plan, done.run.data, done.run.summary, done.run.report)
    )
    assert (
        launch("./launch_train.sh", "2", tiny=False, resume="done", num_iterations=13)
        .ok()
        .summary["steps"]
        == 13
    )


TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc_per_node=2",
    "train.py",
    f"--config={RUN[2]}",
)


@pytest.mark.soak
def test_others_wait_for_slow_data_without_a_collective(launch: Launch, small_text: Path) -> None:
    """Rank 0 prepares data for longer than the time limit of a collective."""
    hook = """
import os
if os.environ.get("RANK") == "0":
    import time, zlib
    original = zlib.crc32
    def slow(data, *more):
        if bytes(data).isdigit():  # the number of a document, not a heartbeat
            time.sleep(6)
        return original(data, *more)
    zlib.crc32 = slow
"""
    run = launch(
        *TORCHRUN,
        data=small_text,
        num_iterations=3,
        hang_timeout=4,
        hook=hook,
        device_batch_size=2,
        total_batch_size=128,
    ).ok()
    assert len(run.steps) == 3


@pytest.mark.soak
def test_only_the_supervisor_prepares_the_data(launch: Launch, small_text: Path) -> None:
    patch = """
        from training.trainer import prepared_cache as store
        def never(*args):
            raise AssertionError("the data is prepared by a rank")
        store.prepare = never
"""
    run = launch(
        *RUN,
        data=small_text,
        num_iterations=3,
        device_batch_size=2,
        total_batch_size=128,
        hook=at_rank(0, patch),
    ).ok()
    assert len(run.steps) == 3


@pytest.mark.soak
def test_a_truncated_shard_is_prepared_again_before_the_restart(
    launch: Launch, small_text: Path, tmp_path: Path
) -> None:
    patch = f"""
        import json, os, pathlib, signal
        from training.tasks import optim
        original, once = optim.Optimizers.schedule, pathlib.Path({str(tmp_path / "once")!r})
        def cut(self, step, share):
            if step == 8 and not once.exists():
                once.touch()
                folder = json.loads(pathlib.Path(os.environ["DUET_RUN_DIR"], "data.json").read_text())["folder"]
                os.truncate(pathlib.Path(folder, "train_00000.bin"), 100)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, step, share)
        optim.Optimizers.schedule = cut
"""
    run = launch(
        "./train_dual_gpu_enhanced.sh",
        f"--config={RUN[2]}",
        data=small_text,
        save_every=4,
        hook=at_rank(1, patch),
        **EPOCHS,
    ).ok()
    assert "train_00000.bin has 100 bytes" in run.output and "preparing it again" in run.output
    assert "resumed from step_00000008" in run.output or "resumed from step_00000004" in run.output


@pytest.mark.slow
def test_ranks_that_wait_for_the_data_of_a_dead_rank_exit(
    launch: Launch, small_text: Path, tmp_path: Path
) -> None:
    """Ranks started by a platform, without a launcher that would stop the others."""
    here, port = tmp_path / "preparing", free_port("127.0.0.1")
    stuck = at_rank(
        0,
        f"""
        import pathlib, time
        from training.trainer import prepared_cache as store
        def never(*args):
            pathlib.Path({str(here)!r}).touch()
            time.sleep(600)
        store.prepare = never
""",
    ).replace(' and "DUET_RUN_DIR" in os.environ', "")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        launch(
            sys.executable,
            "train.py",
            RUN[2],
            data=small_text,
            hook=stuck,
            name="dead",
            env=place | {"RANK": r, "LOCAL_RANK": r},
        )
        for r in ("0", "1")
    ]
    wait_until(here.exists, what="rank 0 prepares the data")
    beat = RunDir(ranks[0].run.path).heartbeat(1)
    wait_until(lambda: "waiting for data" in str(heartbeat.read(beat)), what="rank 1 waits")
    ranks[0].process.send_signal(signal.SIGKILL)
    ranks[0].wait()
    assert ranks[1].wait(30) == 4
    assert (ranks[1].failure["cause"], ranks[1].failure["rank"]) == ("peer_died", 0)
    assert "rank 0 has ended while the others waited for its data" in ranks[1].output


@pytest.mark.slow
def test_bad_data_ends_all_ranks_with_one_message(launch: Launch, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\nnot JSON\n')
    run = launch(*TORCHRUN, data=bad)
    assert run.wait() != 0
    assert run.output.count("bad.jsonl:2: not JSON") == 1
    supervised = launch(*RUN, data=bad)
    assert supervised.wait() == 2 and not supervised.run.path.exists()

"""The engine under real ranks: the same training whatever the number of ranks, and ranks that can not fool each other."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import Launched
from tests.e2e.hooks import at_rank, in_forward
from training.rundir import read_records

Launch = Callable[..., Launched]
CONFIG = "configs/dual_gpu/quickstart.py"
RUN = ("./launch_train.sh", "2", CONFIG)
EXACT = {"precision": "fp32", "total_batch_size": 512, "num_iterations": 10, "inspect_every": 1}


def same(run: Launched, other: Launched, tolerance: float = 2e-3) -> None:
    """The same losses to floating-point tolerance; sums in another order are amplified a little by each step."""
    assert run.losses == pytest.approx(other.losses, rel=tolerance)
    assert run.losses[:2] == pytest.approx(other.losses[:2], rel=1e-6), "before the first difference is amplified"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((ROOT / "LICENSE").read_bytes()[:9000])
    return path


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
def test_ranks_and_accumulation_train_like_one_process(launch: Launch, text: Path, optimizer: str) -> None:
    settings = {"data": text, "optimizer": optimizer, **EXACT}
    one = launch("./launch_train.sh", "1", CONFIG, device_batch_size=16, **settings).ok()
    two = launch(*RUN, device_batch_size=8, **settings).ok()
    accumulated = launch(*RUN, device_batch_size=2, **settings).ok()
    for run in (two, accumulated):
        same(run, one)
    assert one.losses[-1] < one.losses[0] - 1


@pytest.mark.slow
def test_four_ranks_train_like_one_process(launch: Launch, text: Path) -> None:
    settings = {"data": text, **EXACT}
    one = launch("./launch_train.sh", "1", CONFIG, device_batch_size=4, **settings).ok()  # accumulates
    four = launch("./launch_train.sh", "4", CONFIG, device_batch_size=4, **settings).ok()
    accumulated = launch("./launch_train.sh", "4", CONFIG, device_batch_size=2, **settings).ok()
    for run in (four, accumulated):
        same(run, one)


def test_saving_memory_trains_the_same(launch: Launch, text: Path) -> None:
    settings = {"data": text, "device_batch_size": 8, "depth": 2, **EXACT}
    plain = launch(*RUN, activation_checkpointing="none", loss_chunks=1, **settings).ok()
    frugal = launch(*RUN, activation_checkpointing=2, loss_chunks=4, **settings).ok()
    same(frugal, plain)


def test_every_rank_reports_its_part_of_the_data(launch: Launch, text: Path) -> None:
    run = launch(*RUN, data=text, debug_ddp=True, inspect_every=3).ok()
    assert "shards of 2 ranks are disjoint and complete" in run.output
    assert all(f"rank {r} of 2: dataset" in run.output for r in (0, 1))
    assert run.output.count("all ranks train: rank 0: 4 sequences") == 5, "steps 1, 3, 6, 9, 12"
    shards = [r for r in read_records(run.run.events) if r["event"] == "shards"]
    first = [set(rank["first_sequences"]) for rank in shards[0]["ranks"]]
    assert first[0] and first[1] and not first[0] & first[1]


def test_a_rank_with_other_data_is_named(launch: Launch, text: Path) -> None:
    hook = at_rank(
        1,
        """
        from training.data.loader import Batches
        original = Batches.__init__
        def wrong(self, *args, **kwargs):
            original(self, *args, **kwargs)
            self.seed += 1
        Batches.__init__ = wrong
""",
    )
    run = launch(*RUN, data=text, hook=hook)
    assert run.wait() == 4
    assert run.failure["rank"] == 1 and "not disjoint and complete: see rank 1" in run.failure["summary"]
    assert not run.steps, "nothing was trained on it"


def test_parameters_that_drift_apart_are_noticed(launch: Launch, text: Path) -> None:
    hook = at_rank(
        1,
        """
        import torch
        from training.engine import optim
        original, calls = optim.Optimizers.step, [0]
        def drifting(self):
            original(self)
            calls[0] += 1
            if calls[0] == 5:
                with torch.no_grad():
                    self.param_groups[-1]["params"][0].view(-1)[3] += 1e-6
        optim.Optimizers.step = drifting
""",
    )
    run = launch(*RUN, data=text, inspect_every=4, hook=hook)
    assert run.wait() == 4
    assert run.failure["cause"] == "ddp_params_mismatch"
    assert "parameters differ at step 8" in run.failure["summary"] and "first head.weight" in run.failure["summary"]


def test_nan_is_named_with_its_samples(launch: Launch, text: Path) -> None:
    run = launch(*RUN, data=text, hook=in_forward(1, 5, "return original(*args, **kwargs) * float('nan')"))
    assert run.wait() == 4
    assert run.failure["cause"] == "nan_loss" and run.failure["rank"] == 1
    summary = run.failure["summary"]
    assert "loss is nan on rank 1 at step 5" in summary
    named = [int(word) for word in summary.split("sequences ")[1].rstrip(")").split(", ")]
    events = [r for r in read_records(run.run.events) if r["event"] == "shards"]
    assert len(named) == 4 and all(0 <= i < events[0]["ranks"][1]["dataset_sequences"] for i in named)


def test_an_empty_batch_is_named(launch: Launch, text: Path) -> None:
    hook = at_rank(
        1,
        """
        from training.data.loader import TokenDataset
        original, calls = TokenDataset.rows, [0]
        def empty(self, indices):
            calls[0] += 1
            return original(self, indices)[: 0 if calls[0] == 5 else None]
        TokenDataset.rows = empty
""",
    )
    run = launch(*RUN, data=text, hook=hook)
    assert run.wait() == 4
    assert run.failure["rank"] == 1 and "rank 1 had an empty batch at step 5" in run.failure["summary"]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_kill_and_resume_with_dropout_is_bit_exact(launch: Launch, text: Path, workers: int) -> None:
    settings = {"data": text, "num_iterations": 60, "save_every": 7, "dropout": 0.2, "num_workers": workers, "device_batch_size": 2}
    settings |= {"total_batch_size": 256, "activation_checkpointing": 1}
    whole = launch(*RUN, **settings).ok()
    cut = launch(*RUN, name="cut", **settings)
    cut.wait_for("Iter: 31,")
    cut.process.send_signal(signal.SIGKILL)
    cut.wait()
    resumed = launch("./launch_train.sh", "2", tiny=False, resume="cut").ok()
    assert resumed.losses == whole.losses
    final = [(r.run.checkpoints / "step_00000060/state.pt").read_bytes() for r in (whole, resumed)]
    assert final[0] == final[1], "weights and optimizer state, bit for bit"


@pytest.mark.slow
def test_resume_on_another_number_of_ranks_keeps_the_order(launch: Launch, text: Path) -> None:
    """Two ranks, then one, then two: the losses are those of the run that was never stopped."""
    settings = {"data": text, "device_batch_size": 8, **EXACT, "warmdown_ratio": 0, "warmup_ratio": 0}
    whole = launch("./launch_train.sh", "1", CONFIG, **settings | {"num_iterations": 24}).ok()
    launch(*RUN, name="moved", **settings | {"num_iterations": 8}).ok()
    one = launch("./launch_train.sh", "1", tiny=False, resume="moved", num_iterations=16).ok()
    assert "saved by 2 ranks, continued by 1: the same samples in the same order, but not bit-exact" in one.output
    again = launch("./launch_train.sh", "2", tiny=False, resume="moved", num_iterations=24).ok()
    assert max(again.steps) == 24
    same(again, whole, 1e-2)


def test_a_refused_resume_leaves_the_run_as_it_was(launch: Launch, text: Path, tmp_path: Path) -> None:
    """Each refusal names the reason before a rank starts, and the plain command works afterwards."""
    launch(*RUN, name="kept", data=text, num_iterations=4, save_every=2).ok()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("not JSON\n")
    for flag, value, said in (
        ("depth", 2, "depth 1 (now 2)"),
        ("optimizer", "adamw", "optimizer muon (now adamw)"),
        ("data", bad, "not JSON"),
    ):
        refused = launch("./launch_train.sh", "2", tiny=False, resume="kept", num_iterations=6, **{flag: value})
        assert refused.wait() == 2 and said in refused.output, refused.output
        assert refused.summary["steps"] == 4, "the end of the run is still told"
    again = launch("./launch_train.sh", "2", tiny=False, resume="kept", num_iterations=6).ok()
    assert max(again.steps) == 6 and "changed in the resumed run" not in again.output


def test_a_resume_says_what_it_changes(launch: Launch, text: Path, tmp_path: Path) -> None:
    launch(*RUN, name="kept", data=text, num_iterations=4).ok()
    other = tmp_path / "other.txt"
    other.write_bytes((ROOT / "LICENSE").read_bytes()[1000:9000])
    run = launch("./launch_train.sh", "2", tiny=False, resume="kept", num_iterations=6, seed=5, data=other).ok()
    assert "seed 1337 → 5" in run.output and "not what the run would have been without the stop" in run.output
    assert "the data is not what kept was trained on so far: its epoch begins anew" in run.output


def test_a_resume_without_a_checkpoint_says_so(launch: Launch, text: Path) -> None:
    run = launch(*RUN, name="early", data=text, num_iterations=100000, save_every=0)
    run.wait_for("Iter: 3,")
    run.process.send_signal(signal.SIGKILL)
    run.wait()
    again = launch("./launch_train.sh", "2", tiny=False, resume="early", num_iterations=4).ok()
    assert "has no checkpoint yet: it begins again at step 0" in again.output and len(again.steps) >= 4

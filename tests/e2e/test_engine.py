"""The engine with real ranks: the same training for any number of ranks, and detection of ranks that
diverge."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import Launched
from tests.e2e.hooks import at_rank, in_forward
from training.core.rundir import read_json, read_records

Launch = Callable[..., Launched]
CONFIG = "configs/dual_gpu/quickstart.py"
RUN = ("./launch_train.sh", "2", CONFIG)
EXACT = {"precision": "fp32", "total_batch_size": 512, "num_iterations": 10, "inspect_every": 1}
FOUR, SAVING = ("./launch_train.sh", "4", CONFIG), {"device_batch_size": 2, "save_every": 3}


def same(run: Launched, other: Launched, tolerance: float = 2e-3) -> None:
    """The same losses within floating-point tolerance; each step slightly amplifies the different
    order of sums."""
    assert run.losses == pytest.approx(other.losses, rel=tolerance)
    assert run.losses[:2] == pytest.approx(other.losses[:2], rel=1e-6), (
        "before the first difference is amplified"
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((ROOT / "LICENSE").read_bytes()[:9000])
    return path


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param("muon", marks=pytest.mark.slow), pytest.param("adamw", marks=pytest.mark.soak)],
)
def test_ranks_and_accumulation_train_like_one_process(
    launch: Launch, once: Launch, text: Path, optimizer: str
) -> None:
    settings = {"data": text, "optimizer": optimizer, **EXACT}
    one = once("./launch_train.sh", "1", CONFIG, device_batch_size=16, **settings)
    two = launch(*RUN, device_batch_size=8, **settings).ok()
    accumulated = launch(*RUN, device_batch_size=2, **settings).ok()
    for run in (two, accumulated):
        same(run, one)
    assert json.loads(accumulated.run.plan.read_text())["batch"]["accumulation"] == 4
    if optimizer == "adamw":  # Muon's bf16 arithmetic amplifies the different order of sums
        assert accumulated.losses == pytest.approx(two.losses, rel=1e-4)
    assert one.losses[-1] < one.losses[0] - 1


@pytest.mark.slow
def test_gradients_in_bf16_train_nearly_the_same(launch: Launch, once: Launch, text: Path) -> None:
    settings = {"data": text, "optimizer": "muon", **EXACT}
    one = once("./launch_train.sh", "1", CONFIG, device_batch_size=16, **settings)
    run = launch(*RUN, device_batch_size=2, gradient_compression="bf16", **settings).ok()
    plan = json.loads(run.run.plan.read_text())
    assert plan["gradient_compression"]["value"] == "bf16" and plan["batch"]["accumulation"] == 4
    assert run.losses[0] == pytest.approx(one.losses[0], rel=1e-6)
    assert run.losses == pytest.approx(one.losses, rel=1e-2) and run.losses != one.losses


@pytest.mark.soak
def test_four_ranks_train_like_one_process(launch: Launch, once: Launch, text: Path) -> None:
    settings = {"data": text, "optimizer": "muon", **EXACT}
    one = once("./launch_train.sh", "1", CONFIG, device_batch_size=16, **settings)
    four = launch("./launch_train.sh", "4", CONFIG, device_batch_size=4, **settings).ok()
    accumulated = once(*FOUR, **settings, **SAVING)
    for run in (four, accumulated):
        same(run, one)


@pytest.mark.soak
def test_memory_saving_options_train_the_same(launch: Launch, text: Path) -> None:
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


@pytest.mark.slow
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
    assert (
        run.failure["rank"] == 1
        and "not disjoint and complete: see rank 1" in run.failure["summary"]
    )
    assert not run.steps, "nothing was trained on it"


@pytest.mark.slow
def test_diverging_parameters_are_detected(launch: Launch, text: Path) -> None:
    hook = at_rank(
        1,
        """
        import torch
        from training.tasks import optim
        original, calls = optim.Optimizers.step, [0]
        def drifting(self, *given):
            original(self, *given)
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
    assert (
        "parameters differ at step 8" in run.failure["summary"]
        and "first head.weight" in run.failure["summary"]
    )


@pytest.mark.soak
def test_nan_is_named_with_its_samples(launch: Launch, text: Path) -> None:
    run = launch(
        *RUN, data=text, hook=in_forward(1, 5, "return original(*args, **kwargs) * float('nan')")
    )
    assert run.wait() == 4
    assert run.failure["cause"] == "nan_loss" and run.failure["rank"] == 1
    assert max(run.steps) == 4, "the broken step is not recorded"
    summary = run.failure["summary"]
    assert "loss is nan on rank 1 at step 5" in summary
    named = [int(word) for word in summary.split("sequences ")[1].rstrip(")").split(", ")]
    events = [r for r in read_records(run.run.events) if r["event"] == "shards"]
    assert len(named) == 4 and all(
        0 <= i < events[0]["ranks"][1]["dataset_sequences"] for i in named
    )


@pytest.mark.soak
def test_resume_of_four_ranks_is_bit_exact(launch: Launch, once: Launch, text: Path) -> None:
    """With more than two ranks the order of sums depends on DDP's bucket layout, which changes
    after the first pass."""
    settings = {"data": text, "optimizer": "muon", **EXACT}
    whole = once(*FOUR, **settings, **SAVING)
    assert launch(*FOUR, name="cut", inject="kill@rank=2,step=5", **settings, **SAVING).wait() == 4
    resumed = launch("./launch_train.sh", "4", tiny=False, resume="cut").ok()
    assert "resumed from step_00000003" in resumed.output
    assert resumed.losses == whole.losses and len(whole.losses) == 10


@pytest.mark.slow
def test_resume_on_another_number_of_ranks_keeps_the_order(launch: Launch, text: Path) -> None:
    """Two ranks, then one, then two: the losses equal those of the uninterrupted run."""
    settings = {
        "data": text,
        "device_batch_size": 8,
        **EXACT,
        "warmdown_ratio": 0,
        "warmup_ratio": 0,
    }
    whole = launch("./launch_train.sh", "1", CONFIG, **settings | {"num_iterations": 24}).ok()
    launch(*RUN, name="moved", **settings | {"num_iterations": 8}).ok()
    one = launch("./launch_train.sh", "1", tiny=False, resume="moved", num_iterations=16).ok()
    assert (
        "saved by 2 ranks, continued by 1: the same samples in the same order, but not bit-exact"
        in one.output
    )
    again = launch("./launch_train.sh", "2", tiny=False, resume="moved", num_iterations=24).ok()
    assert max(again.steps) == 24
    same(again, whole, 1e-2)


@pytest.mark.soak
def test_a_refused_resume_leaves_the_run_as_it_was(
    launch: Launch, text: Path, tmp_path: Path
) -> None:
    """Each refusal names the reason before a rank starts, and the plain command still works
    afterwards."""
    launch(*RUN, name="kept", data=text, num_iterations=4, save_every=2).ok()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("not JSON\n")
    for flag, value, said in (
        ("depth", 2, "depth 1 (now 2)"),
        ("optimizer", "adamw", "optimizer muon (now adamw)"),
        ("data", bad, "not JSON"),
    ):
        refused = launch(
            "./launch_train.sh", "2", tiny=False, resume="kept", num_iterations=6, **{flag: value}
        )
        assert refused.wait() == 2 and said in refused.output, refused.output
        assert refused.summary["steps"] == 4, "the summary is unchanged"
    again = launch("./launch_train.sh", "2", tiny=False, resume="kept", num_iterations=6).ok()
    assert max(again.steps) == 6 and "changed in the resumed run" not in again.output


@pytest.mark.soak
def test_a_resume_reports_its_changes(launch: Launch, text: Path, tmp_path: Path) -> None:
    launch(*RUN, name="kept", data=text, num_iterations=4).ok()
    other = tmp_path / "other.txt"
    other.write_bytes((ROOT / "LICENSE").read_bytes()[1000:9000])
    run = launch(
        "./launch_train.sh", "2", tiny=False, resume="kept", num_iterations=6, seed=5, data=other
    ).ok()
    assert (
        "seed 1337 → 5" in run.output
        and "the result differs from an uninterrupted run" in run.output
    )
    assert "the data of kept has changed: an unfinished epoch restarts" in run.output


@pytest.mark.soak
def test_a_resume_with_other_decisions_reports_them(launch: Launch, text: Path) -> None:
    """The configuration is auto both times, but resolves differently, as on a CPU without bf16."""
    kept = launch(*RUN, name="kept", data=text, num_iterations=4).ok()
    made = json.loads(kept.run.plan.read_text())
    assert made["config"]["precision"] == "auto"
    other = "fp32" if made["precision"]["value"] == "bf16" else "bf16"
    kept.run.plan.write_text(
        json.dumps(made | {"precision": {"value": other, "reason": "as it was there"}})
    )
    run = launch(
        "./launch_train.sh", "2", tiny=False, resume="kept", num_iterations=6, device_batch_size=2
    ).ok()
    now = made["precision"]["value"]
    said = (
        f"decided differently than before the stop: precision {other} → {now}, device_batch_size "
        f"4 → 2; not bit-exact"
    )
    assert said in run.output
    again = launch("./launch_train.sh", "2", tiny=False, resume="kept", num_iterations=8).ok()
    assert "decided differently" not in again.output


@pytest.mark.soak
def test_a_resume_with_another_batch_trains_the_rest_of_the_epoch(
    launch: Launch, text: Path
) -> None:
    """One epoch, stopped halfway, resumed with twice the batch: every sequence once, and the same
    token counts."""
    flags = {"data": text, "num_iterations": 0, "num_epochs": 1, "save_every": 5}
    cut = launch(*RUN, name="cut", **flags)
    cut.wait_for("Iter: 15,")
    cut.process.send_signal(signal.SIGTERM)
    assert cut.wait() == 75
    stopped = cut.summary["steps"]
    sequences = next(r for r in read_records(cut.run.events) if r["event"] == "shards")["ranks"][0][
        "dataset_sequences"
    ]
    left = (sequences - 8 * stopped) // 16
    assert left > 3
    resumed = launch("./launch_train.sh", "2", tiny=False, resume="cut", total_batch_size=512).ok()
    assert max(resumed.steps) == stopped + left
    assert (
        resumed.summary["tokens"]
        == 256 * stopped + 512 * left
        == resumed.steps[stopped + left]["tokens"]
    )
    assert read_json(resumed.run.data)["total_steps"] == stopped + left  # type: ignore[index]
    assert f"steps {stopped + 1} to {stopped + left} in " in resumed.output


@pytest.mark.soak
def test_shared_muon_equals_unshared_muon_bit_for_bit(launch: Launch, text: Path) -> None:
    import torch

    alone = """
        from training.tasks.gpt import muon
        class NoGroup:
            is_available = is_initialized = staticmethod(lambda: False)
        muon.dist = NoGroup
"""
    settings = {"data": text, "depth": 3, "num_iterations": 20}
    shared = launch(*RUN, **settings).ok()
    each = launch(*RUN, **settings, hook=at_rank(0, alone) + at_rank(1, alone)).ok()
    assert shared.losses == each.losses
    states = [
        torch.load(r.run.checkpoints / "step_00000020/state.pt", weights_only=True)
        for r in (shared, each)
    ]
    assert all(
        torch.equal(states[1]["model"][name], value) for name, value in states[0]["model"].items()
    )
    moments = [state["optimizer"][0]["state"] for state in states]
    assert len(moments[0]) == 21 and moments[0].keys() == moments[1].keys()
    for index, values in moments[0].items():
        assert all(torch.equal(moments[1][index][name], value) for name, value in values.items())


@pytest.mark.soak
def test_a_full_disk_does_not_end_the_training(launch: Launch, text: Path) -> None:
    """No file of rank 0 can grow beyond 200 kB during the second checkpoint."""
    hook = at_rank(
        0,
        """
        import resource
        from training.trainer import checkpoint
        original, calls = checkpoint.save, [0]
        def limited(*args):
            calls[0] += 1
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            if calls[0] == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limit[1]))
            try:
                return original(*args)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        checkpoint.save = limited
""",
    )
    run = launch(*RUN, data=text, save_every=4, keep_checkpoints=9, hook=hook).ok()
    assert "checkpoint of step 8 was not saved: [Errno 27] File too large" in run.output
    assert [p.name for p in sorted(run.run.checkpoints.iterdir())] == [
        "step_00000004",
        "step_00000012",
    ]


@pytest.mark.soak
def test_missing_validation_is_reported_once(launch: Launch, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_bytes((ROOT / "LICENSE").read_bytes()[:1100])
    run = launch(
        *RUN,
        data=short,
        eval_every=2,
        num_iterations=4,
        max_seq_len=64,
        device_batch_size=1,
        total_batch_size=128,
    ).ok()
    assert run.output.count("the validation text has 0 sequences of 64 tokens, fewer than one") == 1


@pytest.mark.soak
def test_a_resume_without_a_checkpoint_reports_it(launch: Launch, text: Path) -> None:
    run = launch(*RUN, name="early", data=text, num_iterations=100000, save_every=0)
    run.wait_for("Iter: 3,")
    run.process.send_signal(signal.SIGKILL)
    run.wait()
    again = launch("./launch_train.sh", "2", tiny=False, resume="early", num_iterations=4).ok()
    assert "has no checkpoint yet: it restarts at step 0" in again.output and len(again.steps) >= 4

"""The moving average of the weights (--ema) and the best checkpoint (--keep_best) on two ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.conftest import ROOT
from tests.e2e.conftest import Launched
from training import tasks
from training.config.batch import Batch
from training.core import manifest, run_reader
from training.core.find_run import RunSelector
from training.core.rundir import RunDir, read_records
from training.inspector.distributed import World
from training.tasks import weights
from training.trainer import prepared_cache
from training.trainer.evaluate import evaluate

RUN = ("./launch_train.sh", "2", "configs/dual_gpu/quickstart.py")
STEPS, CUT, DECAY = 8, 5, 0.7
CPU = torch.device("cpu")


def states(run: RunDir) -> dict[int, dict[str, Any]]:
    """The state of each checkpoint, by step."""
    return {
        int(path.name.removeprefix("step_")): torch.load(path / manifest.STATE, weights_only=True)
        for path in manifest.all_in(run.checkpoints)
    }


def bits_per_byte(run: RunDir, state: dict[str, torch.Tensor]) -> float:
    """Of these weights on the validation data of the run, on one rank."""
    plan = run_reader.read_plan(run.plan)
    assert plan
    task = tasks.make(plan, CPU, prepared_cache.published(run))
    data = task.rows("val")
    assert data
    model = task.model()
    model.load_state_dict(state)
    session = SimpleNamespace(
        raw=model,
        validation=data,
        world=World(0, 0, 1, CPU, "none", "-"),
        batch=Batch(4, task.config.max_seq_len, 1, 1),
        config=task.config,
        task=task,
        autocast=torch.autocast(
            "cpu", torch.bfloat16, enabled=plan["precision"]["value"] == "bf16"
        ),
        compiled=False,
    )
    found = evaluate(cast("Any", session))
    assert found
    return found["bpb"]


@pytest.mark.slow
def test_the_average_and_the_best_checkpoint_survive_a_resume(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    text = tmp_path / "license.txt"
    text.write_bytes((ROOT / "LICENSE").read_bytes()[:30000])
    flags = {"data": text, "num_iterations": STEPS, "ema": DECAY, "keep_best": True}
    flags |= {"eval_every": 2, "save_every": 1, "keep_checkpoints": STEPS}
    whole = launch(*RUN, name="whole", **flags).ok()
    saved = states(whole.run)
    assert set(saved) == set(range(1, STEPS + 1))

    wanted = {name: value.double() for name, value in saved[1]["ema"].items()}
    for step in range(2, STEPS + 1):
        decay = min(DECAY, step / (step + 9))
        for name, before in wanted.items():
            wanted[name] = decay * before + (1 - decay) * saved[step]["model"][name].double()
        for name, value in saved[step]["ema"].items():
            assert torch.allclose(value.double(), wanted[name], rtol=0, atol=1e-6), (step, name)

    last = saved[STEPS]
    evaluations = [r for r in read_records(whole.run.metrics) if "val_bpb" in r]
    assert [r.get("weights") for r in evaluations] == ["ema"] * 4
    recorded = [r["val_bpb"] for r in evaluations]
    averaged = bits_per_byte(whole.run, {**last["model"], **last["ema"]})
    assert recorded[-1] == pytest.approx(averaged, rel=1e-4)
    assert recorded[-1] != pytest.approx(bits_per_byte(whole.run, last["model"]), rel=1e-3)

    # Interrupted after step 5; step 4 gets a score that no later evaluation reaches.
    cut = RunDir(whole.run.path.with_name("cut"))
    shutil.copytree(whole.run.path, cut.path)
    cut.summary.unlink()
    for path in manifest.all_in(cut.checkpoints)[CUT:]:
        shutil.rmtree(path)
    best = cut.checkpoints / "step_00000004"
    facts = manifest.read(best)[0]
    assert facts and facts["score"] and facts["score"]["name"] == "val_bpb"
    del facts["own_sha256"]
    manifest.write(best, {**facts, "score": {"name": "val_bpb", "value": 0.5}})

    resumed = launch(*RUN[:2], tiny=False, resume=cut.path, keep_checkpoints=1, save_every=0).ok()
    kept = [path.name for path in manifest.all_in(cut.checkpoints)]
    assert kept == ["step_00000004", "step_00000008"], resumed.output[-2000:]
    again = states(cut)[STEPS]
    for part in ("model", "ema"):
        for name, value in last[part].items():
            assert torch.equal(value, again[part][name]), (part, name)
    asker = RunSelector("RUN", "", "")
    found = [weights.find(f"{cut.path}{word}", tmp_path, asker) for word in ("", "/best")]
    assert [(one.step, one.kind) for one in found] == [(STEPS, "ema"), (4, "ema")]

    # Without the average the scores are those of the weights as trained.
    launch(*RUN[:2], tiny=False, resume=cut.path, num_iterations=STEPS + 2, ema=0).ok()
    newest = [r for r in read_records(cut.metrics) if "val_bpb" in r][-1]
    state = states(cut)
    assert "weights" not in newest and "ema" not in state[STEPS + 2] and set(state) == {4, 10}
    assert newest["val_bpb"] == pytest.approx(
        bits_per_byte(cut, state[STEPS + 2]["model"]), rel=1e-4
    )
    found = [weights.find(f"{cut.path}{word}", tmp_path, asker) for word in ("", "/best")]
    assert [(one.step, one.kind) for one in found] == [(STEPS + 2, "raw"), (4, "ema")]

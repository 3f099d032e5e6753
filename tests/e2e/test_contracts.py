"""Records of a real run match the declared contracts: no undeclared field, no required field
missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from tests.e2e.conftest import Launched
from training.core import rundir
from training.core.contracts import events, metrics, plan, run_files, state
from training.monitor.state import RunWatch

pytestmark = pytest.mark.slow

CONFIG = "configs/dual_gpu/quickstart.py"
PARTS = {
    "place": plan.PlaceRecord,
    "command": plan.CommandRecord,
    "task": plan.TaskRecord,
    "batch": plan.BatchRecord,
}
OF_GPT = {"memory": plan.PlannedMemory, "data": plan.CorpusRecord}
# by two kinds of events
SHARED = {
    "checkpoint": events.CheckpointFacts,
    "resume": events.CheckpointFacts,
}
# several GPUs whose communication was measured
OF_GPUS = {"communication", "exchange", "bucket_mib", "blocks_per_graph"}
OF_A_CONFIG = {"reported_memory"}  # by its authors
OUT_OF_MEMORY = {"keeps_savings"}  # before
OF_POWER = {"power_w", "joules_per_unit"}  # of GPUs
OF_FP16 = {"skipped_steps", "loss_scale"}
OF_SAMPLES = {"samples", "samples_per_s"}
OF_A_LOG = {"scope", "told_every_s", "tokens_per_s_of"}
OF_FEWER = {"elastic", "lost", "planned_ranks"}  # of --min_ranks
OF_ANOTHER_MACHINE = {"shared"}
OF_A_LAUNCHER = {"agents", "torchrun_id", "submission"}  # torchrun, SLURM
OF_FEWER_RESTARTS = {"ranks", "lost", "back", "expected_slowdown"}
OF_A_SCRIPT = {"output_age_s", "last_line", "cpu_percent", "rss_bytes", "gpu_bytes"}
OF_TIME = {"used_s"}  # of --max_time


def differs(
    record: Mapping[str, Any] | None, declared: Any, without: Iterable[str] = ()
) -> set[str]:
    """Fields that only one of them has, without the scores named by a task: val_…"""
    assert record is not None
    return {
        name
        for name in record.keys() ^ (set(declared.__annotations__) - set(without))
        if not name.startswith("val_")
    }


def test_the_files_of_a_recovered_run_match_the_contracts(once: Callable[..., Launched]) -> None:
    settings = {
        "eval_every": 7,
        "save_every": 4,
        "num_iterations": 14,
        "inject": "kill@rank=1,step=11",
    }
    run = once("./train_dual_gpu_enhanced.sh", CONFIG, **settings).run
    made = rundir.read_json(run.plan) or {}
    rare = {"script", "init_from"} | OF_GPUS | OF_A_CONFIG | OF_FEWER | OF_ANOTHER_MACHINE
    rare |= OF_A_LAUNCHER | OUT_OF_MEMORY
    assert differs(made, plan.Plan, rare) == set()
    assert {
        name: found
        for name, part in (PARTS | OF_GPT).items()
        if (found := differs(made[name], part))
    } == {}
    assert differs(rundir.read_json(run.data), run_files.DataRecord, {"failed"}) == set()
    of_watched = {"found"}
    assert (
        differs(rundir.read_json(run.supervisor), run_files.SupervisorRecord, of_watched) == set()
    )
    assert (
        differs(
            rundir.read_json(run.summary), run_files.SummaryRecord, OF_SAMPLES | OF_FP16 | OF_FEWER
        )
        == set()
    )
    rare = OF_TIME | {"ema", "task_sha256", "unevaluated"}
    for file in run.checkpoints.glob("*/manifest.json"):
        assert differs(json.loads(file.read_text()), run_files.ManifestRecord, rare) == set()
    for record in rundir.read_records(run.metrics):
        declared = metrics.StepRecord if "loss" in record else metrics.EvaluationRecord
        without = OF_SAMPLES | OF_FP16 | OF_POWER | OF_TIME | {"weights"}
        assert differs(record, declared, without) == set()
    seen = set()
    for record in rundir.read_records(run.events):
        seen.add(kind := record.pop("event"))
        assert record.pop("time") > made["created"] - 60
        if kind != "eval":
            declared = SHARED.get(kind) or getattr(events, f"{kind.capitalize()}Facts")
            rare = {"since_s", "waiting", "folder", "final"} | OF_FEWER_RESTARTS
            if kind == "recovered":
                rare = rare | {"text"}
            missing = declared.__optional_keys__ | rare
            assert differs(record, declared, missing - record.keys()) == set()
    assert seen >= {
        "start",
        "resume",
        "eval",
        "checkpoint",
        "shards",
        "end",
        "injected",
        "verdict",
        "failure",
        "restart",
        "recovered",
    }


def test_the_state_of_a_run_matches_the_contract(once: Callable[..., Launched]) -> None:
    settings = {
        "eval_every": 7,
        "save_every": 4,
        "num_iterations": 14,
        "inject": "kill@rank=1,step=11",
    }
    seen: Mapping[str, Any] = RunWatch(
        once("./train_dual_gpu_enhanced.sh", CONFIG, **settings).run
    ).read()
    assert differs(seen, state.RunState) == set()
    parts = {
        "run": state.RunFacts,
        "progress": state.ProgressState,
        "training": state.TrainingState,
        "system": state.HostState,
    }
    assert {
        name: found
        for name, part in parts.items()
        if (found := differs(seen[name], part, OF_A_LOG | OF_FEWER))
    } == {}
    assert [differs(rank, state.RankState, OF_A_SCRIPT) for rank in seen["ranks"]] == [set(), set()]

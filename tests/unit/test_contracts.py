"""Records in the run directory: their declarations, older versions, and no untyped dicts."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

import training
from tests.unit.conftest import ROOT
from training.config.batch import Batch
from training.core import codes, manifest, run_reader, rundir, standing
from training.core.contracts import events, kinds, plan, preflight, run_files, state
from training.core.errors import Exit, UserError
from training.data.duration import TrainingLength
from training.data.prepared_corpus import PreparedCorpus
from training.host import gpu_processes, gpus
from training.host.env_vars import Variable
from training.host.placement import Topology
from training.launcher.slurm.code_snapshot import Code
from training.plan.preflight.report import Check
from training.plan.script_program import Script
from training.tasks.gpt.memory import Estimate
from training.trainer.checkpoint import TrainProgress

UNTYPED = re.compile(r"\bdict\[str, Any\]")
# Files with untyped dicts, with the reason; everything else is a typed record.
ALLOWED = {
    "core/rundir.py": "reads a file that any version of Duet may have written",
    "core/jsonl.py": "defines Record",
    "core/args.py": "values of flags, typed by their Flag",
    "core/contracts/kinds.py": "values of configuration fields: their types are in the schema",
    "core/contracts/metrics.py": "task-specific metrics",
    "core/contracts/run_files.py": "task-specific shape and data",
    "core/contracts/state.py": "summary.json and failure.json, unchanged",
    "data/loader.py": "torch's loader and its iterator",
    "tasks/optim.py": "torch's parameter groups",
    "trainer/checkpoint.py": "arguments of torch.save()",
    "trainer/tracking.py": "arguments of wandb.init()",
    "monitor/report/chart_types.py": "JSON of Vega-Lite",
    "inspector/transformers.py": "inputs of a user model",
}


def declared(record: Any) -> set[str]:
    """The fields of a TypedDict, including inherited ones."""
    return set(record.__annotations__)


def of(made_from: Any) -> set[str]:
    return {field.name for field in fields(made_from)}


@pytest.mark.parametrize(
    ("record", "made_from", "more"),
    [
        (plan.GpuRecord, gpus.Gpu, set()),
        (plan.GpuProcessRecord, gpu_processes.GpuProcess, set()),
        (plan.VariableRecord, Variable, set()),
        (plan.PlaceRecord, Topology, set()),
        (plan.BatchRecord, Batch, set()),
        (plan.ScriptRecord, Script, {"-installed"}),
        (preflight.CheckRecord, Check, {"-facts", "code"}),
        (run_files.CodeRecord, Code, {"sentence"}),
        (
            run_files.DataRecord,
            PreparedCorpus,
            {"failed", "total_steps", "steps_per_epoch", "epochs"},
        ),
        (events.StartFacts, TrainingLength, {"step", "world_size"}),
    ],
)
def test_records_match_their_dataclasses(record: Any, made_from: Any, more: set[str]) -> None:
    """mypy does not compare them, since asdict() is cast to the record."""
    left_out = {name.removeprefix("-") for name in more if name.startswith("-")}
    assert declared(record) == (of(made_from) - left_out) | (
        more - {f"-{name}" for name in left_out}
    )


def test_estimate_and_progress_match_their_records() -> None:
    none = Estimate(0, 0, 0, 0, 0, 0, 0, 0)
    assert declared(plan.MemoryRecord) == set(none.record())
    assert set(TrainProgress().record()) <= declared(run_files.ManifestRecord)
    assert set(manifest.KEYS) <= declared(run_files.ManifestRecord)
    assert declared(state.HealthRow) >= {"rank", "pid", "phase"}


def test_every_kind_has_a_meaning() -> None:
    assert set(get_args(events.EventKind)) == codes.EVENTS.keys()
    found = (kinds.HangKind, kinds.ExitKind, kinds.PeerKind)
    assert {kind for one in found for kind in get_args(one)} <= codes.VERDICTS.keys()


def written(tmp_path: Path, **facts: object) -> rundir.RunDir:
    run = rundir.RunDir(tmp_path / "run")
    run.create()
    rundir.write_json(
        run.plan,
        {
            "created": 1.0,
            "ranks": 2,
            "config": {"depth": 3},
            "origins": {"depth": "default"},
            **facts,
        },
    )
    return run


@pytest.mark.parametrize("version", [{}, {"schema_version": 1}])
def test_plans_of_this_version_and_of_pending_jobs_are_read(
    tmp_path: Path, version: dict[str, int]
) -> None:
    known = standing.read_plan(written(tmp_path, **version))
    assert known is not None
    # Models of earlier versions had other keys.
    assert (known["ranks"], known["config"]) == (2, {"depth": 3, "key_offset": False})


def test_old_field_names_are_renamed(tmp_path: Path) -> None:
    run = written(
        tmp_path,
        schema_version=1,
        config={"meeting_timeout": 7},
        origins={"meeting_timeout": "default"},
    )
    known = standing.read_plan(run)
    assert known is not None
    assert (known["config"], known["origins"]) == (
        {"rendezvous_timeout": 7},
        {"rendezvous_timeout": "default"},
    )
    rundir.append_json(run.metrics, {"step": 1, "own_ms": [1.0]})


@pytest.mark.parametrize(
    ("facts", "by"),
    [
        ({"schema_version": run_reader.PLAN_VERSION + 1, "duet_version": "9.1"}, "Duet 9.1"),
        ({"schema_version": run_reader.PLAN_VERSION + 1}, "another version of Duet"),
        ({"schema_version": "two"}, "another version of Duet"),
        ({"schema_version": 0}, "another version of Duet"),
    ],
)
def test_a_plan_of_a_later_version_is_rejected_with_its_writer(
    tmp_path: Path, facts: dict[str, object], by: str
) -> None:
    run = written(tmp_path, **facts)
    with pytest.raises(UserError) as caught:
        standing.read_plan(run)
    (problem,) = caught.value.problems
    assert caught.value.code == Exit.CONFIG and problem.fixes
    for part in (
        str(run.plan),
        f"written by {by}:",
        repr(facts["schema_version"]),
        f"Duet {training.__version__} reads 1",
    ):
        assert part in problem.what


def test_a_missing_or_incomplete_plan_is_none(tmp_path: Path) -> None:
    run = written(tmp_path)
    run.plan.write_text('{"created": 1')
    assert run_reader.read_plan(run.plan) is None
    run.plan.unlink()
    assert run_reader.read_plan(run.plan) is None


def test_untyped_dicts_are_listed() -> None:
    found = {
        str(path.relative_to(ROOT / "training")): f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "training").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if UNTYPED.search(line)
    }
    assert {place for name, place in found.items() if name not in ALLOWED} == set()
    assert ALLOWED.keys() - found.keys() == set(), "no longer needed here"

"""Readers of a run directory's files, as typed records (training.core.contracts); None: the file is
missing or incomplete.

The version of plan.json applies to the whole run directory and is checked here. Older versions are
read: renamed fields get their new names here, added fields are NotRequired in the contract. Later
versions may change the meaning of a field and are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import training
from training.core import json_text, rundir
from training.core.errors import Problem, UserError
from training.core.messages import msg

if TYPE_CHECKING:
    from training.core.contracts.events import EventRecord
    from training.core.contracts.plan import Plan
    from training.core.contracts.preflight import PreflightRecord
    from training.core.contracts.run_files import DataRecord, SummaryRecord, SupervisorRecord
    from training.core.contracts.verdict import FailureRecord, RankErrorRecord

# The version of the run directory, stored in plan.json; increased by changes that break readers.
PLAN_VERSION = 2  # 2: --key_offset, which version 1 would ignore
RENAMED = {"meeting_timeout": "rendezvous_timeout"}  # configuration fields of early 0.1
# Configuration fields of a model that early 0.1 lacks, where its runs had another value than the
# default.
ADDED = {"key_offset": False}


def read_plan(path: Path) -> Plan | None:
    """Raises UserError for a plan of a later version."""
    found = rundir.read_json(path)
    return None if found is None else as_plan(found, path)


def as_plan(found: Mapping[str, Any], path: Path) -> Plan:
    """The plan with current field names; `path` is for the error message. A plan without a version
    belongs to a job that has not started. Raises UserError."""
    version = found.get("schema_version", PLAN_VERSION)
    if not isinstance(version, int) or not 1 <= version <= PLAN_VERSION:
        by = (
            f"Duet {found['duet_version']}"
            if "duet_version" in found
            else msg("core.run_reader.another")
        )
        what = msg(
            "core.run_reader.later",
            path=path,
            by=by,
            version=version,
            own=training.__version__,
            readable=PLAN_VERSION,
        )
        raise UserError(
            Problem(
                "run.later_version",
                what,
                msg("core.run_reader.older_run"),
                [msg("core.run_reader.use_later")],
            )
        )
    renamed = {
        part: _renamed(found[part])
        for part in ("config", "origins")
        if isinstance(found.get(part), dict)
    }
    if "depth" in renamed.get("config", {}):
        renamed["config"] = {**ADDED, **renamed["config"]}
    return cast("Plan", {**found, **renamed})


def _renamed(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {RENAMED.get(name, name): value for name, value in fields.items()}


def read_summary(path: Path) -> SummaryRecord | None:
    """The summary of a training. That of a script has fewer fields
    (contracts.run_files.ScriptSummary): check for them where a run may be a script."""
    return cast("SummaryRecord | None", json_text.numbers(rundir.read_json(path)))


def read_failure(path: Path) -> FailureRecord | None:
    return cast("FailureRecord | None", rundir.read_json(path))


def read_rank_error(path: Path) -> RankErrorRecord | None:
    return cast("RankErrorRecord | None", rundir.read_json(path))


def read_supervisor(path: Path) -> SupervisorRecord | None:
    return cast("SupervisorRecord | None", rundir.read_json(path))


def read_data(path: Path) -> DataRecord | None:
    return cast("DataRecord | None", rundir.read_json(path))


def read_preflight(path: Path) -> PreflightRecord | None:
    return cast("PreflightRecord | None", rundir.read_json(path))


def read_events(path: Path) -> Iterator[EventRecord]:
    return cast("Iterator[EventRecord]", rundir.read_records(path))

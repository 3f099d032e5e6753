"""The files of a run directory as typed records (training.core.contracts). A file may be of another
version of Duet: here that is looked at, once; None is a file that is missing or not (yet) whole.

The version of plan.json is that of the whole run directory. Each reader knows every older one: what
has another name since is renamed here, what was added since is NotRequired in the contract. A later
version may mean something else by the same words, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import training
from training.core import rundir
from training.core.errors import Problem, UserError

if TYPE_CHECKING:
    from training.core.contracts.events import EventRecord
    from training.core.contracts.plan import Plan, PreflightRecord
    from training.core.contracts.run_files import DataRecord, SummaryRecord, SupervisorRecord
    from training.core.contracts.verdict import FailureRecord, RankErrorRecord

# Of plan.json, and with it of the whole run directory. A change that breaks readers raises it.
PLAN_VERSION = 1
RENAMED = {"meeting_timeout": "rendezvous_timeout"}  # configuration fields of early 0.1


def read_plan(path: Path) -> Plan | None:
    """Raises UserError for the plan of a later version."""
    found = rundir.read_json(path)
    return None if found is None else as_plan(found, path)


def as_plan(found: Mapping[str, Any], path: Path) -> Plan:
    """`path`: where it was found, for people. A plan without a version is that of a job that has
    not started yet. Raises UserError."""
    version = found.get("schema_version", PLAN_VERSION)
    if not isinstance(version, int) or not 1 <= version <= PLAN_VERSION:
        by = (
            f"Duet {found['duet_version']}"
            if "duet_version" in found
            else "another version of Duet"
        )
        what = (
            f"{path} was written by {by}: its schema_version is {version!r}; Duet "
            f"{training.__version__} reads 1 to {PLAN_VERSION}"
        )
        raise UserError(
            Problem(
                "run.later_version",
                what,
                "a run of this version or an older one",
                ["use the Duet that wrote it, or a later one"],
            )
        )
    renamed = {
        part: _renamed(found[part])
        for part in ("config", "origins")
        if isinstance(found.get(part), dict)
    }
    return cast("Plan", {**found, **renamed})


def _renamed(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {RENAMED.get(name, name): value for name, value in fields.items()}


def read_summary(path: Path) -> SummaryRecord | None:
    """Of a training; a script's has less (contracts.run_files.ScriptSummary), so a reader that may
    meet one asks for its fields."""
    return cast("SummaryRecord | None", rundir.read_json(path))


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

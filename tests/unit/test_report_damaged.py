"""A report of files and records that are missing or damaged."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.monitor_runs import Made
from tests.unit.report_runs import event, page_of, planned, read, trained
from training.core import rundir, standing
from training.monitor.report import chart_render
from training.monitor.report.chart_types import Chart
from training.monitor.report.run import read_run

ODD: tuple[Any, ...] = ({}, [], "x", 1e308, 5e-324, -1, None, True)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A failed run of two starts, with a value in every field that a report reads."""
    made = planned(
        tmp_path / "experiments" / "quick",
        config={"depth": 3},
        origins={"depth": "default"},
        gpus=[{"name": "H200", "index": 0, "total_bytes": 141 << 30}],
        device={"value": "cuda", "reason": "as asked"},
        device_batch_size={"value": 8, "reason": "fits"},
        memory={"total_bytes": 1 << 29, "needed_bytes": 1 << 30, "free_bytes": 2 << 30},
        task={"name": "gpt", "unit": "tokens", "file": None, "options": {"depth": 3}},
        place={"nnodes": 2},
        notes=["a note"],
        launch="ab",
        starter=standing.identity(os.getpid()),
        driver="550",
    )
    data = {**(rundir.read_json(made.run.data) or {}), "bytes_per_token": 3.5, "documents": 7}
    rundir.write_json(made.run.data, data)
    made.first_step = made.at
    for kind, after_s, facts in (
        ("start", 0.1, {"step": 0, "total_steps": 400, "world_size": 2}),
        ("shards", 0.2, {"epoch": 1, "proven_sequences": 9, "pieces": "sequences"}),
        ("eval", 0.5, {"step": 2, "val_bpb": 2.0}),
        ("warning", 0.6, {"code": "warning.sample", "text": "no sample", "rank": 1}),
        ("failure", 0.7, {"cause": "hang", "rank": 0, "text": "no step"}),
        ("restart", 0.8, {"attempt": 2, "seconds_lost": 0.1, "text": "restarted"}),
        ("start", 20.0, {"step": 2, "total_steps": 400, "world_size": 2}),
        ("recovered", 21.0, {"attempt": 2, "step": 3, "seconds": 9.0}),
    ):
        event(made, kind, after_s, **facts)
    for step in (1, 2):
        made.step(step, 3.0, compute_ms=[40.0, 41.0], memory_bytes=[1 << 29, 1 << 29], mfu=0.3)
        made.score(step, 2.0)
    made.summary(parameters=10**6, time=made.at + 30, sample="def", launch="ab")
    made.failure()
    made.supervisor(os.getpid())
    profile = {
        "rank": 0, "timeline": "gpu", "first_step": 1, "last_step": 2, "step_ms": 9.0,
        "shares": {"forward": 0.5, "idle": 0.5},
        "longest": [{"name": "k", "count": 3, "ms": 1.0, "share": 0.1}],
        "waits": [{"name": "w", "operator": "o", "part": "idle", "count": 1, "ms": 0.5}],
    }  # fmt: skip
    made.run.profile_digest(0).parent.mkdir()
    rundir.write_json(made.run.profile_digest(0), profile)
    return made


def damaged(value: Any, odd: Any) -> Iterator[Any]:
    """Copies of a record in which one value each is replaced."""
    for key in value if isinstance(value, dict) else range(len(value)):
        copied = copy.deepcopy(value)
        copied[key] = odd
        yield copied
        if isinstance(value[key], dict | list):
            for inner in damaged(value[key], odd):
                copied = copy.deepcopy(value)
                copied[key] = inner
                yield copied


def test_any_damaged_value_leaves_a_report(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value of each file at a time, all files at once."""
    run = made.run

    def picture(chart: Chart) -> str:  # the real one takes a second for all charts of a page
        return json.dumps(chart.complete(), allow_nan=False)

    monkeypatch.setattr(chart_render, "available", lambda: True)
    monkeypatch.setattr(chart_render, "picture", picture)
    monkeypatch.setattr(chart_render, "program", str)
    files = [run.plan, run.data, run.preflight, run.supervisor, run.summary, run.failure]
    files += [run.profile_digest(0), run.metrics, run.events]
    whole = {
        file: [json.loads(line) for line in file.read_text().splitlines()]
        if file.suffix == ".jsonl"
        else json.loads(file.read_text())
        for file in files
    }
    failed, pages = dict[str, str](), 0
    for odd in ODD:
        series = {file: list(damaged(value, odd)) for file, value in whole.items()}
        for number in range(max(map(len, series.values()))):
            for file, variants in series.items():
                record = variants[number % len(variants)]
                lines = record if file.suffix == ".jsonl" else [record]
                file.write_text("".join(json.dumps(line) + "\n" for line in lines))
            pages += 1
            try:
                assert page_of(made)
            except Exception as error:  # report all
                trace = error.__traceback__
                while trace and trace.tb_next:
                    trace = trace.tb_next
                code = trace.tb_frame.f_code if trace else None
                where = f"{code.co_filename}:{trace.tb_lineno}" if code and trace else ""
                failed.setdefault(where, f"{odd!r:.20} at {number}: {error!r:.200}")
    assert not failed, failed
    assert pages > 100


def test_a_supervisor_with_a_damaged_time_is_of_a_dead_process() -> None:
    host = os.uname().nodename
    damaged_times: tuple[Any, ...] = ("x", [], {}, None)
    for odd in damaged_times:
        assert not standing.lives({"pid": os.getpid(), "host": host, "started": odd})


def test_a_resume_with_a_damaged_time_has_the_newest_plan(made: Made) -> None:
    """And the plan of the start before."""
    made.run.plan_before.write_bytes(made.run.plan.read_bytes())
    for odd in ODD:
        rundir.write_json(made.run.plan, {**made.plan, "created": odd})
        read_run(made.run)
    assert standing.plan_file(made.run) == made.run.plan


@pytest.mark.parametrize(
    "missing", ["plan", "metrics", "events", "data", "preflight", "heartbeats"]
)
@pytest.mark.parametrize(
    "content",
    [
        None,
        b'\xff\xfe\x00[[[{"time": 1, "st',
        b'{"config": 3, "gpus": 1, "batch": {"a": 1}, "checks": [1]}\n[1]\n',
    ],
)
def test_missing_or_damaged_files_cause_no_traceback(
    tmp_path: Path, missing: str, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(planned(tmp_path / "experiments" / "quick"), pace=1.6)
    monkeypatch.setattr(chart_render, "picture", lambda chart: json.dumps(chart.complete()))
    path: Path = getattr(whole.run, missing)
    if path.is_dir():
        path /= "rank0.bin"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert "Duet" in read(page_of(whole)).text

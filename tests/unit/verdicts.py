"""Outcomes of a run, and the failure records made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from training.core.contracts.kinds import HangKind
from training.core.contracts.plan import Plan
from training.core.contracts.verdict import FailureRecord
from training.core.heartbeat import Heartbeat
from training.core.rundir import RunDir, write_json
from training.launcher import failure_report
from training.launcher.outcome import Outcome
from training.watchdog.hang_report import HANG, HangFinding

TRACEBACK = (
    'Traceback (most recent call last):\n  File "/prog", line 3, in <module>\n    '
    "main()\nValueError: planted\n"
)


def beat_at(run: RunDir, step: int, phase: str = "forward") -> None:
    for rank in (0, 1):
        writer = Heartbeat(run.heartbeat(rank), rank)
        writer.step = step
        writer.beat(phase)


def new_run(folder: Path) -> RunDir:
    made = RunDir(folder / "experiments" / "run")
    made.create()
    beat_at(made, 7)
    return made


def plan(device: str = "cpu", **more: Any) -> dict[str, Any]:
    values = {
        "total_batch_size": 512,
        "device_batch_size": 8,
        "num_workers": 0,
        "out_dir": "experiments",
        "log_dir": "logs",
    }
    return {
        "config": values,
        "origins": dict.fromkeys(values, "default"),
        "command": {"script": "launch_train.sh", "args": []},
        "launch": "0123456789abcdef",
        "ranks": 2,
        "local_ranks": 2,
        "place": {"kind": "local", "node_rank": 0, "nnodes": 1},
        "batch": {"device_sequences": 8, "seq_len": 32, "world_size": 2, "accumulation": 1},
        "device": {"value": device, "reason": ""},
        "gpus": [],
    } | more


def report_error(
    run: RunDir,
    rank: int,
    kind: str,
    message: str,
    time: float = 1.0,
    guilty: int | None = None,
    **more: object,
) -> None:
    """Write the error report of a rank."""
    facts = {
        "rank": rank,
        "guilty_rank": rank if guilty is None else guilty,
        "time": time,
        "type": kind,
        "message": message,
    }
    write_json(
        run.rank_error(rank),
        facts | {"where": f"model.py:{rank}", "phase": None, "disk_full": False} | more,
    )


def spawned(*lines: str) -> str:
    """As torch.multiprocessing.spawn reports an exception of process 3."""
    return (
        "\n\n-- Process 3 terminated with the following error:\n"
        "Traceback (most recent call last):\n"
        '  File "/env/site-packages/torch/multiprocessing/spawn.py", line 87, in _wrap\n'
        "    fn(i, *args)\n"
        '  File "/data/train.py", line 9, in worker\n'
        '    raise ValueError("bad sample")\n'
    ) + "".join(f"{line}\n" for line in lines)


def failed(run: RunDir, status: int = 1, rank: int | None = 1, **outcome: Any) -> FailureRecord:
    shown: dict[str, Any] = {
        "guilty": (rank, status),
        "here": (rank, status),
        "phases": {0: "step 7: backward", 1: "step 7: forward"},
    }
    return failure_report.failure(Outcome(**shown | outcome), run, cast(Plan, plan()))


def verdict(record: FailureRecord) -> tuple[str, str, int | None]:
    return record["cause"], record["kind"], record["rank"]


def finding(kind: HangKind = HANG, rank: int | None = 1) -> HangFinding:
    waits = {0: "step 7: backward, waits in backward"}
    return HangFinding(
        kind,
        rank,
        "model.py:12" if rank else None,
        "is stuck at model.py:12",
        waits,
        {},
        3.2,
        "step 7: forward",
        "/runs/hangs/1",
    )

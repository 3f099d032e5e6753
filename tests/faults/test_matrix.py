"""Every fault that can be injected, with its verdict and time limit, measured from the fault's own
record to the verdict.

Not covered here: uneven batches cannot happen in this trainer; ports, host names, missing ranks,
/dev/shm and killed launchers are not faults of a rank and have their own tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.faults.conftest import SECONDS, Ended
from training.trainer import faults

Inject = Callable[..., Ended]
STUCK = r"training/trainer/faults/stuck\.py:\d+$"


@dataclass(frozen=True)
class Row:
    """`text`: pattern of the verdict; `waiting`: where the other rank waits; `advice`: in one of
    its lines."""

    spec: str
    limit_s: float
    kind: str  # of the verdict
    text: str
    code: int = 5
    cause: str = "hang"
    rank: int | None = 1
    where: str | None = STUCK
    phase: str | None = "step 5: forward"
    waiting: str = ""
    advice: str = ""
    epochs: bool = False  # on data of few steps an epoch
    flags: dict[str, object] = field(default_factory=dict)


def died(spec: str, says: str, **more: object) -> Row:
    return Row(spec, 2, "died", says, **{"code": 4, "cause": "killed", "where": None, **more})  # type: ignore[arg-type]


def error(
    spec: str, says: str, cause: str = "exception", limit_s: float = 2, **more: object
) -> Row:
    return Row(spec, limit_s, "error", says, **{"code": 4, "cause": cause, **more})  # type: ignore[arg-type]


TABLE = {
    "lock": Row(
        "sleep@step=5",
        6,
        "hang",
        r"^HANG rank 1 in 'step 5: forward' is stuck at .*\(_stuck_in_a_lock\)",
        waiting="backward",
    ),
    "SIGSTOP": Row("stop@step=5", 3, "stopped", "^STOPPED rank 1", waiting="backward"),
    "uninterruptible I/O": Row(
        "io@step=5", 10, "blocked", "^BLOCKED rank 1 .* blocked in I/O", waiting="backward"
    ),
    "persistent worker at epoch 2": Row(
        "worker_stuck@rank=0,epoch=2",
        6,
        "hang",
        r"^HANG rank 0 .* waits for its data-loader worker \(pid \d+\), which is stuck at "
        r".*\(_stuck_in_a_lock\)",
        rank=0,
        phase=r"step \d+: fetch|epoch 2: creating data iterator",
        waiting="backward|barrier",
        epochs=True,
        flags={"persistent_workers": True},
    ),
    "another collective": Row(
        "desync@step=5",
        6,
        "desync",
        r"^DESYNC: .* at collective \d+: rank 0: all_reduce of float \[\d+\]; rank 1: broadcast of "
        r"float \[7, 11\]",
        rank=None,
        where=None,
        phase=None,
    ),
    "GPU out of memory": error(
        "oom@step=5",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB",
        "gpu_oom",
        advice="device_batch_size is 4: try 2, the same 256 tokens per step with 2 × accumulation",
    ),
    "GPU memory error": error(
        "ecc@step=5",
        "uncorrectable ECC error encountered",
        "gpu_hardware",
    ),
    "exit 0": died(
        "exit@step=5",
        "^DIED rank 1 .*status 0",
        cause="exit_status",
    ),
    "lock, rank 0": Row(
        "sleep@rank=0,step=5",
        6,
        "hang",
        r"^HANG rank 0 .* is stuck at .*\(_stuck_in_a_lock\)",
        rank=0,
        waiting="backward",
    ),
    "lock before a barrier": Row(
        "sleep@rank=0,phase=epoch 2: creating data iterator",
        6,
        "hang",
        r"^HANG rank 0 .* is stuck at .*\(_stuck_in_a_lock\)",
        rank=0,
        phase="epoch 2: creating data iterator",
        waiting="barrier: before iteration",
        epochs=True,
    ),
    "tqdm at epoch 2": Row(
        "lock_tqdm@epoch=2,phase=barrier: before iteration",
        6,
        "hang",
        "^HANG rank 0",
        rank=0,
        where=r"training/trainer/progress\.py:\d+$",
        phase=None,
        waiting="backward",
        epochs=True,
    ),
    "tqdm": Row(
        "lock_tqdm@step=5",
        6,
        "hang",
        "^HANG rank 0",
        rank=0,
        where=r"training/trainer/progress\.py:\d+$",
        phase="step 5: record",
        waiting="step 6: backward",
    ),
    "GIL": Row(
        "gil@step=5", 6, "hang", "^HANG rank 1 .* holds the GIL in C, called at", waiting="backward"
    ),
    "endless loop": Row("loop@step=5", 6, "hang", "^HANG rank 1 .* spins at", waiting="backward"),
    "SIGSTOP while the data iterator is made": Row(
        "stop@rank=0,epoch=2",
        3,
        "stopped",
        "^STOPPED rank 0",
        rank=0,
        phase="epoch 2: creating data iterator",
        waiting="barrier",
        epochs=True,
    ),
    "worker": Row(
        "worker_stuck@epoch=2",
        6,
        "hang",
        r"^HANG rank 1 .* waits for its data-loader worker \(pid \d+\)",
        phase=r"step \d+: fetch",
        epochs=True,
    ),
    "another shape": Row(
        "desync_shape@step=5",
        6,
        "desync",
        # gloo aborts the rank with the shorter tensor: its own number can no longer be read
        r"^DESYNC: rank 1 got \d+ bytes where its all_reduce expects \d+, and was aborted by gloo: the "
        r"ranks call different collectives; rank 0 is in collective \d+, all_reduce of float \[\d+\]",
        code=4,
        cause="collective_timeout",
        rank=None,
        where=r"\.py:\d+$",
        phase=None,
        advice="every rank must call the same collectives",
    ),
    "SIGKILL": died("kill@step=5", "^DIED rank 1 in 'step 5: forward': killed by SIGKILL"),
    "SIGKILL, rank 0": died(
        "kill@rank=0,step=5", "^DIED rank 0 in 'step 5: forward': killed by SIGKILL", rank=0
    ),
    "SIGSEGV": died(
        "segv@step=5", "^DIED rank 1 .*killed by SIGSEGV", cause="segfault", where=STUCK
    ),
    "SIGABRT": died(
        "abort@step=5", "^DIED rank 1 .*killed by SIGABRT", cause="unknown", where=STUCK
    ),
    "exit 7": died("exit@step=5,code=7", "^DIED rank 1 .*status 7", cause="exit_status"),
    "exception": error("raise@step=5", "ValueError: injected on purpose"),
    "NaN": error(
        "nan@step=5",
        r"loss is nan on rank 1 at step 5 \(epoch 1, sequences \d+(, \d+){3}\)",
        "nan_loss",
        where=None,
        phase="step 5: record",
    ),
    "empty batch": error(
        "empty@step=5",
        "rank 1 had an empty batch at step 5",
        where=None,
        phase="step 5: record",
    ),
    "a rank without data": error(
        "no_data",
        "see rank 1",
        where=None,
        phase="epoch 1: creating data iterator|barrier: before iteration",
    ),
    "worker killed": error(
        "worker_kill@epoch=2",
        # Raised by torch's handler of SIGCHLD, wherever the rank is then.
        r"DataLoader worker \(pid \d+\) is killed by signal: Killed",
        "dataloader_worker_died",
        6,
        where=r"\.py:\d+$",
        phase=r"step \d+: fetch|barrier: .*",
        # Host memory is named too where the kernel log cannot be read.
        advice="/dev/shm is full",
        epochs=True,
    ),
    "worker without shared memory": error(
        "worker_bus@epoch=2",
        r"DataLoader worker \(pid \d+\) is killed by signal: Bus error",
        "shm_too_small",
        6,
        where=r"loader\.py:\d+$",
        phase=r"step \d+: fetch",
        advice="/dev/shm",
        epochs=True,
    ),
    "exception of a worker": error(
        "worker_raise@epoch=2",
        "ValueError: injected on purpose",  # the worker's own, not what its rank raises
        "exception",
        6,
        phase=r"step \d+: fetch",
        epochs=True,
    ),
    "open files": error(
        "files",
        "Too many open files",
        "too_many_open_files",
        where=r".*",
        phase="epoch 1: creating data iterator",
        flags={"num_workers": 1},
    ),
    "disk full at the last checkpoint": error(
        "enospc",
        "No space left on device",
        "disk_full",
        rank=0,
        where=r"faults/data\.py:\d+$",
        phase="checkpoint",
        advice="free space in",
    ),
}
# One row for each detection mechanism: by `make check`, and by CI. All rows: `make soak`.
CHECK = {"lock", "another collective", "exit 0"}
CI = {
    "SIGSTOP",
    "uninterruptible I/O",
    "persistent worker at epoch 2",
    "GPU out of memory",
    "GIL",
    "SIGSEGV",
    "NaN",
}
CI |= {"worker killed", "disk full at the last checkpoint"}


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in CHECK else [pytest.mark.slow if name in CI else pytest.mark.soak]


def test_every_row_of_check_and_ci_is_in_the_table() -> None:
    assert set(TABLE) >= CHECK | CI and not CHECK & CI


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=name, marks=marks(name)) for name, row in TABLE.items()]
)
def test_fault_verdict_and_time(
    inject: Inject,
    epochs: dict[str, object],
    row: Row,
    record_property: Callable[[str, object], None],
) -> None:
    ended = inject(row.spec, **(epochs if row.epochs else {}), **row.flags)
    record_property(SECONDS, ended.seconds)
    verdict, failure = ended.verdict, ended.failure
    assert (verdict["kind"], verdict["rank"]) == (row.kind, row.rank), verdict
    assert re.search(row.text, verdict["text"]), verdict
    assert ended.seconds <= row.limit_s
    assert ended.code == row.code == failure["exit_code"]
    assert (failure["cause"], failure["kind"], failure["rank"]) == (row.cause, row.kind, row.rank)
    assert "ranks" not in failure, "one rank has the fault"
    if row.where is None:
        assert failure["where"] is None
    else:
        assert re.search(row.where, failure["where"])
    assert row.phase is None or re.fullmatch(row.phase, failure["phase"])
    if row.code == 5:
        assert 0 < failure["since_s"] < row.limit_s + 3
        stacks = ended.run.run.path / failure["stacks"]
        assert {p.name.split(".")[0] for p in stacks.glob("rank*")} >= {"rank0", "rank1"}
        if row.phase == "step 5: forward":
            assert [failure["phases"][rank].partition(":")[0] for rank in "01"] == ["step 5"] * 2, (
                "the other rank waits"
            )
    if row.waiting:
        assert re.search(row.waiting, failure["waiting"][str(1 - (row.rank or 0))])
    assert any(row.advice in line for line in failure["advice"])
    assert "training failed" in ended.run.output


def test_every_fault_is_in_this_folder() -> None:
    text = "".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")
    )
    assert [name for name in faults.TABLE if not re.search(rf"[\";]{name}[@\";]", text)] == []


def test_the_documentation_lists_the_same_faults() -> None:
    text = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| ([^|]+) \| (\d+) s \|$", text, re.MULTILINE)
    assert [(name, spec, float(limit)) for name, spec, _, limit in listed] == [
        (name, r.spec, r.limit_s) for name, r in TABLE.items()
    ]

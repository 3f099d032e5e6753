"""Verdicts with the errors of GPUs that the kernel or the driver has reported."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tests.unit.test_verdict_kernel import (
    ABORT,
    GPUS,
    KILL,
    LOST,
    PIDS,
    XID,
    failed,
    quoted,
    run_with_pids,
)
from tests.unit.verdicts import plan, report_error, verdict
from training.cli import draft
from training.core.contracts.plan import Plan
from training.core.rundir import RunDir, write_json
from training.diagnose import result, signatures
from training.host import kernel_log
from training.host.kernel_log import KernelLog
from training.host.xid_events import XidEvent
from training.launcher import failed_gpus, failure_report
from training.launcher.outcome import Outcome
from training.watchdog.rank_exit import RankExit

# as an NVSwitch machine reports the end of rank 1 within a collective by NVLS
NVLS = "\n".join(
    XID.format(bus=bus, text=f"137, pid={pid}, name=python, NVLink: TLC RX PRIV Error on link 3")
    for bus, pid in (("3b", PIDS[0]), ("5e", PIDS[1]))
)
CONTAINED = XID.format(bus="3b", text="94, pid=4100, Contained: SM (0x1). RST: No, D-RST: No")
ROW = XID.format(bus="3b", text="63, pid='<unknown>', Row Remapper: New row marked for remapping")
LINK = XID.format(bus="3b", text="74, pid='<unknown>', NVLink: fatal error detected on link 4")
NONFATAL = XID.format(bus="3b", text="145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2)")
CORRECTED = XID.format(bus="3b", text="121, pid='<unknown>', C2C Link corrected error")
PEER = "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(kernel_log, "KMSG", tmp_path / "kmsg")
    return run_with_pids(tmp_path)


class Reported:
    """Errors that the driver has reported meanwhile."""

    def __init__(self, *numbers: int, gpu: int = 1) -> None:
        self.events = [XidEvent(f"GPU-{gpu}", number, 0.0) for number in numbers]
        self.closed = False

    def read(self) -> list[XidEvent]:
        return self.events

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("numbers", "cause", "shown"),
    [((45, 79), "gpu_hardware", 1), ((31,), "unknown", 1), ((45,), "unknown", 0)],
)
def test_errors_that_the_driver_reports(
    run: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[int, ...],
    cause: str,
    shown: int,
) -> None:
    """In a container, which may not read the kernel's log."""
    monkeypatch.setenv("PATH", str(tmp_path))
    told = Reported(*numbers)
    record = failed(run, "", ABORT, kernel=KernelLog(), xids=told)
    assert verdict(record) == (cause, "died", 1) and told.closed
    assert [f"Xid {numbers[-1]}: GPU 1 (0000:5e:00.0)" in line for line in quoted(record)] == [
        True
    ] * shown
    assert record["kernel"]["source"] == ("NVML" if shown else "")
    assert quoted(failed(run, "", ABORT, xids=Reported(79, gpu=7))) == [], "not the run's"


def test_the_same_error_is_shown_once(run: RunDir) -> None:
    line = LOST.format(bus="5e")
    assert quoted(failed(run, line, ABORT, xids=Reported(79))) == [line]


@pytest.mark.parametrize(
    ("kind", "message", "status", "cause"),
    [
        ("KeyError", "'planted'", 1, "exception"),
        ("", "", KILL, "killed"),
        ("AssertionError", "CUDA error: device-side assert triggered", 1, "cuda_device_assert"),
        ("DistBackendError", "Watchdog caught collective operation timeout", 1, None),
    ],
)
def test_the_end_of_a_rank_within_nvls_is_not_a_failure_of_the_link(
    run: RunDir, kind: str, message: str, status: int, cause: str | None
) -> None:
    if kind:
        report_error(run, 1, kind, message)
    lines = f"{NVLS}\n{CONTAINED}\n{NONFATAL}\n{CORRECTED}"
    without, record = failed(run, "", status), failed(run, lines, status)
    assert verdict(record) == verdict(without) and quoted(record) == lines.splitlines()
    assert record["cause"] == (cause or record["cause"]) != "gpu_hardware"


def test_the_victim_of_nvls_is_seen_first(run: RunDir) -> None:
    report_error(run, 1, "KeyError", "'planted'", time=1.0)
    report_error(run, 0, "AcceleratorError", PEER, time=2.0)
    record = failed(run, f"{NVLS}\n{CONTAINED}", 1, guilty=(0, 1), here=(0, 1))
    assert verdict(record) == ("exception", "error", 1)
    run.rank_error(1).unlink()
    assert failed(run, LINK, 1, guilty=(0, 1), here=(0, 1))["cause"] == "gpu_hardware"


@pytest.mark.parametrize("lines", [CONTAINED, f"{ROW}\n{NVLS}\n{CONTAINED}"])
def test_a_contained_error_of_the_memory_itself(run: RunDir, lines: str) -> None:
    assert verdict(failed(run, lines, ABORT)) == ("gpu_hardware", "died", 0)


def test_a_link_breaks_with_the_gpu_at_its_end(run: RunDir) -> None:
    record = failed(run, f"{LINK}\n{LOST.format(bus='5e')}", ABORT)
    assert verdict(record) == ("gpu_hardware", "died", 1)
    assert verdict(failed(run, LINK, ABORT)) == ("gpu_hardware", "died", 0)


def test_what_follows_the_first_failure_does_not_count(run: RunDir) -> None:
    kernel_log.KMSG.touch()
    log, told = KernelLog(), Reported(79)
    log.hold()
    told.events = [replace(one, time=time.time() + 1) for one in told.events]
    record = failed(run, LOST.format(bus="5e"), ABORT, kernel=log, xids=told)
    assert verdict(record) == ("unknown", "died", 1) and quoted(record) == []


def test_an_error_of_a_gpu_after_a_reported_exception_is_of_its_end(run: RunDir) -> None:
    report_error(run, 1, "KeyError", "'planted'", time=5.0)
    told = Reported(79)
    told.events = [replace(one, time=6.0) for one in told.events]
    assert verdict(failed(run, "", 1, xids=told)) == ("exception", "error", 1)
    told.events = [replace(one, time=4.0) for one in told.events]
    assert verdict(failed(run, "", 1, xids=told))[0] == "gpu_hardware"


@pytest.mark.parametrize("reported", [False, True])
def test_the_rank_of_a_lost_gpu_is_blamed_not_its_peer_which_failed_first(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    gone = "GPU 1 is no longer visible"
    monkeypatch.setattr(failed_gpus, "lost", lambda *_: (gone, (1,)))
    report_error(run, 0, "AcceleratorError", "CUDA error: unknown error", time=1.0)
    if reported:
        report_error(run, 1, "AcceleratorError", "CUDA error: unspecified launch failure", time=2.0)
    for rank in (0, 1):
        run.rank_log(rank).write_text(f"of rank {rank}\n")
    death = RankExit("error", 0, "model.py:0", "CUDA error: unknown error")
    record = failed(run, "", 1, guilty=(0, 1), here=(0, 1), death=death)
    assert verdict(record) == ("gpu_hardware", "error" if reported else "died", 1)
    assert record["where"] == ("model.py:1" if reported else None)
    assert (record["summary"], record["evidence"]) == (gone, ["of rank 1"])
    assert record["log"] == str(run.rank_log(1))
    report_error(run, 0, "OSError", "[Errno 28] No space left on device", disk_full=True)
    assert verdict(failed(run, "", 1, guilty=(0, 1), here=(0, 1)))[0::2] == ("disk_full", 0)


@pytest.mark.parametrize(
    ("rank", "own", "lost", "lost_ranks"),
    [(5, 1, 0, [5]), (1, 1, 0, [1]), (1, 4, 1, [1]), (5, 4, 1, None)],
    ids=["own GPU", "own GPU, machine of rank 0", "all", "all of another machine"],
)
def test_a_rank_of_another_launcher_with_a_lost_gpu_is_blamed_itself(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    own: int,
    lost: int,
    lost_ranks: list[int] | None,
) -> None:
    """8 ranks on two machines. `own`: number of GPUs that it sees."""
    monkeypatch.setattr(failed_gpus, "lost", lambda *_: ("GPU is gone", (lost,)))
    place = {"kind": "rank", "node_rank": 0, "nnodes": 1}
    cards = [{"index": n, "uuid": f"GPU-{n}", "name": "Card"} for n in range(own)]
    made = plan("cuda", place=place, ranks=8, local_ranks=4)
    write_json(run.plan, made | {"schema_version": 1})
    used = draft._planned(run, cast(Plan, made | {"gpus": cards}))
    report_error(run, rank, "AcceleratorError", "CUDA error: unspecified launch failure")
    record = failure_report.failure(Outcome(guilty=(rank, 1), here=(rank, 1)), run, used)
    assert verdict(record) == ("gpu_hardware", "error", rank)
    assert record.get("lost_ranks") == lost_ranks


@pytest.mark.parametrize(
    "text",
    [
        "79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "48, pid=1423, name=python, DBE (double bit error) detected in FB",
        "119, pid=3418, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
    ],
    ids=["bus", "ecc", "gsp"],
)
def test_the_advice_on_a_gpu_is_that_of_its_error(run: RunDir, text: str) -> None:
    """After Xid 79 a reset does not help."""
    line = XID.format(bus="5e", text=text)
    own = next(s for s in signatures.signatures() if any(re.search(p, line) for p in s.patterns))
    record = failed(run, line, ABORT)
    general = signatures.causes()["gpu_hardware"].ours.sentences()[0].partition("{")[0]
    assert record["advice"][: len(own.advice.en)] == list(own.advice.en)
    assert not any(general in one for one in record["advice"])
    write_json(run.plan, plan(gpus=GPUS, created=0.0))
    write_json(run.failure, dict(record))
    assert result.diagnose([run.path])["advice"] == record["advice"]
    contained = XID.format(bus="5e", text="94, pid=7061, name=python, Contained: CE User Channel")
    assert failed(run, contained, ABORT)["advice"][0].startswith(general)

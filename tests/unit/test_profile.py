"""The digest of a trace, and a profiler that fails."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.monitor_runs import Made
from training.core import heartbeat, rundir
from training.core.messages import msg
from training.monitor.report import profile_section
from training.monitor.report.run import read_run
from training.trainer import profile_digest, profiler


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: object) -> Any:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def mark(name: str, ts: float, dur: float) -> Any:
    return event("user_annotation", name, ts, dur)


HOST = [
    mark("ProfilerStep#2", 0, 1000),
    mark("duet: fetch", 0, 100),
    mark("duet: forward", 100, 300),
    mark("duet: backward", 400, 400),
    mark("duet: optimizer", 800, 150),
    event("cpu_op", "aten::linear", 100, 200),
    event("cpu_op", "aten::addmm", 110, 150),
    event("cpu_op", "aten::mm", 400, 100),
    # From 450 on, beside the operator; from 500 to 780 the rank waits.
    event("user_annotation", "gloo:all_reduce", 450, 330, tid=2),
    event("user_annotation", "gloo:all_reduce", 800, 20, tid=2),  # too short for a wait
]


def test_the_host_s_time_is_divided_by_phases_and_waits() -> None:
    found = profile_digest.digest(HOST, 1, "cpu", 12, "rank1.trace.json.gz")
    assert (found["timeline"], found["first_step"], found["last_step"]) == ("host", 12, 12)
    assert found["step_ms"] == 1
    assert found["shares"] == {
        "data": 0.1,
        "forward": 0.3,
        "backward": 0.12,
        "optimizer": 0.15,
        "communication": 0.28,
        "other": 0.05,
    }
    assert found["overlapped"] == 0.07
    own = {entry["name"]: entry["ms"] for entry in found["longest"]}
    assert own == {"aten::addmm": 0.15, "aten::mm": 0.1, "aten::linear": 0.05}
    (wait,) = found["waits"]
    assert (wait["name"], wait["part"], wait["ms"]) == ("communication", "backward", 0.28)


GPU = [
    # The host launches a step in 300 µs, then waits for the GPU.
    mark("ProfilerStep#2", 0, 900),
    mark("duet: forward", 0, 100),
    mark("duet: backward", 100, 100),
    mark("duet: optimizer", 200, 700),
    event("cpu_op", "aten::item", 290, 600),
    event("cpu_op", "aten::_local_scalar_dense", 295, 590),
    event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
    event("cuda_runtime", "cudaLaunchKernel", 110, 5, tid=9, correlation=2),  # autograd's thread
    event("cuda_runtime", "cudaLaunchKernel", 120, 5, correlation=3),
    event("cuda_runtime", "cudaLaunchKernel", 210, 5, correlation=4),
    event("cuda_runtime", "cudaMemcpyAsync", 220, 5, correlation=5),
    event("cuda_runtime", "cudaStreamSynchronize", 300, 580),
    event("kernel", "gemm", 100, 200, tid=7, correlation=1),
    event("kernel", "gemm", 300, 300, tid=7, correlation=2),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32", 500, 200, tid=8, correlation=3),
    event("kernel", "adam", 700, 100, tid=7, correlation=4),
    event("gpu_memcpy", "Memcpy DtoH", 900, 100, tid=7, correlation=5),
]


def test_the_gpu_s_time_is_divided_by_the_phase_that_launched_it() -> None:
    found = profile_digest.digest(GPU, 0, "cuda", 5, "rank0.trace.json.gz")
    assert (found["timeline"], found["step_ms"]) == ("gpu", 1)
    assert found["shares"] == {
        "data": 0,
        "forward": 0.2,
        "backward": 0.3,
        "optimizer": 0.2,
        "communication": 0.1,  # alone, from 600 to 700
        "other": 0,
        "idle": 0.2,
    }
    assert found["overlapped"] == 0.1
    assert next((e["name"], e["count"], e["ms"]) for e in found["longest"]) == ("gemm", 2, 0.5)
    (wait,) = found["waits"]
    assert (wait["name"], wait["operator"]) == (
        "cudaStreamSynchronize",
        "aten::_local_scalar_dense",
    )
    assert (wait["part"], wait["ms"]) == ("optimizer", 0.58)


def test_a_copy_that_is_not_asynchronous_is_a_wait() -> None:
    calls = ["cudaMemcpy", "cudaMemcpyAsync", "cudaStreamWaitEvent", "cuCtxSynchronize"]
    events = [event("cuda_runtime", name, 820 + i, 1) for i, name in enumerate(calls)]
    found = profile_digest.digest([*GPU[:4], GPU[12], *events], 0, "cuda", 5, "")
    assert sorted(wait["name"] for wait in found["waits"]) == ["cuCtxSynchronize", "cudaMemcpy"]


def raw(kind: str, cat: str, name: str, ts: float, **more: Any) -> Any:
    return {"ph": kind, "cat": cat, "name": name, "pid": 4711, "tid": 4711, "ts": ts, **more}


def test_a_file_as_torch_writes_it_on_a_gpu(tmp_path: Path) -> None:
    """Names, categories and places of events as in traces of torch 2.0 to 2.8 with CUPTI: events of
    the GPU have its number as pid and the stream as tid; flows, instants and metadata have no
    duration; ranges of the host are repeated on the GPU's streams."""
    at, device = 2_413_669_097_000.0, {"pid": 0, "tid": 7}
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": at, "args": {"name": "p"}},
        raw("i", "", "Iteration Start: PyTorch Profiler", at, pid="Traces", s="g"),
        raw("X", "Trace", "PyTorch Profiler (0)", at - 500, pid="Spans", dur=9000),
        raw("X", "overhead", "Activity Buffer Request", at + 5, pid=-1, tid=0, dur=1500),
        raw("X", "python_function", "training/trainer/loop.py(74): train", at, dur=1000),
        raw("X", "user_annotation", "ProfilerStep#11", at, dur=1000),
        raw("X", "gpu_user_annotation", "ProfilerStep#11", at + 50, dur=900, **device),
        raw("X", "user_annotation", "duet: forward", at, dur=300),
        raw("X", "gpu_user_annotation", "duet: forward", at + 50, dur=850, **device),
        raw("X", "user_annotation", "duet: backward", at + 300, dur=300),
        raw("X", "user_annotation", "nccl:all_reduce", at + 410, dur=20, tid=4800),
        raw("X", "gpu_user_annotation", "nccl:all_reduce", at + 500, dur=200, pid=0, tid=20),
        raw("X", "user_annotation", "duet: optimizer", at + 600, dur=400),
        raw("X", "cpu_op", "Torch-Compiled Region: 0/0", at + 10, dur=200),
        raw("X", "cuda_driver", "cuLaunchKernelEx", at + 20, dur=4, args={"correlation": 31}),
        raw("s", "ac2g", "ac2g", at + 20, id=31),
        raw("f", "ac2g", "ac2g", at + 50, id=31, bp="e", **device),
        raw("X", "kernel", "triton_poi_fused_add_0", at + 50, dur=250, args={"correlation": 31}, **device),
        # autograd's thread; its own number for a thread of NCCL
        raw("X", "cpu_op", "aten::mm", at + 310, dur=60, tid=4800),
        raw("X", "cuda_runtime", "cudaLaunchKernel", at + 320, dur=4, tid=4800, args={"correlation": 32}),
        raw("X", "kernel", "ampere_sgemm_128x64_nn", at + 300, dur=300, args={"correlation": 32}, **device),
        raw("X", "cuda_runtime", "cudaLaunchKernelExC", at + 420, dur=4, tid=-247463936, args={"correlation": 33}),
        raw("X", "kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            at + 500, dur=200, pid=0, tid=20, args={"correlation": 33}),
        raw("X", "cuda_runtime", "cudaStreamWaitEvent", at + 605, dur=1),
        raw("X", "cuda_sync", "Stream Wait Event", at + 605, dur=1, **device),
        raw("X", "cuda_runtime", "cudaEventQuery", at + 606, dur=1),
        raw("X", "cpu_op", "aten::item", at + 610, dur=140),
        raw("X", "cpu_op", "aten::_local_scalar_dense", at + 611, dur=138),
        raw("X", "cuda_runtime", "cudaMemcpyAsync", at + 612, dur=5, args={"correlation": 34}),
        raw("X", "gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", at + 700, dur=50,
            args={"correlation": 34}, **device),
        raw("X", "cuda_runtime", "cudaStreamSynchronize", at + 620, dur=130),
        raw("X", "cuda_sync", "Stream Sync", at + 620, dur=130, **device),
        raw("X", "cuda_runtime", "cudaFree", at + 760, dur=40),
        raw("X", "cuda_runtime", "cudaMalloc", at + 801, dur=30),
        raw("X", "cuda_runtime", "cudaFreeAsync", at + 832, dur=1),
    ]  # fmt: skip
    trace = tmp_path / "rank0.trace.json.gz"
    content = {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "displayTimeUnit": "ms"}
    trace.write_bytes(gzip.compress(json.dumps(content | {"traceEvents": events}).encode()))
    found = profile_digest.of_trace(trace, 0, "cuda", 11)
    assert (found["timeline"], found["first_step"], found["last_step"]) == ("gpu", 11, 11)
    assert found["step_ms"] == 1
    shares = {"data": 0, "forward": 0.25, "backward": 0.3, "optimizer": 0.05, "other": 0}
    assert found["shares"] == shares | {"communication": 0.1, "idle": 0.3}
    assert found["overlapped"] == 0.1
    assert [(w["name"], w["operator"], w["part"], w["ms"]) for w in found["waits"]] == [
        ("cudaStreamSynchronize", "aten::_local_scalar_dense", "optimizer", 0.13),
        ("cudaFree", "", "optimizer", 0.04),
    ]


def test_a_call_belongs_to_the_innermost_operator_and_all_are_found_in_one_pass() -> None:
    read = 0

    class Counted(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            nonlocal read
            read += 1
            return super().__getitem__(key)

    events = [mark("ProfilerStep#2", 0, 100_000), mark("duet: forward", 0, 100_000)]
    events.append(event("kernel", "gemm", 10, 20, tid=7))
    calls = 500
    for i in range(calls):
        at = 100 * i
        events += [
            event("cpu_op", "aten::linear", at, 40),
            event("cpu_op", "aten::item", at + 50, 40),
            event("cpu_op", "aten::_local_scalar_dense", at + 55, 20),
            event("cpu_op", "aten::add", at + 55, 40, tid=2),
            event("cuda_runtime", "cudaStreamSynchronize", at + 60, 5),
            event("cuda_runtime", "cudaDeviceSynchronize", at + 80, 5),
            event("cuda_runtime", "cudaEventSynchronize", at + 95, 1),
        ]
    counted: Any = [Counted(one) for one in events]
    found = profile_digest.digest(counted, 0, "cuda", 5, "")
    assert {(wait["name"], wait["operator"], wait["count"]) for wait in found["waits"]} == {
        ("cudaStreamSynchronize", "aten::_local_scalar_dense", calls),
        ("cudaDeviceSynchronize", "aten::item", calls),
        ("cudaEventSynchronize", "", calls),
    }
    assert read < 50 * len(events)


def test_a_trace_without_steps_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": HOST[5:]}).encode()))
    with pytest.raises(ValueError, match="no step"):
        profile_digest.of_trace(trace, 0, "cpu", 1)


def session(folder: Path, profile: int, total: int) -> Any:
    run = rundir.RunDir(folder)
    run.create()
    return SimpleNamespace(
        config=SimpleNamespace(profile=profile),
        run=run,
        world=SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu")),
        length=SimpleNamespace(total_steps=total),
        position=SimpleNamespace(step=0),
    )


def codes(run: rundir.RunDir) -> list[str]:
    return [e["code"] for e in rundir.read_records(run.events) if e["event"] == "warning"]


@pytest.fixture
def pulse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> heartbeat.Heartbeat:
    made = heartbeat.Heartbeat(tmp_path / "rank0.bin", 0)
    monkeypatch.setattr(heartbeat, "current", made)
    return made


def work(pulse: heartbeat.Heartbeat, profiled: profiler.StepProfiler, steps: int) -> list[int]:
    """The steps before which the profiler was at work."""
    busy = []
    for step in range(1, steps + 1):
        if profiled.begin(step):
            busy.append(step)
        for phase in heartbeat.STEP_PHASES:
            pulse.beat(phase)
            torch.ones(8, 8) @ torch.ones(8, 8)
    profiled.close()
    return busy


@pytest.mark.parametrize(
    ("steps", "total", "profiled", "busy"),
    [
        pytest.param(3, 20, (11, 13), [9, 10, 11, 12, 13, 14], marks=pytest.mark.slow),
        (3, 5, (3, 5), [1, 2, 3, 4, 5]),
        pytest.param(9, 4, (2, 4), [1, 2, 3, 4], marks=pytest.mark.slow),
    ],
)
def test_steps_after_the_warm_up_are_profiled(
    tmp_path: Path,
    pulse: heartbeat.Heartbeat,
    steps: int,
    total: int,
    profiled: tuple[int, int],
    busy: list[int],
) -> None:
    state = session(tmp_path / "run", steps, total)
    planned = profiler.planned(state)
    assert planned
    assert work(pulse, planned, total) == busy
    digest = rundir.read_json(state.run.profile_digest(0)) or {}
    assert (digest["first_step"], digest["last_step"]) == profiled
    assert sum(digest["shares"].values()) == pytest.approx(1, abs=0.01)
    assert digest["shares"]["forward"] > 0
    assert "aten::mm" in [entry["name"] for entry in digest["longest"]]
    assert codes(state.run) == []
    assert "beat" not in vars(pulse), "the heartbeat is as before"


def test_fewer_ranks_leave_no_file_of_an_earlier_profile(
    tmp_path: Path, pulse: heartbeat.Heartbeat
) -> None:
    """As after a resume on one rank of two."""
    state = session(tmp_path / "run", 1, 2)
    state.run.profile.mkdir()
    for rank in (0, 1, 2):
        state.run.trace(rank).touch()
        state.run.profile_digest(rank).touch()
    planned = profiler.planned(state)
    assert planned
    work(pulse, planned, 2)
    assert {one.name for one in state.run.profile.iterdir()} == {
        "rank0.json",
        "rank0.trace.json.gz",
    }


def test_without_the_flag_there_is_no_profiler(tmp_path: Path) -> None:
    assert profiler.planned(session(tmp_path, 0, 100)) is None


def test_too_few_steps_for_a_profile_are_reported(tmp_path: Path) -> None:
    state = session(tmp_path, 2, 1)
    assert profiler.planned(state) is None
    assert codes(state.run) == ["warning.profile"]


@pytest.mark.parametrize("steps", [3, 9])  # before the profiler starts, and in steps it discards
def test_an_end_before_the_first_profiled_step_is_reported(
    tmp_path: Path, pulse: heartbeat.Heartbeat, steps: int
) -> None:
    state = session(tmp_path / "run", 5, 100)
    planned = profiler.planned(state)
    assert planned
    work(pulse, planned, steps)
    (warning,) = [e for e in rundir.read_records(state.run.events) if e["event"] == "warning"]
    assert f"after step {steps}" in warning["text"] and warning["code"] == "warning.profile"
    assert not state.run.profile.exists()


@pytest.mark.parametrize("part", ["start", "step", "export_chrome_trace"])
def test_a_profiler_that_fails_does_not_end_the_training(
    tmp_path: Path, pulse: heartbeat.Heartbeat, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    monkeypatch.setattr(torch.profiler.profile, part, fails)
    state = session(tmp_path / "run", 2, 20)
    planned = profiler.planned(state)
    assert planned
    work(pulse, planned, 20)
    (warning,) = [e for e in rundir.read_records(state.run.events) if e["event"] == "warning"]
    assert warning["code"] == "warning.profile" and "CUPTI_ERROR" in warning["text"]
    assert not state.run.profile_digest(0).exists()
    assert "beat" not in vars(pulse)


def test_a_profiler_that_fails_while_it_records_is_stopped(
    tmp_path: Path, pulse: heartbeat.Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []

    def fails(_: object) -> None:
        if torch.autograd._profiler_enabled():
            recorded.append(True)
            raise RuntimeError("CUDA error")

    monkeypatch.setattr(profiler.StepProfiler, "_synchronize", fails)
    state = session(tmp_path / "run", 2, 4)
    planned = profiler.planned(state)
    assert planned
    work(pulse, planned, 4)
    assert recorded and not torch.autograd._profiler_enabled()
    assert codes(state.run) == ["warning.profile"]
    assert not state.run.profile_digest(0).exists()


def test_the_report_shows_each_rank_and_survives_a_damaged_digest(tmp_path: Path) -> None:
    gpu = dict(profile_digest.digest(GPU, 0, "cuda", 5, ""))
    run: Any = SimpleNamespace(
        profiles=[gpu, {"rank": 1, "shares": 3, "longest": [None], "waits": {}}],
        folder=rundir.RunDir(tmp_path),
    )
    chart = profile_section.shares_chart(run)
    assert chart and sum(chart.columns["y"]) == pytest.approx(1.0)
    page = profile_section.tables(run)
    assert page and "gemm" in page and "cudaStreamSynchronize" in page
    run.profiles = []
    assert profile_section.shares_chart(run) is None and profile_section.tables(run) is None


def test_the_report_has_no_rank_of_an_earlier_profile(made: Made) -> None:
    """One of three ranks, then one of two after a resume, which the second has not ended."""
    made.run.profile.mkdir()
    for rank, first in ((0, 40), (1, 3), (2, 40)):
        rundir.write_json(made.run.profile_digest(rank), {"rank": rank, "first_step": first})
    assert [one["rank"] for one in read_run(made.run).profiles] == [0]


def test_waits_are_unknown_where_no_gpu_activity_was_recorded(tmp_path: Path) -> None:
    unknown, shown = msg("monitor.report.profile.waits_not_recorded"), []
    for device in ("cpu", "cuda"):
        profiles = [{"rank": 0, "device": device, "timeline": "host"}]
        run: Any = SimpleNamespace(profiles=profiles, folder=rundir.RunDir(tmp_path))
        shown.append(unknown in str(profile_section.tables(run)))
    assert shown == [False, True]

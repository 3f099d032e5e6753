"""`--check`: the verdict, the report for programs and the one for an issue, and the measurement
itself; `--explain`."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import ENHANCED, ROOT, Shell, python
from tests.unit.test_host_preflight import Usage
from training.cli import doctor
from training.config import flags
from training.core import redact
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.core.units import GIB
from training.host import cgroups
from training.plan import training_plan as planner
from training.plan.preflight import ERROR, OK, WARNING, Check
from training.plan.request import Request
from training.tasks.gpt import fake_memory
from training.tasks.gpt.memory import Estimate, StepWorkload, estimate
from training.tasks.gpt.step import GptStep
from training.tasks.memory import Measured, Unavailable

LOAD = StepWorkload(4, 2, 64, 320, bf16=True, compiled=False, cuda=False)


@pytest.fixture
def made(home: Path) -> tuple[Request, dict[str, Any]]:
    """A request and its plan, on the CPU."""
    request, plan, _ = planner.make(ENHANCED, ["--device=cpu", "--depth=1", "--check"], {})
    return request, plan


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring is tested below; it takes a second."""
    monkeypatch.setattr(
        doctor, "memory", lambda step, room: doctor.StepMemory(step, room, None, "not in this test")
    )
    monkeypatch.setattr(doctor, "communication", lambda request, plan, checks: [])


@pytest.mark.parametrize(
    ("room_gib", "shown", "status"),
    [
        (14.0, "fits, 12.0 GiB needed, 14.0 GiB free", OK),
        (13.0, "tight, 12.0 GiB to 13.5 GiB needed, 13.0 GiB free", WARNING),
        (11.0, "does not fit, 12.0 GiB needed, 11.0 GiB free", ERROR),
        (None, "unknown, 12.0 GiB needed, free memory unknown", OK),
    ],
)
def test_the_verdict(
    room_gib: float | None,
    shown: str,
    status: str,
    made: tuple[Request, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = None if room_gib is None else int(room_gib * GIB)
    monkeypatch.setattr(GptStep, "estimate", Estimate(10 * GIB, 0, 0, 0, 0, 0, 0, 0))
    step = doctor.StepMemory(GptStep(LOAD), room, None)
    assert (doctor.sentence(10 * GIB, room, on_gpu=False), step.check(made[0]).status) == (
        shown,
        status,
    )
    assert step.lines()[-1] == f"verdict: {shown}"


def test_both_figures_are_shown() -> None:
    text = "\n".join(doctor.memory(GptStep(LOAD), 8 * GIB).lines())
    assert (
        "formula (eager, 16-bit" in text
        and "fake tensors (the same step)" in text
        and "× the formula" in text
    )
    assert text.endswith("8.0 GiB free")


def test_a_failing_check_or_memory_is_exit_3(
    made: tuple[Request, dict[str, Any]], unmeasured: None
) -> None:
    request, plan = made
    assert doctor.run(request, plan, [Check("a", OK, "b")]).code == Exit.DONE
    assert doctor.run(request, plan, [Check("a", WARNING, "b")]).code == Exit.DONE
    assert doctor.run(request, plan, [Check("a", ERROR, "b")]).code == Exit.RESOURCES
    plan["memory"]["free_bytes"] = 1 << 20
    assert doctor.run(request, plan, []).code == Exit.RESOURCES


def test_a_formula_that_is_low_is_corrected_with_what_fits_then(home: Path, shell: Shell) -> None:
    asked = ["--device=cpu", "--activation_checkpointing=none"]
    request, plan, _ = planner.make(ENHANCED, [*asked, "--dry_run"], {})
    load = StepWorkload(**plan["memory"]["load"])
    formula = estimate(load)
    for factor, verdict in ((0.9, doctor.FITS), (1.0, doctor.FITS), (1.5, doctor.TOO_LARGE)):
        step = doctor.StepMemory(
            GptStep(load), formula.tight + 1, Measured(int(factor * 1000), 1000, 0.1)
        )
        assert step.verdict == verdict
    fixes = step.check(request).fixes
    assert len(fixes) >= 2, "a smaller micro-batch, less depth, checkpointing"
    for command in fixes:
        config = shell.read(command).config
        changed = (config.device_batch_size, config.depth, config.activation_checkpointing)
        assert changed != (request.config.device_batch_size, request.config.depth, "none")


def test_a_torch_that_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.distributed._tools.mem_tracker", None)
    with pytest.raises(Unavailable):
        fake_memory.peak(LOAD)
    step = doctor.memory(GptStep(LOAD), 8 * GIB)
    assert step.lines()[1].startswith("fake tensors: not measured. torch ")
    assert step.verdict == doctor.FITS
    assert step.record()["not_measured_because"].startswith("torch ")


# ── the report for programs
# ──────────────────────────────────────────────────────────────────────────────────────────


def test_one_json_object_with_units_in_its_keys(
    made: tuple[Request, dict[str, Any]], unmeasured: None
) -> None:
    request, plan = made
    found = json.loads(
        doctor.run(request, plan, [Check("data", ERROR, "caf\udce9", ["do this"])]).json()
    )
    assert found["problems"] == []
    assert found.keys() == json.loads(doctor.refused(UserError([]))).keys()
    assert list(found) == [
        "schema_version",
        "status",
        "exit_code",
        "problems",
        "checks",
        "versions",
        "plan",
        "memory",
        "checking_s",
    ]
    assert (found["schema_version"], found["status"], found["exit_code"]) == (1, "error", 3)
    assert found["checks"][0] == {
        "code": "preflight.data",
        "name": "data",
        "status": "error",
        "text": "caf\udce9",
        "fixes": ["do this"],
    }
    assert found["checks"][-1]["name"] == "memory of a step"
    sizes = (
        "device_batch_sequences",
        "max_seq_len_tokens",
        "accumulation_steps",
        "total_batch_tokens",
    )
    assert [found["plan"][name] for name in sizes] == [8, 1536, 1, 24576]
    assert {n: found["plan"][n] for n in ("ranks", "launcher", "device", "gpus")} == {
        "ranks": 2,
        "launcher": "spawn",
        "device": "cpu",
        "gpus": [],
    }
    assert found["memory"]["needed_bytes"] > found["memory"]["total_bytes"] > 0
    assert found["memory"]["measured_bytes"] is None, "what is not known is null"
    assert found["memory"]["verdict"] == "fits"


def test_versions_of_installed_packages(home: Path, unmeasured: None) -> None:
    import platform

    import numpy
    import torch

    found = json.loads(
        doctor.run(*planner.make(ENHANCED, ["--device=cpu", "--depth=1", "--check"], {})).json()
    )["versions"]
    assert (found["python"], found["numpy"], found["torch"]) == (
        platform.python_version(),
        numpy.__version__,
        torch.__version__,
    )
    assert (found["torch_cuda"], found["driver"]) == (torch.version.cuda, None)
    assert found["kernel"] == platform.release()
    assert set(found) == {
        "duet",
        "python",
        "torch",
        "torch_cuda",
        "nccl",
        "numpy",
        "driver",
        "driver_cuda",
        "kernel",
    }


def test_nccl_version_from_its_package(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    (tmp_path / "torch/version.py").write_text("__version__ = '2.99.0'\ncuda = '13.0'\n")
    for name in ("nvidia_nccl_cu13-2.28.9.dist-info", "numpy-9.9.9.dist-info"):
        (tmp_path / name).mkdir()
    metadata = "Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n"
    (tmp_path / "numpy-9.9.9.dist-info/METADATA").write_text(metadata)
    code = (
        "from training.plan.preflight import versions; from training.host.gpus import GpuInventory;"
        "found = versions.read(None, GpuInventory((), '', '580', '13.0'));"
        "print(found['nccl'], found['numpy'], found['driver'], found['driver_cuda'], "
        "found['torch'])"
    )
    assert (
        python("-c", code, PYTHONPATH=f"{tmp_path}:{ROOT}").stdout == "2.28.9 9.9.9 580 13.0 None\n"
    )


def test_errors_of_the_request_are_one_json_object(home: Path) -> None:
    """The same problems as on standard error, with the keys of the other answers."""
    wrong = ["--device=cpu", "--depth=0", "--no_such_flag=1"]
    for command in (
        ["-m", "training.cli.plan", ENHANCED],
        ["-m", "training.cli.plan", "--before-install", ENHANCED],
        ["train.py"],
    ):
        done = python(*command, *wrong, "--check", "--json", cwd=ROOT)
        assert done.returncode == Exit.CONFIG, done.stderr
        found = json.loads(done.stdout)
        assert (found["status"], found["exit_code"], found["checks"]) == ("error", 2, [])
        assert found["plan"] is None
        codes = {one["code"]: one for one in found["problems"]}
        assert codes.keys() == {"flag.unknown", "field.value"}
        assert codes["field.value"]["field"] == "depth" and codes["field.value"]["allowed"]
        assert all(one["text"] in done.stderr for one in found["problems"])
        assert python(*command, *wrong, "--check", cwd=ROOT).stdout == ""


def test_json_requires_check() -> None:
    assert not flags.parse(["--check", "--json"]).problems
    assert flags.parse(["--check", "--json"]).positional == []
    for words in (["--json"], ["--json", "--dry_run"], ["--check=false", "--json"]):
        (problem,) = flags.parse(words).problems
        assert problem.code == "flag.json_without_check"
        assert problem.fixes == ["--check --json"]


def test_explain_is_a_dry_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the plan shows what is free, which other processes change between two plans
    monkeypatch.setattr(cgroups, "available_memory", lambda: 12 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(96 * GIB, 32 * GIB, 64 * GIB))
    asked = ["--device=cpu", "--depth=1"]
    environ = {"NCCL_TIMEOUT": "1800", "WANDB_API_KEY": "k" * 40}
    shown = [
        planner.describe(*planner.make(ENHANCED, [*asked, flag], environ)[1:])
        for flag in ("--explain", "--dry_run")
    ]
    assert shown[0] == shown[1]
    assert planner.make(ENHANCED, [*asked, "--explain"], environ)[0].dry_run
    lines = shown[0].splitlines()
    assert "  OMP_NUM_THREADS=" in shown[0]
    assert (
        "  WANDB_API_KEY=set, not shown   from the environment: the login; used when W&B is on, "
        "never written to a file of a run" in lines
    )
    assert [
        line
        for line in lines
        if line.startswith(
            "  NCCL_TIMEOUT=1800   from the environment: has no effect: it does not exist; "
        )
    ]
    assert "k" * 40 not in shown[0]


# ── the block for an issue
# ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_bug_report_block_is_complete_and_anonymous(
    home: Path, tmp_path: Path, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "alice")
    monkeypatch.setattr(redact.socket, "gethostname", lambda: "tower")
    key = "0123456789abcdef0123456789abcdef01234567"
    args = [
        "--device=cpu",
        "--depth=1",
        "--check",
        f"--out_dir={tmp_path}/runs",
        "--wandb_project=alice",
    ]
    request, plan, checks = planner.make(
        ENHANCED,
        args,
        {"WANDB_API_KEY": key, "NCCL_TIMEOUT": "9", "http_proxy": "http://alice:pw@tower"},
    )
    checks += [
        Check("GPU 0", WARNING, "x; occupied by pid 4711 (bob, 1.0 GiB): python /home/bob/x.py"),
        Check("y", ERROR, "tower ```"),
    ]
    block = (
        doctor.run(request, plan, checks)
        .text()
        .partition("For a bug report (names and keys are removed):\n\n")[2]
    )
    lines = block.splitlines()
    assert (lines[0], lines[-1]) == ("```text", "```")
    assert len(lines) < 20
    assert lines[1].startswith("Duet ") and ", torch " in lines[1]
    assert (
        "command: ./train_dual_gpu_enhanced.sh --device=cpu --depth=1 --check --out_dir=~/runs "
        "--wandb_project=USER" in lines
    )
    assert "warning: GPU 0: x; occupied by pid 4711 …" in lines
    assert "error: y: HOST '''" in lines
    assert any(line.startswith("note: NCCL_TIMEOUT=9 has no effect") for line in lines)
    assert re.search(r"^memory of a step: fits, [\d.]+ GiB needed, [\d.]+ GiB free$", block, re.M)
    for private in ("alice", "bob", "tower", str(tmp_path), key, "pw"):
        assert private not in block, private


# ── the measurement itself
# ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("blocks", "chunks"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in ((0, 1), (5, 1), (6, 4))),
    ],
)
def test_the_extrapolation_is_the_whole_model_s_peak(blocks: int, chunks: int) -> None:
    load = replace(LOAD, depth=6, sequences=4, seq_len=256, blocks=blocks, chunks=chunks)
    passes = fake_memory.gradients_peaks(load, 6 - blocks, blocks)
    whole = max(*passes, fake_memory.update_peak(load))
    assert fake_memory.peak(load) == pytest.approx(whole, rel=0.001)


@pytest.mark.slow
def test_the_measurement_reflects_memory_savings() -> None:
    load = replace(LOAD, depth=8, sequences=4, seq_len=512, vocab=8192)
    plain, parts = fake_memory.peak(load), fake_memory.peak(replace(load, chunks=8))
    again = fake_memory.peak(replace(load, chunks=8, blocks=6))
    assert again < parts < plain


def test_the_duration_in_the_text_includes_the_measurement(
    made: tuple[Request, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [12.0]

    def measure(step: GptStep, room: int | None) -> doctor.StepMemory:
        clock[0] = 40.0
        return doctor.StepMemory(step, room, None, "not in this test")

    monkeypatch.setattr(doctor, "since_start", lambda: clock[0])
    monkeypatch.setattr(doctor, "memory", measure)
    monkeypatch.setattr(doctor, "communication", lambda request, plan, checks: [])
    report = doctor.run(*made, [])
    assert msg("cli.doctor.checked", seconds=40.0) in report.text().splitlines()
    assert json.loads(report.json())["checking_s"] == 12.0


def test_age_of_this_process() -> None:
    started = time.monotonic()
    seconds = float(
        python("-c", "from training.cli import doctor; print(doctor.since_start())").stdout
    )
    assert 0 < seconds < time.monotonic() - started + 0.05, "the kernel counts in hundredths"

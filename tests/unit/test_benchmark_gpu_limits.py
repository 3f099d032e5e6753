"""`make gpu` on machines that lack something: a compiler, memory, a newer Python, a file system from
which libraries are loaded."""

from __future__ import annotations
import __future__

import ast
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import (
    bare_loop,
    bench,
    compiling,
    machine,
    newer_python,
    overhead,
    page,
    peaks,
    results,
    suites,
    trainings,
)
from tests.unit.test_benchmark_gpu import GPU, laboratory, made, session, stage
from tests.unit.test_benchmark_gpu_page import result
from training.core.rundir import RunDir


def test_without_a_compiler_what_needs_none_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(lab: bench.Bench, name: str, **flags: Any) -> trainings.Run:
        assert flags["compile"] == 0

        class Trained(trainings.Run):
            def step_ms(self, warm_up: int = 0) -> float:
                return 2.0

        one = Trained(RunDir(tmp_path / "none"), 0, 0.0, "")
        vars(one)["plan"] = {"precision": {"value": "bf16"}}
        return one

    monkeypatch.setattr(overhead, "train", train)
    monkeypatch.setattr(overhead, "_counted", lambda *_: {"launches": 1.0, "waits": 0.0})
    calls = {"step_ms": 1.9, "calls": {"launches": 1.0, "waits": 0.0}, "peak_bytes": 1 << 30}
    monkeypatch.setattr(bench.Bench, "result", lambda *_, **__: calls)
    lab = laboratory(tmp_path, no_compiler="gcc")
    lab.smoke = False
    found = overhead.run(lab)
    assert set(found["loops"]) == {"eager"} and len(found["notes"]) == 1
    assert len(peaks.run(lab)["rows"]) == len(peaks.WAYS)
    with pytest.raises(bench.Skipped):
        compiling.run(lab)


@pytest.mark.parametrize("first", ["gcc", ""])
def test_figures_without_a_compiler_are_measured_again_with_one(tmp_path: Path, first: str) -> None:
    one = stage(lambda _: {"value": 1, "checks": []}, name="memory")
    then, now = (
        results.Results(session(tmp_path, machine=made(no_compiler=lacks)))
        for lacks in (first, "" if first else "gcc")
    )
    then.keep(one, then.session.measure(one))
    assert then.before(one) and now.before(one) is None


@pytest.mark.parametrize("in_git", [False, True])
def test_an_updated_checkout_of_nanochat_is_measured_again(tmp_path: Path, in_git: bool) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "nanochat").mkdir(parents=True)
    (checkout / "nanochat/gpt.py").write_text("1")
    git = ("git", "-C", str(checkout), "-c", "user.name=n", "-c", "user.email=e@example.org")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")) if in_git else ():
        subprocess.run([*git, *words], check=True)
    one = stage(lambda _: {"value": 1, "checks": []}, name="memory", nanochat=True)

    def kept() -> results.Results:
        return results.Results(session(tmp_path, nanochat=checkout))

    kept().keep(one, record := kept().session.measure(one))
    assert record["key"]["nanochat"] in kept().html.read_text()
    (checkout / "README.md").write_text("no part of it")
    assert kept().before(one) == record
    (checkout / "nanochat/gpt.py").write_text("2")
    assert kept().before(one) is None
    kept().keep(stage(lambda _: {}, name="oom"), None)
    assert results.Results(session(tmp_path)).before(one) == record, "asks for none"
    (checkout / "nanochat/gpt.py").write_text("1")
    moved = checkout.rename(tmp_path / "moved")
    assert results.Results(session(tmp_path, nanochat=moved)).before(one) == record


@pytest.mark.parametrize(("name", "capability", "fp16"), [("H100", (9, 0), 0), ("T4", (7, 5), 1)])
def test_memory_is_measured_in_the_precision_of_the_gpu_as_far_as_it_fits(
    tmp_path: Path,
    name: str,
    capability: tuple[int, int],
    fp16: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12 GiB: what does not fit is a note, not a failed check."""
    loads = []

    def result(lab: bench.Bench, module: str, title: str, load: dict[str, Any]) -> dict[str, Any]:
        loads.append(load)
        formula = peaks.estimate(peaks.StepWorkload(**load))
        return {"peak_bytes": formula.total - formula.context}

    monkeypatch.setattr(bench.Bench, "result", result)
    gpu = {"name": name, "memory_bytes": 12 << 30, "capability": list(capability)}
    lab = laboratory(tmp_path)
    lab.smoke, lab.machine = False, machine.Machine(**{**vars(lab.machine), "gpus": [gpu]})
    found = peaks.run(lab)
    assert found["notes"] and len(found["rows"]) == len(loads) > 0
    assert found["checks"][0]["ok"] and {load["fp16"] for load in loads} == {bool(fp16)}


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)],
)
def test_torchs_muon_iterates_in_a_type_that_the_gpu_has(
    precision: str, dtype: torch.dtype
) -> None:
    with bare_loop.iteration(precision):
        update = _zeropower_via_newtonschulz(torch.randn(8, 4), (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert update.dtype == dtype and torch.zeros(1).bfloat16().dtype == torch.bfloat16


def test_what_a_late_stage_has_measured_is_in_its_record(tmp_path: Path) -> None:
    def late(_: bench.Bench) -> dict[str, Any]:
        raise bench.Failed("late", {"curve": [1.0], "checks": [bench.check("one", True, "")]})

    record = session(tmp_path).measure(stage(late))
    assert (record["status"], record["figures"]) == ("failed", {"curve": [1.0]})
    assert [one["name"] for one in record["checks"]] == ["one"]


@pytest.mark.parametrize(
    ("run", "late", "key", "measured"),
    [
        (
            peaks.run,
            "vocabulary_32768,_eager",
            "rows",
            ["plain, eager", "8 blocks recomputed, eager"],
        ),
        (overhead.run, "bare00", "loops", []),
        (overhead.run, "bare10", "loops", ["eager"]),
        (overhead.run, "bare12", "loops", ["eager", "compiled"]),
        (overhead.run, "counted1_rank", "loops", ["eager", "compiled"]),
        (compiling.run, "start1", "starts", [compiling.COLD]),
    ],
)
def test_what_was_measured_before_the_limit_is_kept(
    tmp_path: Path,
    run: Callable[[bench.Bench], dict[str, Any]],
    late: str,
    key: str,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_s = [30.0]

    def ended(name: str) -> None:
        if name == late:
            left_s[0] = 0.0
            raise bench.Failed(f"{name}: not done")

    def train(lab: bench.Bench, name: str, *config: str, **flags: object) -> trainings.Run:
        ended(name)

        class Trained(trainings.Run):
            def step_ms(self, warm_up: int = 0) -> float:
                return 2.0

        one = Trained(RunDir(tmp_path / "none"), 0, 0.0, "")
        vars(one).update(
            plan={"precision": {"value": "bf16"}}, steps=[{"time": 1.0, "step_ms": 2.0}]
        )
        return one

    def program(lab: bench.Bench, module: str, name: str, *job: Any, **env: str) -> dict[str, Any]:
        ended(name)
        calls = {"launches": 1.0, "waits": 0.0}
        return {"step_ms": 1.9, "peak_bytes": 1 << 30, "calls": calls}

    for module in (overhead, compiling):
        monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(bench.Bench, "result", program)
    monkeypatch.setattr(bench.Bench, "left_s", property(lambda _: left_s[0]))
    record = session(tmp_path).measure(stage(run))
    assert record["status"] == "failed" and record["reason"].startswith(late)
    assert list(record["figures"].get(key, {})) == measured
    assert page.html(result(stages={"one": record}))


def test_tests_that_ended_before_the_limit_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(
        "import time, pytest\n@pytest.mark.gpu\n"
        "@pytest.mark.parametrize('value', ['a b', 'late'])\n"
        "def test_it(value):\n    time.sleep(60 * (value == 'late'))\n"
    )

    def left_s(lab: bench.Bench) -> float:
        console = lab.folder / "pytest.txt"
        return 0.0 if console.exists() and "PASSED" in console.read_text() else 30.0

    monkeypatch.setattr(bench.Bench, "left_s", property(left_s))
    record = session(tmp_path).measure(stage(suites.stage(str(file), "")))
    assert record["status"] == "failed" and "limit of a stage" in record["reason"]
    outcomes = [(test["name"], test["outcome"]) for test in record["figures"]["tests"]]
    assert outcomes == [("test_it[a b]", "passed")] and record["checks"] == []
    assert page.html(result(stages={"tests": record})).count("test_it[a b]")


def test_no_program_starts_after_the_limit(tmp_path: Path) -> None:
    program = bench.Program(["touch", str(tmp_path / "started")], tmp_path / "it.txt")
    with pytest.raises(bench.Failed, match=r"^it: not done"):
        laboratory(tmp_path, limit_s=0.0).run([program])
    assert not (tmp_path / "started").exists()


def test_a_program_that_the_kernel_cannot_end_ends_the_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "KILLED_S", 0.05)
    with subprocess.Popen(["sleep", "60"]) as alive:
        with pytest.raises(bench.Failed, match=f"PID {alive.pid} "):
            bench._reap(alive)
        alive.kill()


def test_kernels_are_compiled_where_libraries_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "not yet" / "gpu"
    assert machine.cache_of(new) == new / "cache"
    monkeypatch.setattr(
        machine.os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert machine.cache_of(new).parent == tmp_path / "home"


def test_a_home_folder_in_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    wanted = command.arguments(["--out=~/x", "--python=~/env/bin/python"])
    assert (wanted.out, wanted.python) == (tmp_path / "x", f"{tmp_path}/env/bin/python")


def test_an_old_python_starts_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of --python if it is new enough, otherwise one on PATH."""
    started: list[list[str]] = []
    for name, status in (("old", 1), ("python3.11", 0), ("asked", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(newer_python, "NAMES", ["python3.99", "python3.11"])
    monkeypatch.setattr(newer_python.os, "execv", lambda path, argv: started.append(argv))
    for asked, first in (("old", "python3.11"), ("asked", "asked")):
        words = [f"--python={tmp_path / asked}", "--smoke"]
        monkeypatch.setattr(newer_python.sys, "argv", ["gpu", *words])
        started.clear()
        with pytest.raises(SystemExit):  # execv returns only here
            newer_python.use()
        assert started[0] == [str(tmp_path / first), "-m", "benchmarks.gpu", *words]


def test_python_3_6_reads_what_starts_a_newer_one() -> None:
    """The python3 of RHEL 8."""
    for name in ("__init__.py", "gpu/__init__.py", "gpu/newer_python.py"):
        text = (machine.ROOT / "benchmarks" / name).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text, feature_version=(3, 6))):
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                features = [getattr(__future__, one.name) for one in node.names]
                assert all(one.getOptionalRelease() < (3, 7) for one in features), name
            # `Callable[…]` of collections.abc and `list[…]` need 3.9
            for kind in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                assert kind is None or isinstance(kind, ast.Name | ast.Constant), name


def test_the_probe_names_what_a_compiler_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder of the kernels that the stages use."""
    modules = tmp_path / "modules"
    modules.mkdir()
    text = (
        "from types import SimpleNamespace as N\n__version__ = '2.11.0'\nversion = N(cuda='13')\n"
    )
    text += "class cuda:\n"
    text += "    device_count = lambda: 1\n"
    text += "    nccl = N(version=lambda: (2, 27))\n"
    text += f"    get_device_properties = lambda i: N(name={GPU['name']!r}, total_memory=1, "
    text += "major=9, minor=0)\n"
    (modules / "torch.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    python = str(machine.sys.executable)
    assert machine._probe(python, tmp_path)["no_compiler"] == ""
    monkeypatch.setenv("CC", "/no/gcc")
    assert "/no/gcc" in machine._probe(python, tmp_path)["no_compiler"]

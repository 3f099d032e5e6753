"""`make gpu` without a GPU: stages that fail, ranks that share a GPU, programs that are ended."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import (
    bench,
    machine,
    pairs,
    results,
    stages,
    timing,
    trainings,
)
from training.core.rundir import RunDir
from training.host.p2p_cache import P2P

GPU = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 << 30, "capability": [9, 0]}


def made(gpus: int = 1, **changes: Any) -> machine.Machine:
    facts: dict[str, Any] = {"executable": sys.executable, "python": "3.12", "torch": "2.11.0"}
    facts |= {"cuda": "13.0", "nccl": "2.27", "driver": "580.1", "gpus": [GPU] * gpus}
    facts |= {
        "peer_access": gpus > 1,
        "null_gpu": False,
        "missing": [],
        "cpu": "CPU",
        "cores": 16,
        "memory_bytes": 1 << 37,
    }
    return machine.Machine(**(facts | changes))


def session(folder: Path, **changes: Any) -> stages.Session:
    facts = {"machine": made(), "folder": folder, "commit": "abc", "smoke": False, "nanochat": None}
    return stages.Session(**(facts | changes))


def laboratory(folder: Path, limit_s: float = 30.0, **changes: Any) -> bench.Bench:
    return bench.Bench(made(**changes), folder, folder / "cache", True, None, limit_s)


def stage(
    run: Callable[[bench.Bench], stages.Record], name: str = "one", **more: Any
) -> stages.Stage:
    return stages.Stage(name, "One", run, **more)


def figures(value: int) -> stages.Record:
    return {"value": value, "checks": [bench.check("a claim", True, "text")]}


def test_the_line_of_a_failed_stage_is_the_first_of_its_reason() -> None:
    for reason in ("not done:\noutput\n", "not done: ", "not done"):
        record = {"status": "failed", "reason": reason}
        assert command._outcome(record, meant=True) == "  failed: not done"


def test_a_stage_that_fails_or_cannot_be_measured_has_a_reason(tmp_path: Path) -> None:
    def broken(_: bench.Bench) -> stages.Record:
        raise KeyError("step_ms")

    failed = session(tmp_path).measure(stage(broken))
    assert (failed["status"], failed["reason"]) == ("failed", "KeyError: 'step_ms'")
    skipped = session(tmp_path).measure(stage(lambda _: figures(1), gpus=2))
    assert skipped["status"] == "skipped" and skipped["reason"].startswith("needs 2 GPUs")


def test_the_exit_code_counts_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = {"checks": [bench.check("a claim", False, "1.3 × (goal 1.02)")]}
    one = stage(lambda _: dict(missed))
    monkeypatch.setattr(results, "STAGES", {"one": one})
    run = command._all
    assert run(session(tmp_path), [one], again=False) == 1
    assert run(session(tmp_path, smoke=True), [one], again=False) == 0
    assert run(session(tmp_path, machine=made(null_gpu=True)), [one], again=False) == 0
    assert json.loads((tmp_path / "gpu.json").read_text())["stages"]["one"]["checks"]


def test_the_other_rank_of_a_failed_one_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_wait", lambda started, seconds: None)
    codes = ("import time; time.sleep(60)", "raise SystemExit(3)")
    programs = [
        bench.Program([sys.executable, "-c", code], tmp_path / f"{n}.txt")
        for n, code in enumerate(codes)
    ]
    assert laboratory(tmp_path).run(programs) == [-9, 3]


def test_a_stage_ends_at_its_limit(tmp_path: Path) -> None:
    begun = time.monotonic()
    code = "import time; print('begun', flush=True); time.sleep(60)"
    program = bench.Program([sys.executable, "-c", code], tmp_path / "out.txt")
    lab = laboratory(tmp_path, limit_s=600.0)

    def ends_when_it_has_begun() -> float:
        return 0.0 if program.end_of_output() else 1.0

    lab_type = type("Lab", (bench.Bench,), {"left_s": property(lambda _: ends_when_it_has_begun())})
    late = lab_type(**vars(lab))
    with pytest.raises(bench.Failed, match=r"out: not done .* limit of a stage\nbegun"):
        late.run([program])
    assert time.monotonic() - begun < 30


def test_missing_modules_are_replaced_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/own")
    monkeypatch.setenv("DUET_DEPTH", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert laboratory(tmp_path).environment()["PYTHONPATH"] == "/own"
    env = laboratory(tmp_path, missing=["tqdm", "psutil", "tensorboard"]).environment()
    own, folder = env["PYTHONPATH"].split(":")
    assert own == "/own" and not {"DUET_DEPTH", "WORLD_SIZE"} & env.keys()
    assert sorted(p.name for p in Path(folder).iterdir()) == ["psutil.py", "tqdm.py"]


def test_two_ranks_on_one_gpu_count_as_two_hosts() -> None:
    shared = [trainings._rank(rank, 2, 29500, made(first="GPU-7")) for rank in range(2)]
    assert len({env["NCCL_HOSTID"] for env in shared}) == 2
    assert {env[trainings.VISIBLE] for env in shared} == {"GPU-7"}
    assert not {"NCCL_HOSTID", trainings.VISIBLE} & trainings._rank(1, 2, 29500, made(2)).keys()


def test_calls_of_a_step() -> None:
    event = namedtuple("event", "name")
    names = ["cudaLaunchKernel"] * 8 + ["cuLaunchKernelEx", "cudaMemcpyAsync", "aten::mm"]
    names += ["cudaStreamSynchronize"] * 3
    profile = namedtuple("profile", "events")(lambda: [event(name) for name in names])
    assert timing.calls(profile, 2) == {"launches": 5.0, "waits": 1.0}, "the profiler's own"
    assert timing.calls(profile, 2, own_waits=1) == {"launches": 5.0, "waits": 0.5}
    assert timing.calls(namedtuple("profile", "events")(list), 2) is None, "not traced"


def test_all_programs_see_the_gpus_in_the_order_of_duet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert laboratory(tmp_path).environment()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf \'{"error": "%s"}\' $CUDA_DEVICE_ORDER\n')
    python.chmod(0o755)
    assert machine._probe(str(python), tmp_path) == {"error": "PCI_BUS_ID"}


def test_other_changes_are_another_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org")
    file = tmp_path / "train.py"
    file.write_text("1")
    (tmp_path / "README.md").write_text("1")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    found = [machine.commit()]
    for text in ("2", "3", "2"):
        file.write_text(text)
        found.append(machine.commit())
    assert "+" not in found[0] and len(set(found)) == 3 and found[1] == found[3]
    file.write_text("1")
    for name in (
        "README.md",
        "notes",
        "benchmarks/results/new.json",
        "training/__pycache__/new.pyc",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("not run")
    assert machine.commit() == found[0]
    (tmp_path / "training/new.py").write_text("1")
    with_new = machine.commit()
    assert with_new.startswith(f"{found[0]}+") and machine.commit() == with_new
    (tmp_path / "training/new.py").write_text("2")
    assert machine.commit() not in (with_new, found[0]), "not in git yet"


@pytest.mark.parametrize("outer", [False, True], ids=["no git", "inside another checkout"])
def test_without_a_commit_the_sources_count(
    outer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if outer:
        git = ("git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    root = tmp_path / "duet"
    (root / "training").mkdir(parents=True)
    file = root / "training/a.py"
    monkeypatch.setattr(machine, "ROOT", root)
    found = []
    for text in ("1", "2", "1"):
        file.write_text(text)
        found.append(machine.commit())
    assert found[0] == found[2] != found[1]
    assert all(re.fullmatch("unknown\\+[0-9a-f]{8}", name) for name in found)
    (root / "training/b.py").write_text("")
    assert machine.commit() != found[2]


def test_a_machine_without_a_gpu_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    facts = {"python": "3.12.1", "torch": "2.13.0", "cuda": None, "gpus": [], "missing": []}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(facts)}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["gpu", f"--python={python}", f"--out={tmp_path}"])
    assert command.main() == 3
    assert f"{python}: torch 2.13.0 (a CPU build) has no GPU" in capsys.readouterr().err


def test_a_python_that_imports_torch_for_too_long_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(machine, "PROBE_S", 0.2)
    with pytest.raises(machine.NoGpu) as refused:
        machine.find(tmp_path, str(python))
    assert str(refused.value) == f"{python}: torch is not imported after 0 s"


def test_copies_between_gpus_are_measured_where_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Mapping[str, str]] = []
    variables: list[dict[str, str]] = []

    def launch(*arguments: Any, env: Mapping[str, str], **flags: Any) -> trainings.Run:
        class Launched(trainings.Run):
            def step_ms(self, warm_up: int = 0) -> float:
                return 12.0 if env else 10.0

        started.append(env)
        one = Launched(RunDir(tmp_path / "none"), 0, 0.0, "")
        vars(one)["plan"] = {"variables": variables}
        return one

    monkeypatch.setattr(pairs, "launch", launch)
    monkeypatch.delenv(P2P, raising=False)
    with pytest.raises(bench.Skipped):
        pairs.p2p(laboratory(tmp_path, gpus=2, peer_access=False))
    assert not started
    found = pairs.p2p(laboratory(tmp_path, gpus=2))
    assert found["step_ms"] == {"on": 10.0, "off": 12.0} and found["checks"][0]["ok"]
    assert started == [{}, {P2P: "1"}]
    variables.append({"name": P2P})
    with pytest.raises(bench.Skipped):
        pairs.p2p(laboratory(tmp_path, gpus=2))

"""The plan: what is decided and written, what is refused with exit 3, and that a dry run touches
nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import ENHANCED, LAUNCH, ROOT, SIMPLE, Shell
from tests.unit.test_resuming import run_of
from training.config.schema import FIELDS
from training.core.errors import Exit, Problem, UserError
from training.host import decisions
from training.host.gpu_processes import GpuProcess
from training.host.gpus import Gpu, GpuInventory
from training.host.torch_build import TorchBuild
from training.plan import request
from training.plan import training_plan as planner
from training.plan.request import Request

GIB = 1 << 30
Write = Callable[..., str]
BALANCED = "configs/dual_gpu/balanced.py"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """machine(31, 5): a machine with two GPUs of 32 GiB and this much free memory."""

    monkeypatch.setattr(planner.torch_build, "installed", lambda: TorchBuild("2.99.0", "13.0"))
    monkeypatch.setattr(planner.env_vars, "cpu_count", lambda: 8)
    monkeypatch.setattr(planner.toolchain, "missing", lambda *_: {})

    def has(*free_gib: float, processes: tuple[GpuProcess, ...] = ()) -> None:
        cards = [
            Gpu(n, f"GPU-{n}", f"Card {n}", 32 * GIB, int(f * GIB), 0, 40, 70.0, (12, 0), processes)
            for n, f in enumerate(free_gib)
        ]
        monkeypatch.setattr(
            planner.gpus,
            "inventory",
            lambda environ, **_: GpuInventory(
                tuple(cards), f"{len(cards)} on this machine", "580", "13.0"
            ),
        )

    return has


@pytest.fixture
def in_project(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Runs in the project, with the default folders elsewhere."""
    monkeypatch.chdir(ROOT)


def make(
    *args: str, script: str = SIMPLE, env: dict[str, str] | None = None, ranks: int | None = None
) -> tuple[Request, dict[str, Any], Any]:
    started = (
        {}
        if ranks is None
        else {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        }
    )
    return planner.make(script, list(args), started | (env or {}))


def test_compile_without_a_compiler_is_refused_only_if_asked_for(
    machine: Callable[..., None], in_project: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(31, 31)
    lacks = {"gcc": "install it", "Python.h": "and that"}
    monkeypatch.setattr(planner.toolchain, "missing", lambda *_: lacks)
    _, plan, checks = make(BALANCED)
    assert plan["compile"]["value"] is False
    (warning,) = [c for c in checks if c.name == "compile"]
    assert warning.status == "warning"
    assert f"compile: {warning.text}" in plan["notes"]
    assert "install it && and that" in warning.text
    for args in (("--compile=0",), ("--device=cpu",)):
        with monkeypatch.context() as patch:
            # it tries the compiler
            patch.setattr(planner.toolchain, "missing", lambda *_: pytest.fail("not needed"))
            assert not [c for c in make(BALANCED, *args)[2] if c.name == "compile"]
    lacks["a newer GPU"] = ""  # nothing to install
    assert not [c for c in make(BALANCED)[2] if c.name == "compile"]
    del lacks["a newer GPU"], lacks["Python.h"]
    (problem,) = lacking(BALANCED, "--compile=1")
    assert problem.fixes[0] == "install it"


def lacking(*args: str, script: str = SIMPLE, ranks: int | None = None) -> list[Problem]:
    """The problems of an insufficient machine."""
    with pytest.raises(UserError) as caught:
        make(*args, script=script, ranks=ranks)
    assert caught.value.code == Exit.RESOURCES
    return caught.value.problems


def commands(problems: list[Problem]) -> list[str]:
    """The fixes that are Duet commands."""
    return [f for p in problems for f in p.fixes if f.startswith(("./", "python"))]


# ── decisions
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_everything_a_later_stage_needs_is_in_it(
    machine: Callable[..., None], in_project: None
) -> None:
    machine(31, 31)
    _, plan, checks = make(BALANCED, "--seed=7", env={"NCCL_TIMEOUT": "9"})
    assert plan["schema_version"] == 2
    assert plan["command"] == {"script": SIMPLE, "args": [BALANCED, "--seed=7"], "cwd": str(ROOT)}
    assert set(plan["config"]) == set(plan["origins"]) == set(FIELDS)
    assert (plan["config"]["seed"], plan["origins"]["seed"]) == (
        7,
        "from --seed on the command line",
    )
    assert (plan["config_file"], plan["ranks"], plan["resume"], plan["master_port"]) == (
        BALANCED,
        2,
        False,
        0,
    )
    decided = {
        n: plan[n]["value"]
        for n in ("device", "precision", "compile", "device_batch_size", "launcher")
    }
    assert decided == {
        "device": "cuda",
        "precision": "bf16",
        "compile": True,
        "device_batch_size": 12,
        "launcher": "spawn",
    }
    assert all(plan[n]["reason"] for n in decided)
    assert plan["batch"] == {
        "device_sequences": 12,
        "seq_len": 2048,
        "world_size": 2,
        "accumulation": 1,
    }
    assert plan["memory"]["free_bytes"] == 31 * GIB
    assert plan["memory"]["needed_bytes"] > plan["memory"]["total_bytes"] > 10 * GIB
    assert [g["name"] for g in plan["gpus"]] == ["Card 0", "Card 1"]
    assert any(n.startswith("NCCL_TIMEOUT=9 has no effect") for n in plan["notes"])
    assert [c.status for c in checks] == ["ok"] * len(checks)
    assert json.loads(json.dumps(plan))["config"] == plan["config"]


def test_the_same_input_gives_the_same_plan_from_both_scripts(
    machine: Callable[..., None], in_project: None
) -> None:
    machine(31, 31)
    plans = [make(BALANCED, script=s)[1] for s in (SIMPLE, ENHANCED)]
    for plan in plans:
        del plan["created"], plan["command"], plan["launch"]
        del plan["retries"], plan["headline"]  # the number of restarts is the only difference
        plan["text"] = [s for s in plan["text"] if not s.startswith("recovery: ")]
    assert plans[0] == plans[1]


def test_an_automatic_device_batch_is_a_number_in_the_plan(
    machine: Callable[..., None], in_project: None
) -> None:
    machine(31, 12)
    _, plan, _ = make(BALANCED, "--device_batch_size=auto")
    size = plan["config"]["device_batch_size"]
    assert plan["batch"]["device_sequences"] == plan["device_batch_size"]["value"] == size
    assert 1 <= size < 12 and 12 % size == 0
    assert plan["memory"]["needed_bytes"] <= 12 * GIB
    assert any(f"device_batch_size {size}: the fastest of" in s for s in plan["text"])


def test_the_sentences_contain_reasons(machine: Callable[..., None], in_project: None) -> None:
    machine(31, 31)
    text = "\n".join(make(BALANCED)[1]["text"])
    for part in (
        "2 ranks by spawn: ",
        "device cuda: the default",
        "precision bf16: ",
        "compile on: ",
        "12 sequences × 2048 tokens × 2 ranks × 1 accumulation step = 49152 tokens per step",
        "data: stdlib, ",
        "the original authors report 20–22 GB of 32 GB",
    ):
        assert part in text


def test_more_ranks_than_cores_is_a_warning(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner.env_vars, "cpu_count", lambda: 2)
    notes = make("8", "--device=cpu", "--depth=1", "--total_batch_size=98304", script=LAUNCH)[1][
        "notes"
    ]
    assert "CPU: 8 ranks share 2 CPU cores: slow" in notes


def test_an_ignored_setting_is_noted(home: Path) -> None:
    wish = ["--device=cpu", "--depth=1", "--use_static_graph"]
    assert make(*wish, script=ENHANCED)[1]["static_graph"]["value"] is True
    _, plan, _ = make(*wish, "--total_batch_size=49152", script=ENHANCED)
    assert plan["static_graph"]["value"] is False
    assert any(n.startswith("use_static_graph: ") for n in plan["notes"])


def test_a_busy_gpu_with_room_is_a_warning(machine: Callable[..., None], in_project: None) -> None:
    machine(31, 31, processes=(GpuProcess(4711, GIB, "alice", "python other.py"),))
    _, plan, checks = make(BALANCED)
    assert [c.status for c in checks if c.name.startswith("GPU ")] == ["warning", "warning"]
    assert any("occupied by pid 4711 (alice, 1.0 GiB): python other.py" in n for n in plan["notes"])


def test_duets_own_process_does_not_occupy_a_gpu(
    machine: Callable[..., None], in_project: None
) -> None:
    machine(31, 31, processes=(GpuProcess(os.getpid(), GIB, "me", "python"),))
    assert all(c.status == "ok" for c in make(BALANCED)[2])


def test_the_plan_contains_the_memory_settings(
    machine: Callable[..., None], in_project: None
) -> None:
    machine(31, 31)
    _, plan, checks = make("configs/dual_gpu/aggressive.py")
    blocks, chunks = plan["activation_checkpointing"], plan["loss_chunks"]
    selective = plan["selective_checkpointing"]
    assert 0 < blocks["value"] < 20 and chunks["value"] >= 1
    assert selective == {"value": 20 - blocks["value"], "reason": blocks["reason"]}
    assert blocks["reason"] == "needed to fit 14 sequences in 31.0 GiB free"
    (said,) = [s for s in plan["text"] if s.startswith("activation checkpointing: ")]
    assert said.startswith(f"activation checkpointing: {blocks['value']} of 20 blocks")
    assert "costs about " in said
    assert plan["memory"]["load"]["blocks"] == blocks["value"]
    assert plan["memory"]["load"]["selective"] == selective["value"]
    assert all(c.status != "error" for c in checks)
    assert plan["config"]["activation_checkpointing"] == "auto", (
        "a resumed run decides again, on its own machine"
    )
    _, asked, _ = make(
        "configs/dual_gpu/aggressive.py", "--activation_checkpointing=20", "--loss_chunks=4"
    )
    assert (asked["activation_checkpointing"], asked["loss_chunks"]["value"]) == (
        {"value": 20, "reason": "as asked"},
        4,
    )


@pytest.mark.parametrize(
    "more",
    [["--activation_checkpointing=none"], ["--activation_checkpointing=3", "--loss_chunks=2"]],
    ids=" ".join,
)
def test_settings_that_do_not_fit_are_refused_with_ones_that_fit(
    more: list[str], machine: Callable[..., None], in_project: None, shell: Shell
) -> None:
    machine(31, 31)
    problems = lacking("configs/dual_gpu/aggressive.py", *more)
    assert len(problems) == 2 and problems[0].fixes == problems[1].fixes
    flags = [f.partition("aggressive.py")[2] for f in problems[0].fixes]
    assert any(" --activation_checkpointing=auto" in f for f in flags), "it finds the mixture"
    assert any("--device_batch_size=" in f for f in flags)
    assert any("--depth=" in f for f in flags)
    for command in commands(problems):
        script, args = shell.paste(command)
        make(*args, script=script)


# ── an insufficient machine: exit 3, and fixes that work
# ──────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "more", [[], ["--device=cuda"], ["--device", "cuda"], ["--seed", "7"]], ids=" ".join
)
def test_too_few_gpus(
    more: list[str], machine: Callable[..., None], in_project: None, shell: Shell
) -> None:
    machine()
    problems = lacking(BALANCED, *more)
    assert "2 GPUs are needed, 0 visible: 0 on this machine" in problems[0].what
    found = [shell.read(c) for c in commands(problems)]
    assert [(r.config_file, r.config.device) for r in found] == [
        (Path("configs/dual_gpu/quickstart.py"), "auto")
    ], "no hours on a CPU"


@pytest.mark.parametrize("script", [SIMPLE, LAUNCH])
def test_a_command_for_the_existing_gpus_is_offered(
    script: str, machine: Callable[..., None], in_project: None, shell: Shell
) -> None:
    machine(31)
    args = ["2"] * (script == LAUNCH) + [BALANCED, "--seed=7"]
    problems = lacking(*args, script=script)
    found = [shell.read(c) for c in commands(problems)]
    alone = [r for r in found if r.ranks == 1]
    assert alone, "one GPU is there: a command for one rank"
    assert (str(alone[0].config_file), alone[0].config.seed) == (BALANCED, 7)


@pytest.mark.parametrize(
    "more",
    [[], ["--device_batch_size=12"], ["--device-batch-size", "12"], ["--device_batch_size=auto"]],
    ids=" ".join,
)
def test_too_little_gpu_memory(
    more: list[str], machine: Callable[..., None], in_project: None, shell: Shell
) -> None:
    machine(31, 1, processes=(GpuProcess(4711, GIB, "alice", "python other.py"),))
    problems = lacking(BALANCED, *more)
    assert len(problems) == 1
    assert "Card 1, 1.0 GiB free of 32.0 GiB: this run needs " in problems[0].what
    assert "occupied by pid 4711 (alice, 1.0 GiB): python other.py" in problems[0].what
    assert problems[0].fixes[0] == "kill 4711   # if it is yours: python other.py"
    before = request.read(SIMPLE, [BALANCED, *more], {})
    for command in commands(problems):
        found = shell.read(command)
        assert (found.ranks, found.config) != (2, before.config), "advice to do the same again"


def test_the_gpus_that_fit_come_before_a_smaller_model(
    machine: Callable[..., None], in_project: None, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(31, 31, 2, 31, processes=(GpuProcess(4711, GIB, "alice", "python other.py"),))
    asked = ["4", BALANCED, "--total_batch_size=98304"]
    (problem,) = (p for p in lacking(*asked, script=LAUNCH) if "needs" in p.what)
    first, fewer, *_, smaller = problem.fixes
    assert first.startswith("kill 4711 ")
    script, args = shell.paste(fewer)
    found, plan, _ = make(*args, script=script)
    assert (found.ranks, [gpu["index"] for gpu in plan["gpus"]]) == (3, [0, 1, 3])
    assert shell.read(smaller).config.depth < found.config.depth
    assert smaller.endswith("   # a smaller model")
    # of the GPUs that the user has selected the first ones are used
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    (problem,) = (p for p in lacking(*asked, script=LAUNCH) if "needs" in p.what)
    assert problem.fixes[1].startswith("CUDA_VISIBLE_DEVICES=GPU-0,GPU-1,GPU-3 ./")
    machine(2, 2)
    fixes = lacking(BALANCED)[0].fixes
    assert {shell.read(fix).ranks for fix in fixes} == {2}, "no GPU has enough"


@pytest.mark.parametrize(
    "more",
    [[], ["--device_batch_size=8"], ["--depth", "12"], ["--depth=12", "--device_batch_size=4"]],
    ids=" ".join,
)
def test_too_little_host_memory(
    more: list[str], home: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.setattr(decisions.cgroups, "available_memory", lambda: 9 * GIB)
    asked = ["--device=cpu", "--activation_checkpointing=none", *more]
    problems = lacking(*asked, script=ENHANCED)
    assert problems[0].what.startswith("4.5 GiB free for each of 2 ranks: this run needs ")
    pasted = [shell.paste(c) for c in commands(problems)]
    assert len(pasted) >= 2  # a smaller micro-batch, a smaller model
    for script, args in pasted:
        make(*args, script=script)  # raises when it does not fit or divide


def test_a_resumed_run_keeps_its_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(home, "r1", steps=100)
    for free in (9 * GIB, 2 * GIB):
        monkeypatch.setattr(decisions.cgroups, "available_memory", lambda free=free: free)
        asked = ["--device=cpu", "--activation_checkpointing=none", "--resume=r1"]
        problems = lacking(*asked, script=ENHANCED)
        assert problems[0].fixes and not any("--depth" in fix for fix in problems[0].fixes)


def test_all_missing_resources_are_reported_at_once(
    machine: Callable[..., None], in_project: None, tmp_path: Path
) -> None:
    machine(2, 1)
    (tmp_path / "file").touch()
    problems = lacking(BALANCED, f"--out_dir={tmp_path}/file", f"--log_dir={tmp_path}/file/logs")
    assert [p.what.split(" ")[0] for p in problems] == ["Card", "Card", "run", "log"]
    assert all(p.fixes for p in problems)


def test_a_dry_run_shows_missing_resources(machine: Callable[..., None], in_project: None) -> None:
    machine()
    _, plan, checks = make(BALANCED, "--dry_run")
    text = planner.describe(plan, checks)
    assert "  error    GPUs" in text
    assert "try: ./train_dual_gpu.sh" in text

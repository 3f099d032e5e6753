"""fp8: never chosen, refused where it cannot run, and its arithmetic with torchao's emulation."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cases import each
from tests.unit.conftest import ROOT, SIMPLE, only, wrong
from tests.unit.own_task import SIZED
from training.config.schema import Config
from training.core import codes
from training.core.errors import Exit, Problem, UserError
from training.host import decisions, packages
from training.host.gpus import Gpu, GpuInventory
from training.host.torch_build import TorchBuild
from training.plan import training_plan as planner
from training.plan.preflight import ERROR, precision_checks
from training.tasks.gpt import optim
from training.tasks.gpt.generate import Sampling, generate
from training.tasks.gpt.model import GPT, MemorySavings
from training.tasks.gpt.model_dims import FP8_MULTIPLE, ModelDims
from training.tasks.planning import Situation

GIB = 1 << 30
BALANCED = "configs/dual_gpu/balanced.py"
ADA, AMPERE = (8, 9), (8, 6)
TORCH = TorchBuild("2.13.0", "13.0")


def gpus(*capabilities: tuple[int, int] | None) -> GpuInventory:
    cards = (
        Gpu(n, f"GPU-{n}", f"Card {n}", 32 * GIB, 31 * GIB, 0, 40, 70.0, capability)
        for n, capability in enumerate(capabilities)
    )
    return GpuInventory(tuple(cards), "2 on this machine", "580", "13.0")


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """torchao("0.18.0"): this version is installed; None: no torchao."""

    def has(version: str | None) -> None:
        monkeypatch.setattr(packages, "found", lambda module: version is not None)
        monkeypatch.setattr(importlib.metadata, "version", lambda package: version)

    return has


@pytest.fixture
def machine(
    monkeypatch: pytest.MonkeyPatch, home: Path, torchao: Callable[[str | None], None]
) -> Callable[..., None]:
    """machine(ADA, ADA): GPUs with these compute capabilities, torch and torchao."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(planner.torch_build, "installed", lambda: TORCH)
    monkeypatch.setattr(planner.toolchain, "missing", lambda *_: {})
    torchao("0.18.0")

    def has(*capabilities: tuple[int, int] | None) -> None:
        monkeypatch.setattr(planner.gpus, "inventory", lambda environ, **_: gpus(*capabilities))

    return has


def plan(*flags: str) -> dict[str, Any]:
    made: dict[str, Any] = planner.make(SIMPLE, [BALANCED, *flags], {})[1]  # type: ignore[assignment]
    return made


def notes_of_fp8(*flags: str) -> list[str]:
    """The notes that a plan in bf16 lacks."""
    others = plan("--precision=bf16", *flags)["notes"]
    return [note for note in plan("--precision=fp8", *flags)["notes"] if note not in others]


def test_it_is_never_automatic() -> None:
    for found in (gpus(ADA, ADA), gpus((10, 0), (12, 0))):
        assert decisions.precision(Config(), "cuda", 2, found).value == "bf16"
    asked = decisions.precision(Config(precision="fp8"), "cuda", 2, gpus(ADA, ADA))
    assert asked.value == "fp8" and asked.reason != decisions.AS_ASKED
    assert Situation("cuda", asked, decisions.Decision(True, ""), None).half


def test_a_plan_in_fp8(machine: Callable[..., None]) -> None:
    machine(ADA, (9, 0))
    found = plan("--precision=fp8")
    assert (found["precision"]["value"], found["compile"]["value"]) == ("fp8", True)
    assert found["memory"]["load"]["fp8"] and found["memory"]["load"]["bf16"]
    shape = ModelDims(found["config"]["depth"], 1, 1)
    line = next(text for text in found["text"] if text.startswith("fp8: "))
    assert all(str(size) in line for size in (7 * shape.depth, shape.width, shape.inner))
    assert notes_of_fp8() == []


def test_sizes_that_do_not_fit_are_named(machine: Callable[..., None]) -> None:
    machine(ADA, ADA)
    odd = ("--max_seq_len=50", "--device_batch_size=3", "--total_batch_size=300")
    padded, eager = notes_of_fp8("--compile=0", *odd)
    assert "150" in padded and str(FP8_MULTIPLE) in padded
    assert "torch.compile" in eager
    for depth in range(1, 200):
        shape = ModelDims(depth, 1, 1)
        assert shape.width % FP8_MULTIPLE == shape.inner % FP8_MULTIPLE == 0


def refused(*flags: str) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        plan("--precision=fp8", *flags)
    assert caught.value.code == Exit.RESOURCES
    return [p for p in caught.value.problems if p.code == f"{codes.CHECKS}.precision"]


@each(
    ("capabilities", "flags", "named"),
    [
        ((ADA, AMPERE), (), "8.6"),
        ((AMPERE, ADA), (), "8.6"),
        (((7, 5), (7, 5)), (), "7.5"),
        ((), ("--device=auto",), "8.9"),
    ],
)
def test_hardware_without_it(
    machine: Callable[..., None],
    capabilities: tuple[tuple[int, int], ...],
    flags: tuple[str, ...],
    named: str,
) -> None:
    machine(*capabilities)
    problem = only(refused(*flags))
    assert named in problem.what and "auto, bf16" in problem.what
    (fix,) = problem.fixes
    assert "--precision=auto" in fix and "fp8" not in fix


@each(
    ("version", "torch", "fixes"),
    [
        (None, "2.13.0", ["torchao"]),
        ("0.17.0", "2.13.0", ["torchao"]),
        ("0.9.0", "2.13.0", ["torchao"]),
        ("0.18.0", "2.9.1", ["torch"]),
        ("0.16.0", "2.10.0", ["torchao", "torch"]),
        ("0.18.0", "2.13.0+cu130", []),
        ("1.0.0.dev1", "3.0.0", []),
    ],
)
def test_packages(
    torchao: Callable[[str | None], None], version: str | None, torch: str, fixes: list[str]
) -> None:
    torchao(version)
    request: Any = SimpleNamespace(command=lambda **changes: "again", gpu_ranks=1, installed=True)
    found = list(
        precision_checks.precision_works(
            "fp8", gpus(None), "cuda", TorchBuild(torch, "13.0"), request
        )
    )
    assert [check.status for check in found] == [ERROR] * len(fixes)
    for check, package in zip(found, fixes, strict=True):
        install, other = check.fixes[0], check.fixes[-1]
        assert (f"{package}>=" in install or "make extras" in install) and other == "again"
    request.installed = False
    assert not list(precision_checks.precision_works("fp8", gpus(None), "cuda", None, request))


@each("precision", ["fp8", "fp16"])
def test_a_cpu_that_is_asked_for_has_none(precision: str) -> None:
    """Reported with the other mistakes of the command."""
    found = wrong(BALANCED, "--device=cpu", f"--precision={precision}", "--total_batch_size=1001")
    assert {(p.code, p.field) for p in found} >= {("flag.contradiction", "precision")}
    assert len(found) > 1


def test_another_task_has_none(home: Path) -> None:
    (home / "own.py").write_text(SIZED)
    problem = only([p for p in wrong("--task=own.py", "--precision=fp8") if p.field == "precision"])
    assert (problem.code, problem.allowed) == ("config.task_precision", "auto, bf16, fp16, fp32")
    assert "--precision=auto" in problem.fixes[0] and "from from" not in problem.what


# ── arithmetic
# ──────────────────────────────────────────────────────────────────────────────────────────────────

SHAPE = ModelDims(2, 64, 24)


@pytest.fixture
def in_fp8(monkeypatch: pytest.MonkeyPatch) -> Callable[[GPT, int], None]:
    """Conversion as on a GPU, with products that are emulated in fp32."""
    float8 = pytest.importorskip("torchao.float8")
    emulated = partial(float8.Float8LinearConfig, emulate=True)
    monkeypatch.setattr(float8, "Float8LinearConfig", emulated)
    from training.tasks.gpt import fp8

    return lambda model, tokens: fp8.convert(model.blocks, tokens)


def model_of(savings: MemorySavings | None = None) -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE, savings)


def losses(model: GPT, steps: int = 12) -> list[float]:
    """Training on a text that a model learns in a few steps."""
    optimizer = optim.build(model, Config())
    tokens = (torch.arange(8 * 25).reshape(8, 25) * 7) % 13
    found = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_losses_are_near_those_of_bf16(in_fp8: Callable[[GPT, int], None]) -> None:
    bf16 = losses(model_of())
    model = model_of()
    in_fp8(model, 8 * 24)
    fp8 = losses(model)
    assert fp8 != bf16 and fp8 == pytest.approx(bf16, rel=0.05)
    assert bf16[-1] < 0.7 * bf16[0]


def test_recomputed_blocks_and_padded_tokens(in_fp8: Callable[[GPT, int], None]) -> None:
    found = []
    for savings in (MemorySavings(), MemorySavings(blocks=1, selective=1)):
        model = model_of(savings)
        in_fp8(model, 8 * 24)
        found.append(losses(model, 3))
    assert found[0] == found[1]
    model = model_of()
    in_fp8(model, 8 * 24 + 1)
    assert losses(model, 3) == pytest.approx(found[0], rel=1e-3)


def test_checkpoints_hold_the_plain_weights(in_fp8: Callable[[GPT, int], None]) -> None:
    plain, model = model_of(), model_of()
    in_fp8(model, 16)
    saved = model.state_dict()
    assert list(saved) == list(plain.state_dict())
    assert {(type(value), value.dtype) for value in saved.values()} == {
        (torch.Tensor, torch.float32)
    }
    losses(model, 2)
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    names = [type(part).__name__ for part in model.modules() if isinstance(part, torch.nn.Linear)]
    assert names == ["Float8Linear"] * 7 * SHAPE.depth + ["Linear"], "the head stays"


def test_text_is_generated(in_fp8: Callable[[GPT, int], None]) -> None:
    model = model_of()
    in_fp8(model, 16)
    with torch.autocast("cpu", torch.bfloat16):
        made = list(generate(model, [1], Sampling(5)))
    assert len(made) == 5

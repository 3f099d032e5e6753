"""Decisions of the plan with their reasons."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import each
from training.config.schema import Config
from training.core.messages import msg
from training.host import decisions
from training.host.gpus import Gpu, GpuInventory
from training.host.placement import LOCAL, RANK, Topology
from training.host.torch_build import TorchBuild
from training.plan.preflight import ERROR, WARNING, gpu_checks, precision_checks

GIB = 1 << 30
TORCH, CPU_TORCH = TorchBuild("2.13.0", "13.0"), TorchBuild("2.13.0+cpu", None)


def machine(*free_gib: int | None, capability: tuple[int, int] | None = (9, 0)) -> GpuInventory:
    gpus = [
        Gpu(
            n,
            f"GPU-{n}",
            f"Card {n}",
            32 * GIB,
            None if f is None else f * GIB,
            None,
            None,
            None,
            capability,
        )
        for n, f in enumerate(free_gib)
    ]
    return GpuInventory(tuple(gpus), f"{len(gpus)} on this machine")


def config(**values: Any) -> Config:
    return Config(**values)


def test_a_default_device_is_not_called_asked_for() -> None:
    found = decisions.device(config(), 2, machine(32, 32), TORCH, reason=decisions.BY_DEFAULT)
    assert found == decisions.Decision("cuda", msg("host.decision.by_default"))


@pytest.mark.parametrize(("capability", "key"), [((8, 0), ""), (None, "_assumed")])
def test_bf16_units_that_the_driver_does_not_report_are_assumed(
    capability: tuple[int, int] | None, key: str
) -> None:
    found = decisions.precision(config(), "cuda", 2, machine(32, 32, capability=capability))
    assert found.value == "bf16"
    assert found.reason == msg(f"host.decision.gpu_bf16{key}", name="Card 0")


def test_a_requested_device() -> None:
    assert decisions.device(config(device="cpu"), 2, machine(32, 32), TORCH).record() == {
        "value": "cpu",
        "reason": "as asked",
    }
    # Also without a GPU: the resource check reports it, and the explicit value is not
    # overridden.
    assert decisions.device(config(device="cuda"), 2, machine(), CPU_TORCH).value == "cuda"


@pytest.mark.parametrize(
    ("ranks", "gpus", "value", "reason"),
    [
        (2, 2, "cuda", "a GPU for each of 2 ranks (2 on this machine)"),
        (2, 3, "cuda", "a GPU for each of 2 ranks (3 on this machine)"),
        (1, 1, "cuda", "a GPU (1 on this machine)"),
        (2, 1, "cpu", "1 GPU for 2 ranks (1 on this machine)"),
        (2, 0, "cpu", "0 GPUs for 2 ranks (0 on this machine)"),
        (1, 0, "cpu", "0 GPUs for 1 rank (0 on this machine)"),
    ],
)
def test_an_automatic_device(ranks: int, gpus: int, value: str, reason: str) -> None:
    for torch in (TORCH, None):  # None: a torch of unknown build
        found = decisions.device(config(device="auto"), ranks, machine(*[32] * gpus), torch)
        assert found.record() == {"value": value, "reason": reason}


def test_gpus_with_a_cpu_build_of_torch() -> None:
    found = decisions.device(config(device="auto"), 2, machine(32, 32), CPU_TORCH)
    assert found.value == "cpu"
    assert (
        found.reason
        == "there are 2 GPUs, but the installed torch 2.13.0+cpu is built for the CPU only"
    )


def test_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decisions.precision(config(precision="fp32"), "cuda", 2, machine(32, 32)).record() == {
        "value": "fp32",
        "reason": "as asked",
    }
    assert decisions.precision(config(), "cuda", 2, machine(32, 32)).value == "bf16"
    assert (
        decisions.precision(config(), "cuda", 2, machine(32, 32, capability=(8, 0))).value == "bf16"
    )
    assert (
        decisions.precision(config(), "cuda", 2, machine(32, 32, capability=None)).value == "bf16"
    )
    for capability, value in (((7, 5), "fp16"), ((7, 0), "fp16"), ((6, 1), "fp32")):
        old = decisions.precision(config(), "cuda", 2, machine(32, 32, capability=capability))
        shown = "Card 0 (compute capability {}.{})".format(*capability)
        assert (old.value, shown in old.reason) == (value, True)
    monkeypatch.setattr(decisions, "cpu_flags", lambda: {"avx2", "amx_bf16", "avx512_bf16"})
    fast = decisions.precision(config(), "cpu", 2, machine())
    assert fast.record() == {
        "value": "bf16",
        "reason": "this CPU has bf16 matrix instructions (amx_bf16, avx512_bf16)",
    }
    monkeypatch.setattr(decisions, "cpu_flags", lambda: {"avx2"})
    assert decisions.precision(config(), "cpu", 2, machine()).value == "fp32"


def test_unused_gpus_are_ignored() -> None:
    mixed = GpuInventory(
        (*machine(32).gpus, *machine(32, capability=(7, 5)).gpus), "2 on this machine"
    )
    assert decisions.precision(config(), "cuda", 1, mixed).value == "bf16"
    assert decisions.precision(config(), "cuda", 2, mixed).value == "fp16"


def test_the_weakest_gpu_decides() -> None:
    new, turing, pascal = (machine(32, capability=c).gpus[0] for c in ((8, 9), (7, 5), (6, 1)))
    gtx = replace(turing, name="NVIDIA GeForce GTX 1660 Ti")
    for gpus, value in (
        ((new, turing), "fp16"),
        ((turing, new), "fp16"),
        ((turing, pascal), "fp32"),
        ((pascal, new), "fp32"),
        ((new, gtx), "fp32"),
    ):
        assert decisions.precision(config(), "cuda", 2, GpuInventory(gpus, "")).value == value


@each(("name", "value"), [
    ("Tesla T4", "fp16"), ("NVIDIA T4G", "fp16"), ("NVIDIA TITAN RTX", "fp16"),
    ("NVIDIA GeForce RTX 2080 Ti", "fp16"), ("Quadro RTX 4000", "fp16"),
    ("NVIDIA GeForce GTX 1650", "fp32"), ("NVIDIA GeForce MX450", "fp32"),
    ("NVIDIA GeForce MX550", "fp32"), ("NVIDIA T400 4GB", "fp32"), ("NVIDIA T500", "fp32"),
    ("NVIDIA T550 Laptop GPU", "fp32"), ("NVIDIA T600", "fp32"), ("NVIDIA T1000 8GB", "fp32"),
    ("NVIDIA T1200 Laptop GPU", "fp32"), ("Quadro T2000 with Max-Q Design", "fp32"),
])  # fmt: skip
def test_small_gpus_of_turing_have_no_matrix_units(name: str, value: str) -> None:
    assert decisions.best_type((7, 5), name) == value


def test_fp32_products() -> None:
    new, old = machine(32, 32), machine(32, 32, capability=(7, 5))
    bf16, fp32 = decisions.Decision("bf16", ""), decisions.Decision("fp32", "")
    for chosen, on, inventory, environ, value in (
        (bf16, "cuda", new, {}, True),
        (bf16, "cuda", old, {}, False),
        (fp32, "cuda", new, {}, False),
        (fp32, "cuda", new, {decisions.TF32_VARIABLE: "1"}, True),
        (fp32, "cuda", new, {decisions.TF32_VARIABLE: "0"}, False),
        (bf16, "cuda", new, {decisions.NO_TF32_VARIABLE: "0"}, False),
        (bf16, "cuda", new, {decisions.NO_TF32_VARIABLE: "1"}, True),
        (fp32, "cuda", new, {decisions.TF32_VARIABLE: "1", decisions.NO_TF32_VARIABLE: "0"}, False),
        (bf16, "cpu", new, {decisions.TF32_VARIABLE: "1"}, False),
    ):
        found = decisions.tf32(chosen, on, 2, inventory, environ)
        assert found.value is value and found.reason
    assert decisions.cudnn_benchmark("cuda").value is False


def test_cpu_flags_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "processor\t: 0\nmodel name\t: X\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor\t: "
        "1\nflags\t\t: fpu\n"
    )
    monkeypatch.setattr(decisions.Path, "read_text", lambda self: text)
    assert decisions.cpu_flags() == {"fpu", "avx2", "avx512_bf16"}
    monkeypatch.setattr(decisions.Path, "read_text", lambda self: "no such line\n")
    assert decisions.cpu_flags() == set()


def test_compile() -> None:
    assert decisions.compiled(config(), "cuda").value is True
    assert decisions.compiled(config(), "cpu").value is False
    assert decisions.compiled(config(compile="1"), "cpu").record() == {
        "value": True,
        "reason": "as asked",
    }
    assert decisions.compiled(config(compile="0"), "cuda").record() == {
        "value": False,
        "reason": "as asked",
    }


def test_a_gpu_without_a_compiler_trains_eagerly() -> None:
    found = decisions.compiled(config(), "cuda", ["gcc", "Python.h"])
    assert found.value is False and "gcc, Python.h" in found.reason
    assert decisions.compiled(config(compile="1"), "cuda", ["gcc"]).value is True, "then refused"


def test_emulated_bf16_is_not_compiled() -> None:
    """torch warns and runs such code eagerly."""
    for capability, precision, emulated in (
        ((7, 5), "bf16", "Card 0"),
        ((7, 5), "fp16", ""),
        ((8, 0), "bf16", ""),
        (None, "bf16", ""),
    ):
        gpus = machine(16, 16, capability=capability).gpus
        assert decisions.without_bf16(precision, gpus) == emulated
        assert decisions.compiled(config(), "cuda", (), emulated).value is not bool(emulated)
    assert decisions.compiled(config(compile="1"), "cuda", (), "Card 0").value is True
    request: Any = SimpleNamespace(command=lambda **changes: str(changes))
    for name, found in (("Card 0", [WARNING]), ("", [])):
        checks = gpu_checks.compile_works(TORCH, "cuda", {}, request, name)
        assert [check.status for check in checks] == found


def test_a_static_graph_is_used_only_where_it_works() -> None:
    assert decisions.static_graph(config(), 1).value is False
    assert decisions.static_graph(config(use_static_graph=True), 1).record() == {
        "value": True,
        "reason": "as asked",
    }
    several = decisions.static_graph(config(use_static_graph=True), 4)
    assert several.value is False
    assert "here 4 steps" in several.reason


def test_the_memory_budget_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decisions.budget("cuda", 2, machine(30, 20)) == 20 * GIB
    assert decisions.budget("cuda", 1, machine(30, 20)) == 30 * GIB
    monkeypatch.setattr(decisions.cgroups, "available_memory", lambda: 12 * GIB)
    assert decisions.budget("cpu", 3, machine()) == 4 * GIB
    own = decisions.RANK_RAM_BYTES
    assert decisions.budget("cuda", 1, machine(None)) == 12 * GIB - own, "the host's: GB10, Jetson"
    assert decisions.shares_host_memory("cuda", 1, machine(None))
    assert not decisions.shares_host_memory("cuda", 1, machine(30, None)), "not used"
    parts = machine(None, None)
    parts = replace(parts, gpus=tuple(replace(gpu, mig=True) for gpu in parts.gpus))
    assert decisions.budget("cuda", 2, parts) is None
    assert not decisions.shares_host_memory("cuda", 2, parts)


@pytest.mark.parametrize(
    ("script", "ranks", "asked", "value", "expected"),
    [
        ("train_dual_gpu.sh", 2, "auto", "spawn", "faster than torchrun"),
        ("train_dual_gpu.sh", 2, "torchrun", "torchrun", "as asked"),
        ("launch_train.sh", 1, "auto", "spawn", "no process group"),
        ("train.py", 2, "auto", "env", "already started"),
        ("train.py", 1, "auto", "env", "plain python"),
        ("launch_train.sh", 2, "auto", "env", "already started"),
    ],
)
def test_who_starts_the_ranks(
    script: str, ranks: int, asked: str, value: str, expected: str
) -> None:
    kind = RANK if "started" in expected else LOCAL
    choice = decisions.launcher(config(launcher=asked), Topology(kind, "flags", ""), script, ranks)
    assert choice.value == value
    assert expected in choice.reason


def test_precisions_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    request: Any = SimpleNamespace(
        command=lambda **changes: f"again {changes}",
        gpu_ranks=0,
        origins={"precision": "from c.py:1"},
        config=config(),
    )

    def found(precision: str) -> list[tuple[str, list[str]]]:
        checks = precision_checks.precision_works(precision, machine(), "cpu", CPU_TORCH, request)
        return [(check.status, check.fixes) for check in checks]

    monkeypatch.setattr(decisions, "cpu_flags", lambda: {"avx2"})
    assert found("bf16") == [(WARNING, ["again {'precision': 'auto'}"])]
    assert found("fp32") == []
    assert found("fp16") == [(ERROR, ["again {'precision': 'auto'}"])]
    for precision in ("fp16", "fp8"):
        request.installed = False
        (check,) = precision_checks.precision_works(precision, machine(), "cpu", CPU_TORCH, request)
        assert "(from c.py:1)" in check.text
    monkeypatch.setattr(decisions, "cpu_flags", lambda: {"avx2", "amx_bf16"})
    assert found("bf16") == []


@each(("precision", "capability", "slow"), [
    ("bf16", (7, 5), "Card 0 has no bf16"), ("fp16", (6, 1), "Card 0 has no fp16"),
    ("fp16", (7, 5), ""), ("fp16", (8, 0), ""), ("bf16", (8, 0), ""), ("fp32", (6, 1), ""),
    ("fp16", None, ""),
])  # fmt: skip
def test_a_gpu_without_matrix_units_for_the_precision(
    precision: str, capability: tuple[int, int] | None, slow: str
) -> None:
    request: Any = SimpleNamespace(gpu_ranks=2, command=lambda **changes: f"again {changes}")
    gpus = machine(32, 32, capability=capability)
    checks = list(precision_checks.precision_works(precision, gpus, "cuda", TORCH, request))
    assert [(check.status, check.fixes) for check in checks] == (
        [(WARNING, ["again {'precision': 'auto'}"])] if slow else []
    )
    assert all(check.text.startswith(slow) for check in checks)

"""MFU: the share of the GPUs' peak arithmetic that a training uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.cases import each
from training.host import flops
from training.inspector.distributed import World
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims, flops_per_token
from training.trainer import gpu_peak
from training.trainer.progress import _speed_at_peak


@pytest.mark.parametrize("shape", [ModelDims(2, 256, 64), ModelDims(4, 500, 96)])
def test_the_formula_matches_torchs_count(shape: ModelDims) -> None:
    """Matrix multiplications in a forward and a backward pass, with attention not split into
    tiles."""
    model, sequences = GPT(shape), 3
    tokens = torch.randint(shape.vocab, (sequences, shape.max_seq_len))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert counted == pytest.approx(flops_per_token(shape), rel=0.01)


def test_the_embedding_is_not_counted() -> None:
    small, large = ModelDims(2, 256, 64), ModelDims(2, 512, 64)
    assert flops_per_token(large) - flops_per_token(small) == 6 * 256 * small.width, (
        "the head alone"
    )


@each(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA GH200 144G HBM3e", 989.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", 147.1),
        ("NVIDIA GeForce RTX 5080", 112.6),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8),
        ("NVIDIA GeForce RTX 3090", 71.0),
        ("NVIDIA GeForce RTX 3080", 59.5),
        ("NVIDIA GeForce RTX 4080 SUPER", 104.4),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
        ("NVIDIA GeForce RTX 5070 Ti", 87.9),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA RTX A5000", 111.1),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA GB300", 2500.0),
        ("NVIDIA GB10", 125.0),
        ("NVIDIA H800", 989.5),
        ("NVIDIA H800 PCIe", 756.5),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L20", 119.5),
        ("NVIDIA RTX 5000 Ada Generation", 261.1),
        ("NVIDIA RTX A4000", 76.7),
    ],
)
def test_known_gpus(name: str, tera: float) -> None:
    assert flops.peak(name, "bf16") == pytest.approx(tera * 1e12)


@each(
    ("name", "cores", "mhz"),
    [
        ("5090", 21760, 2407),
        ("5080", 10752, 2617),
        ("5070 Ti", 8960, 2452),
        ("5070", 6144, 2512),
        ("5060 Ti", 4608, 2572),
        ("5060", 3840, 2497),
        ("4090", 16384, 2520),
        ("4080 SUPER", 10240, 2550),
        ("4080", 9728, 2505),
        ("4070 Ti SUPER", 8448, 2610),
        ("4070 Ti", 7680, 2610),
        ("4070 SUPER", 7168, 2475),
        ("4070", 5888, 2475),
        ("4060 Ti", 4352, 2535),
        ("4060", 3072, 2460),
        ("3090 Ti", 10752, 1860),
        ("3090", 10496, 1695),
        ("3080 Ti", 10240, 1665),
        ("3080", 8704, 1710),
        ("3070 Ti", 6144, 1770),
        ("3070", 5888, 1725),
        ("3060 Ti", 4864, 1665),
        ("3060", 3584, 1777),
    ],
)
def test_the_peaks_of_geforce_by_cores_and_boost_clock(name: str, cores: int, mhz: int) -> None:
    peak = flops.peak(f"NVIDIA GeForce RTX {name}", "bf16")
    assert peak == pytest.approx(4 * cores * mhz * 1e6, rel=0.004)


@each(
    ("name", "tera"),
    [
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla V100-SXM3-32GB", 125.0),
        ("Tesla V100S-PCIE-32GB", 130.0),
        ("Tesla T4", 65.0),
        ("NVIDIA GeForce RTX 2080 Ti", 53.8),
        ("NVIDIA TITAN RTX", 130.5),
        ("NVIDIA TITAN V", 110.0),
        ("Quadro RTX 6000", 130.5),
        ("Quadro RTX 8000", 130.5),
        ("NVIDIA T4", 65.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_gpus_in_fp16(name: str, tera: float) -> None:
    assert flops.peak(name, "fp16") == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "NVIDIA A100",
            "NVIDIA A100-SXM-64GB",
        ),
        *("Tesla V100S-PCIE-32GB", "Tesla V100-SXM2-32GB"),
        *("Tesla T4", "AMD Instinct MI300X", "", "-"),
    ],
)
def test_other_gpus_have_no_known_peak(name: str) -> None:
    assert flops.peak(name, "bf16") is None


@each(
    ("names", "precision", "tera"),
    [
        (["NVIDIA A100-SXM4-80GB"] * 2, "bf16", 624.0),
        (["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090"], "bf16", 236.2),
        (["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"], "bf16", 236.2),
        (["NVIDIA L40S"], "fp8", 362.0),  # that of bf16
        (["Tesla V100-SXM2-32GB"] * 2, "fp16", 250.0),
        (["Tesla V100-SXM2-32GB"] * 2, "bf16", None),  # which it emulates
        (["NVIDIA A100-SXM4-80GB"] * 2, "fp32", None),  # another peak
        (["NVIDIA A100-SXM4-80GB", "NVIDIA Something New"], "bf16", None),
    ],
)
def test_the_peak_is_that_of_all_ranks_together(
    names: list[str], precision: str, tera: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, found = list[str](), list[float | None]()

    def exchange(key: str, text: str) -> list[str]:
        texts.insert(0, text)
        return texts if len(texts) == len(names) else []

    monkeypatch.setattr(gpu_peak, "exchange_texts", exchange)
    for rank in (*range(1, len(names)), 0):  # rank 0 reads those of the others
        world = World(rank, rank, len(names), torch.device(f"cuda:{rank}"), "nccl", "-")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
        found.append(gpu_peak.of_all(world, precision))
    assert found == [*([None] * (len(names) - 1)), tera and pytest.approx(tera * 1e12)]


def test_a_cpu_has_no_peak() -> None:
    assert gpu_peak.of_all(World(0, 0, 1, torch.device("cpu"), "gloo", "-"), "bf16") is None


def test_the_speed_at_the_peak() -> None:
    shape = ModelDims(12, 8192, 1536)
    # 12 blocks of 7.1 M weights and a head of 6.3 M; attention 12 · 12 · 768 · 1536.
    cost = 6 * (12 * (4 * 768**2 + 3 * 768 * 2048) + 8192 * 768) + 12 * 12 * 768 * 1536
    assert flops_per_token(shape) == cost
    for peak, flops_of, speed in (
        (624e12, cost, 624e12 / cost),
        (624e12, None, None),
        (None, cost, None),
    ):
        task = SimpleNamespace(flops=lambda model, value=flops_of: value)
        session: Any = SimpleNamespace(task=task, raw=None, peak=peak)
        assert _speed_at_peak(session) == speed

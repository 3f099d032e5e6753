"""Gradients in bf16 between real ranks: DDP with accumulation, uneven buckets, Muon, infinities."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases import each
from tests.conftest import ROOT
from tests.unit.test_gpt_muon_ranks import END
from training.trainer import compression, ddp_model

PROGRAM = (
    """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training.tasks.gpt.muon import Muon
from training.trainer import compression, ddp_model

rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank,
                        world_size=ranks)

def trained(compressed, steps=3):
    torch.manual_seed(0)
    # sizes that fill no bucket evenly, and a model in another precision beside them
    model = torch.nn.Sequential(torch.nn.Linear(7, 301), torch.nn.Tanh(), torch.nn.Linear(301, 5))
    model.register_parameter("wide", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002, gradient_as_bucket_view=True)
    if compressed:
        compression.register(ddp)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    muon = Muon(matrices, lr=0.02, weight_decay=0.0, momentum=0.9, dtype=torch.float32)
    found = []
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        data = torch.randn(2, 4, 7)
        with ddp.no_sync():
            (ddp(data[0]).square().mean() + model.wide.square().sum()).backward()
        (ddp(data[1]).square().mean() + model.wide.square().sum()).backward()
        found.append([p.grad.clone() for p in model.parameters()])
        muon.step()
        ddp.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]
    special = []
    for value in (float("inf"), float("nan"), 3e38):
        out = ddp(torch.ones(1, 7)).sum() + model.wide.sum()
        out = out * (value if rank == 1 else 1.0)
        out.backward()
        special.append(bool(torch.isfinite(model[2].bias.grad).all()))
        ddp.zero_grad()
    return {"gradients": found, "weights": weights, "finite": special}

torch.save({name: trained(name == "bf16") for name in ("none", "bf16")}, f"{folder}/{rank}.pt")
"""
    + END
)


def ran(ranks: int, folder: Path) -> list[dict[str, Any]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(ranks), str(folder)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(120) for process in started] == [0] * ranks
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "module", "collective"), [(2, compression, "all_gather"), (3, dist, "all_reduce")]
)
def test_the_error_of_a_failed_exchange_is_raised(
    monkeypatch: pytest.MonkeyPatch, ranks: int, module: Any, collective: str
) -> None:
    failed: torch.futures.Future[Any] = torch.futures.Future()
    failed.set_exception(RuntimeError("connection closed by peer"))
    work = SimpleNamespace(get_future=lambda: failed)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module, collective, lambda *_, **__: work)
    bucket: Any = SimpleNamespace(buffer=lambda: torch.ones(4), index=lambda: 0)
    with pytest.raises(RuntimeError, match="closed by peer"):
        compression.mean_in_bf16(compression.Buffers(), bucket).wait()


def test_the_copy_of_a_bucket_is_kept_until_the_bucket_changes() -> None:
    buffers = compression.Buffers()

    def bucket(index: int, size: int) -> Any:
        return SimpleNamespace(buffer=lambda: torch.ones(size), index=lambda: index)

    first, other = buffers.of(bucket(0, 4), 2), buffers.of(bucket(1, 4), 2)
    assert (first.shape, first.dtype) == ((2, 4), torch.bfloat16)
    assert buffers.of(bucket(0, 4), 2).data_ptr() == first.data_ptr() != other.data_ptr()
    assert buffers.of(bucket(0, 6), 1).shape == (1, 6) and len(buffers) == 2


@each("ranks, value, sent", [(1, "bf16", 0), (2, "none", 4 * 12 + 8), (2, "bf16", 2 * 12 + 8)])
def test_the_bytes_of_gradients_are_those_that_are_sent(ranks: int, value: str, sent: int) -> None:
    """Float64 is not compressed, and frozen weights have no gradients."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(1, 1, dtype=torch.float64))
    for bias in (model[0].bias, model[1].bias):
        bias.requires_grad_(False)
    plan: Any = {"ranks": ranks, "gradient_compression": {"value": value}}
    assert ddp_model.gradient_bytes(model, plan) == sent


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_mean_of_gradients_in_bf16(ranks: int, tmp_path: Path) -> None:
    first, *others = ran(ranks, tmp_path)
    plain, rounded = first["none"], first["bf16"]
    for other in others:
        for name in ("gradients", "weights"):
            mine, its = rounded[name], other["bf16"][name]
            flat = zip(_flat(mine), _flat(its), strict=True)
            assert all(torch.equal(a, b) for a, b in flat), "all ranks have the same bits"
    # The first step alone: later ones have other weights.
    largest = 2.0**-8 * (1 if ranks == 2 else ranks)
    for exact, got in zip(plain["gradients"][0], rounded["gradients"][0], strict=True):
        if exact.dtype == torch.float64:
            assert torch.equal(exact, got), "not compressed"
            continue
        error = (got - exact).norm() / exact.norm()
        assert 0 < error < largest, error
    # Infinities and NaN of one rank reach all; large numbers stay finite.
    assert rounded["finite"] == plain["finite"] == [False, False, True]


def _flat(values: Any) -> list[torch.Tensor]:
    return [values] if isinstance(values, torch.Tensor) else [t for v in values for t in _flat(v)]

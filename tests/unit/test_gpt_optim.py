from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases import each
from training.config.schema import Config
from training.tasks.gpt import optim
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims
from training.tasks.gpt.rates import MATRIX_LR
from training.tasks.optim import Optimizers


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(ModelDims(2, 64, 8))


def trained(model: GPT, optimizer: Optimizers, steps: range) -> GPT:
    for step in steps:
        tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step))
        optimizer.schedule(step, 1.0)
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_every_weight_is_in_one_group_with_its_rate(name: str) -> None:
    model, config = gpt(), Config(optimizer=name)
    optimizer = optim.build(model, config)
    members = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in members} == {id(p) for p in model.parameters()} and len(members) == len(
        list(model.parameters())
    )
    scale = (768 / 128) ** 0.5  # depth 2 is 128 wide
    matrices = MATRIX_LR[name] * (scale if name == "adamw" else 1.0)
    assert optimizer.schedule(0, 0.5) == pytest.approx(matrices / 2)
    wanted = [matrices / 2, scale * config.embedding_lr / 2, scale * config.unembedding_lr / 2]
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(wanted)


def test_an_explicit_rate_is_used() -> None:
    assert optim.build(gpt(), Config(matrix_lr=0.5)).schedule(0, 1.0) == 0.5


@pytest.mark.parametrize("name", [pytest.param("muon", marks=pytest.mark.slow), "adamw"])
def test_a_restored_state_gives_the_same_next_steps(name: str) -> None:
    model, config = gpt(), Config(optimizer=name)
    optimizer = optim.build(model, config)
    trained(model, optimizer, range(3))
    weights, state = (
        {k: v.clone() for k, v in model.state_dict().items()},
        copied(optimizer.state_dict()),
    )
    trained(model, optimizer, range(3, 6))
    other = gpt()
    other.load_state_dict(weights)
    again = optim.build(other, config)
    again.load_state_dict(state)
    trained(other, again, range(3, 6))
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return [copied(v) for v in value] if isinstance(value, list) else value


def test_a_resumed_run_uses_its_own_rates() -> None:
    model = gpt()
    optimizer = optim.build(model, Config())
    trained(model, optimizer, range(1))
    optimizer.schedule(1, 0.1)
    restored = optim.build(model, Config(matrix_lr=0.3, weight_decay=0.7))
    restored.load_state_dict(optimizer.state_dict())
    assert restored.schedule(2, 1.0) == 0.3 and restored.param_groups[0]["weight_decay"] == 0.7


def test_muon_updates_all_directions_of_a_matrix_equally() -> None:
    """Its update is nearly orthogonal, for any decay of the gradient's singular values."""
    torch.manual_seed(0)
    model = GPT(ModelDims(2, 64, 32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    before = model.blocks[0].up.weight.detach().clone()
    optimizer = optim.build(model, Config(weight_decay=0.0))
    tokens = torch.randint(0, 64, (16, 32))
    optimizer.schedule(0, 1.0)
    model(tokens, tokens).backward()
    slopes = torch.linalg.svdvals(model.blocks[0].up.weight.grad)
    assert slopes[0] / slopes[-1] > 100
    optimizer.step()
    values = torch.linalg.svdvals(model.blocks[0].up.weight.detach() - before) / (
        MATRIX_LR["muon"] * (model.shape.inner / model.shape.width) ** 0.5
    )
    # The smallest directions need more iterations.
    alike = int((slopes > slopes.norm() / 100).sum())
    assert (
        values.max() < 1.5
        and values.median() > 0.5
        and alike > len(values) / 2
        and values[0] / values[alike - 1] < 20
    )


@each(
    ("name", "capability", "dtype"),
    [
        ("NVIDIA GeForce RTX 3090", (8, 6), torch.float16),
        ("NVIDIA GeForce RTX 2080 Ti", (7, 5), torch.float16),
        ("NVIDIA GeForce GTX 1660", (7, 5), torch.float32),
        ("NVIDIA GeForce GTX 1080", (6, 1), torch.float32),
    ],
)
def test_muon_multiplies_on_tensor_cores(
    name: str, capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert optim._products(torch.device("cuda:0")) == dtype


@each(
    ("flags", "other", "dtype"),
    [
        ({"avx512_bf16"}, "bf16", torch.bfloat16),
        ({"avx512_bf16"}, "fp16", torch.float16),
        (set(), "bf16", torch.float32),
    ],
)
def test_ranks_that_exchange_updates_have_the_same_type(
    flags: set[str], other: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(number: torch.Tensor, kind: object) -> None:
        assert kind == dist.ReduceOp.MIN
        number.clamp_(max=["fp32", "fp16", "bf16"].index(other))

    monkeypatch.setattr(optim.decisions, "cpu_bf16", lambda: flags)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert optim._products(torch.device("cpu")) == dtype

"""The loss scale of fp16, and steps that it skips: nothing changes, on no rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.config.schema import Config
from training.inspector.distributed import World
from training.tasks import math_modes
from training.tasks.gpt import optim as gpt_optim
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims
from training.tasks.gpt.muon import Muon
from training.tasks.optim import Optimizers
from training.trainer import checkpoint, loop, loss_scale, sanity_checks
from training.trainer.loss_scale import INITIAL, MINIMUM, PATIENCE, LossScale
from training.trainer.step_stats import LocalStep, RankStep, StepAllReduce, StepReport

CPU = torch.device("cpu")
WORLD = World(0, 0, 1, CPU, "none", "-")
Make = Callable[[GPT], Optimizers]


def own(kind: Any, **settings: Any) -> Make:
    return lambda model: Optimizers([kind(model.parameters(), lr=0.01, **settings)])


def session(make: Make) -> Any:
    torch.manual_seed(0)
    model = GPT(ModelDims(1, 64, 8))
    optimizer = make(model)
    optimizer.skip_on_device()
    weights = list(model.parameters())
    return SimpleNamespace(
        raw=model,
        weights=weights,
        clipped=[weights],
        optimizer=optimizer,
        loss_scale=LossScale(CPU),
        average=None,
        config=Config(),
        task=SimpleNamespace(random=False),
    )


def step(of: Any, number: int, factor: float = 1.0) -> torch.Tensor:
    """A step of the loop on the host; its gradients are multiplied by `factor`. Returns the norm
    before clipping."""
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(number))
    of.optimizer.schedule(number, 1.0)
    loss = of.raw(tokens, tokens)  # in fp32, where the scale changes no bit
    (of.loss_scale.scaled(loss) * factor).backward()
    exchange = StepAllReduce(WORLD)
    overflow = of.loss_scale.unscale(of.weights)
    exchange.start(number, LocalStep(loss.detach(), 4, 0.0), None, 0, overflow)
    norm = loop.clip(of)
    used = loop.update(of, exchange, number)
    report = exchange.finish(norm, used).read()
    of.loss_scale.count(report)
    assert report.skipped == (factor != 1.0)
    return norm


def bits(of: Any) -> list[bytes]:
    """Weights and optimizer state."""
    states = [value for part in of.optimizer.parts for value in part.state.values()]
    tensors = [*of.weights, *(t for state in states for t in state.values())]
    return [t.detach().numpy().tobytes() for t in tensors]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: gpt_optim.build(model, Config(optimizer="muon")),
        lambda model: gpt_optim.build(model, Config(optimizer="adamw")),
        own(torch.optim.AdamW),
        own(torch.optim.SGD, momentum=0.9),
        own(torch.optim.SGD, momentum=0.9, fused=True),
    ],
    ids=["muon", "adamw", "default", "sgd", "fused sgd"],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_skipped_step_changes_nothing(make: Make, first: bool) -> None:
    of, same = session(make), session(make)
    for number in range(0 if first else 2):
        step(of, number)
        step(same, number)
    weights, before = [w.detach().clone() for w in of.weights], bits(of)
    for factor in (math.inf, math.nan):
        step(of, 7, factor)
        assert all(map(torch.equal, of.weights, weights))
        assert first or bits(of) == before
    assert of.loss_scale.scale == INITIAL / 4 and of.loss_scale.skipped == 2
    # Then it continues as if nothing had happened.
    for number in range(2, 4):
        step(of, number)
        step(same, number)
    assert bits(of) == bits(same) and not all(map(torch.equal, of.weights, weights))


def test_the_scale_grows_after_the_interval_and_stops_at_the_minimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    scale, good, bad = LossScale(CPU), torch.tensor(0.0), torch.tensor(1.0)
    seen = []
    for overflow in (good, good, good, good, bad, good, good, good):
        scale.update(overflow)
        seen.append(float(scale.scale) / INITIAL)
    assert seen == [1, 1, 2, 2, 1, 1, 1, 2]
    for _ in range(40):
        scale.update(bad)
    assert scale.scale == MINIMUM


def test_gradients_are_clipped_by_their_true_norm() -> None:
    of, plain = (session(own(torch.optim.SGD)) for _ in range(2))
    plain.loss_scale.scale.fill_(1.0)
    norms = [float(step(one, 0)) for one in (of, plain)]
    assert norms[0] == norms[1] and all(map(torch.equal, of.weights, plain.weights))


def test_the_scale_survives_a_checkpoint(tmp_path: Path) -> None:
    of = session(own(torch.optim.AdamW))
    for number, factor in enumerate((1.0, math.inf, 1.0, 1.0)):
        step(of, number, factor)
    saved = {"model": of.raw.state_dict(), "loss_scale": of.loss_scale.state_dict()}
    facts: Any = {"shape": {}, "optimizer": "", "world_size": 1, "data": {}, "tokenizer": None}
    checkpoint.save(tmp_path, checkpoint.TrainProgress(4), saved, facts)
    loaded = checkpoint.latest(tmp_path)
    assert loaded
    resumed = LossScale(CPU)
    resumed.load_state_dict(loaded.state["loss_scale"])
    assert resumed.state_dict() == {"scale": INITIAL / 2, "good_steps": 2, "skipped": 1}


def test_a_state_of_another_precision_is_loaded() -> None:
    """bf16 on one GPU, then fp16 on another: the task's AdamW steps in one kernel, which keeps its
    step count on the GPU."""
    before, after = own(torch.optim.AdamW), session(own(torch.optim.AdamW))
    model = GPT(ModelDims(1, 64, 8))
    plain = before(model)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    plain.step()
    after.optimizer.load_state_dict(plain.state_dict())
    (part,) = after.optimizer.parts
    assert all(group["fused"] is True for group in part.param_groups)
    assert all(state["step"] == 1 for state in part.state.values())
    step(after, 1)
    plain.load_state_dict(after.optimizer.state_dict())
    assert plain.param_groups[0]["fused"] is None
    plain.step()


def test_an_explicit_choice_of_the_optimizer_is_kept() -> None:
    for settings in ({"foreach": True}, {"fused": False}, {"differentiable": True}):
        parts = own(torch.optim.AdamW, **settings)(GPT(ModelDims(1, 64, 8)))
        parts.skip_on_device()
        assert parts.param_groups[0]["fused"] is settings.get("fused")


def check(*shares: RankStep, scale: float = INITIAL, times: int = 1) -> None:
    batches = SimpleNamespace(indices=lambda epoch, used, rank: range(10 * rank, 10 * rank + 2))
    task = SimpleNamespace(pieces="samples")
    of: Any = SimpleNamespace(
        world=WORLD, batches=batches, loss_scale=LossScale(CPU), config=Config(), task=task
    )
    for _ in range(times):
        report = StepReport(list(shares), 0, math.nan, scale)
        of.loss_scale.count(report)
        sanity_checks.check_step(of, report, checkpoint.TrainProgress(6))


GOOD, OVERFLOW = RankStep(7, 4, 2.5, -1.0), RankStep(7, 4, 2.5, -1.0, overflow=True)
NAN = RankStep(7, 4, math.nan, -1.0, overflow=True)


def test_skipped_steps_pass() -> None:
    check(OVERFLOW, GOOD, times=100)
    check(GOOD, NAN, times=100)
    check(OVERFLOW, GOOD, scale=MINIMUM, times=PATIENCE - 1)


@pytest.mark.parametrize(("share", "rank"), [(OVERFLOW, None), (NAN, 1)])
def test_skipped_steps_at_the_minimum_are_a_failure(share: RankStep, rank: int | None) -> None:
    with pytest.raises(sanity_checks.NotFinite, match="no weight was changed in the last") as error:
        check(GOOD, share, scale=MINIMUM, times=PATIENCE)
    assert error.value.rank == rank


def test_without_an_overflow_nan_is_a_failure() -> None:
    with pytest.raises(sanity_checks.NotFinite):
        check(GOOD, RankStep(7, 4, math.nan, -1.0))
    with pytest.raises(sanity_checks.NotFinite):
        check(GOOD, GOOD)  # the norm is NaN


def test_muon_multiplies_in_fp16_as_well_as_in_fp32() -> None:
    """Of gradients so small that fp16 would lose them."""
    torch.manual_seed(0)
    ends = []
    for dtype in (torch.float32, torch.float16):
        weight = torch.nn.Parameter(torch.zeros(48, 32))
        optimizer = Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.9, dtype=dtype)
        weight.grad = 1e-7 * torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        ends.append(weight.detach())
    assert (ends[1] - ends[0]).norm() < 0.01 * ends[0].norm()


def test_a_cpu_keeps_its_own_arithmetic() -> None:
    plan: Any = {"tf32": {"value": True}, "cudnn_benchmark": {"value": True}}
    math_modes.select(plan, CPU)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("fast", [True, False])
def test_a_gpu_gets_the_arithmetic_of_the_plan(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn, before = torch.backends.cudnn, torch.get_float32_matmul_precision()
    monkeypatch.setattr(cudnn, "allow_tf32", not fast)
    monkeypatch.setattr(cudnn, "benchmark", fast)
    plan: Any = {"tf32": {"value": fast}, "cudnn_benchmark": {"value": not fast}}
    try:
        math_modes.select(plan, torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == ("high" if fast else "highest")
        assert (cudnn.allow_tf32, cudnn.benchmark) == (fast, not fast)
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_evaluation_has_the_arithmetic_of_its_run_for_itself() -> None:
    cudnn, gpu = torch.backends.cudnn, torch.device("cuda")
    before = (torch.get_float32_matmul_precision(), cudnn.allow_tf32)
    plan: Any = {"tf32": {"value": True}}
    with math_modes.as_trained(plan, gpu):
        assert (torch.get_float32_matmul_precision(), cudnn.allow_tf32) == ("high", True)
    plan["tf32"]["value"] = False
    with math_modes.as_trained(plan, gpu):
        assert (torch.get_float32_matmul_precision(), cudnn.allow_tf32) == ("highest", False)
    with math_modes.as_trained(plan, CPU):
        assert (torch.get_float32_matmul_precision(), cudnn.allow_tf32) == before
    assert (torch.get_float32_matmul_precision(), cudnn.allow_tf32) == before


def settings() -> math_modes.Fp32Modes:
    return math_modes.current()


@pytest.mark.parametrize("products", ["high", "medium"])
def test_an_evaluation_has_what_the_task_has_set_while_it_made_the_model(products: str) -> None:
    """As in the training, which gives torch the plan's settings before."""
    plan: Any = {"tf32": {"value": False}}
    gpu, before = torch.device("cuda"), settings()
    with math_modes.as_trained(plan, gpu):
        torch.set_float32_matmul_precision(products)
        made = settings()
    assert settings() == before
    with math_modes.as_trained(plan, gpu, made):
        assert settings() == made == (products, False)
    with math_modes.as_trained(plan, gpu):
        assert settings() == ("highest", False), "that of another model"
    assert settings() == before


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="since torch 2.9")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("products", ["tf32", "ieee"])
@pytest.mark.parametrize("convolutions", ["tf32", "ieee"])
def test_the_interface_of_torch_2_9_is_understood(
    fast: bool, products: str, convolutions: str
) -> None:
    """Where it differs from torch's older functions, those raise an error, or return what was set
    before."""
    plan: Any = {"tf32": {"value": fast}}
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    gpu, before = torch.device("cuda"), settings()
    with math_modes.as_trained(plan, gpu):
        matmul.fp32_precision, conv.fp32_precision = products, convolutions
        made = settings()
    assert made == ("high" if products == "tf32" else "highest", convolutions == "tf32")
    assert settings() == before
    with math_modes.as_trained(plan, gpu, made):
        assert (matmul.fp32_precision == "tf32") == (products == "tf32")
        assert (conv.fp32_precision == "tf32") == (convolutions == "tf32")
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before

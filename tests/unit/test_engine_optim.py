"""The learning-rate schedule, and the weights that an optimizer changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.cases import each
from training.config.schema import Config
from training.core.errors import UserError
from training.tasks import optim
from training.tasks.base import Task
from training.trainer import loop
from training.trainer.loss_scale import LossScale


def test_the_schedule_warms_up_stays_constant_and_decays() -> None:
    config = Config(warmup_ratio=0.1, warmdown_ratio=0.4, final_lr_frac=0.05)
    rates = [optim.multiplier(step, 100, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert all(rate == 1.0 for rate in rates[9:60])
    assert all(a > b for a, b in pairwise(rates[60:]))
    assert 0.05 < rates[-1] < 0.1


@pytest.mark.parametrize("total", [1, 2, 7])
def test_short_runs_have_a_rate_above_zero(total: int) -> None:
    assert all(0 < optim.multiplier(step, total, Config()) <= 1 for step in range(total))


def test_a_users_optimizer_keeps_its_momentum() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([weight], lr=0.1)
    heavy = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optim.Optimizers([plain, heavy]).schedule(100, 0.5)
    assert [one.param_groups[0]["momentum"] for one in (plain, heavy)] == [0, 0.9]


def test_rates_of_numpy_become_numbers() -> None:
    rate = np.float64(0.1)
    both = optim.Optimizers([torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=rate)])
    both.schedule(1, np.float64(0.5))
    group = both.param_groups[0]
    assert (type(group["lr"]), type(group["initial_lr"])) == (float, float)
    assert group["lr"] == pytest.approx(0.05)


def test_a_rate_on_the_gpu_is_not_read_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would wait for the GPU."""
    weight, rate = nn.Parameter(torch.ones(2)), torch.tensor(0.1)
    made = optim.Optimizers([torch.optim.AdamW([weight], lr=rate, capturable=True)])
    with monkeypatch.context() as patch:
        for name in ("__float__", "item", "tolist"):
            patch.setattr(torch.Tensor, name, lambda tensor: pytest.fail("read by the host"))
        recorded = [made.schedule(step, share) for step, share in enumerate((0.5, 1.0))]
    assert recorded == pytest.approx([0.05, 0.1])
    assert isinstance(made.param_groups[0]["lr"], torch.Tensor)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.again = self.head  # tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found


def heads(steps: int, *, frozen: bool) -> tuple[list[torch.Tensor], list[float]]:
    """The head after some steps of the loop, and the norms of its gradients."""
    model = Body()
    model.body.requires_grad_(not frozen)
    made = optim.Optimizers([torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)])
    session: Any = SimpleNamespace(
        clipped=[weights := made.trained(model)],
        optimizer=made,
        config=Config(grad_clip=0.1),
        average=None,
        task=SimpleNamespace(random=False),
    )
    session.loss_scale, norms, exchange = LossScale(torch.device("cpu")), [], SimpleNamespace()
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        session.loss_scale.scaled(model(x).square().mean()).backward()
        overflow = session.loss_scale.unscale(weights)
        exchange.overflow = lambda found=overflow: found
        norms.append(float(loop.clip(session)))
        loop.update(session, exchange, step)  # type: ignore[arg-type]
        assert all(weight.grad is None for weight in model.parameters())
    return [weight.detach() for weight in model.head.parameters()], norms


def test_a_body_that_the_optimizer_leaves_out_trains_like_a_frozen_one() -> None:
    (left_out, norms), (frozen, wanted) = heads(5, frozen=False), heads(5, frozen=True)
    assert norms == wanted and all(map(torch.equal, left_out, frozen))


def test_parameters_outside_of_the_model_are_refused() -> None:
    model = Body()
    own = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 5))]
    still = nn.Parameter(torch.zeros(1), requires_grad=False)
    one = torch.optim.SGD([*model.head.parameters(), own[0], still], lr=0.1)
    made = optim.Optimizers([one, torch.optim.SGD([own[1]], lr=0.1)])
    with pytest.raises(UserError) as caught:
        made.trained(model)
    (problem,) = caught.value.problems
    assert problem.code == "task.optimizer"
    assert "2 parameters" in problem.what and "(3,), (2, 5)" in problem.what
    whole = optim.Optimizers([torch.optim.SGD([*model.parameters(), still], lr=0.1)])
    assert list(map(id, whole.trained(model))) == list(map(id, model.parameters()))


class Adaptive(torch.optim.SGD):
    """Keeps its progress in its group, as Prodigy and schedule-free optimizers do."""

    def __init__(self, params: Any, d0: float = 1e-6, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            group |= {"d0": d0, "d": d0, "k": 0, "seen": torch.zeros(2), "safe": False}

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["d"] *= 2.0
            group["k"] += 1
            group["seen"] += 1
            group["late"] = "since the first step"
        return super().step(closure)


def resumed(state: Any, **settings: Any) -> dict[str, Any]:
    weight = nn.Parameter(torch.ones(2))
    made = optim.Optimizers([Adaptive([weight], **{"lr": 0.1, "momentum": 0.9} | settings)])
    made.load_state_dict(state)
    assert made.parts[0].state[weight]["momentum_buffer"].tolist() == [2.0, 2.0]
    made.schedule(3, 0.5)
    return made.param_groups[0]


def test_progress_in_the_settings_of_an_optimizer_survives_a_resume(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(2))
    made = optim.Optimizers([Adaptive([weight], lr=0.1, momentum=0.9)])
    weight.grad = torch.ones(2)
    made.schedule(0, 0.25)
    made.step()
    weight.grad = torch.full((2,), 1.1)
    made.step()
    torch.save(made.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    group = resumed(state)
    assert (group["d"], group["k"], group["seen"].tolist()) == (4e-6, 2, [2.0, 2.0])
    assert (group["lr"], group["momentum"], group["late"]) == (0.05, 0.9, "since the first step")
    group = resumed(state, lr=0.4, momentum=0.5, d0=1e-4)
    assert (group["lr"], group["momentum"], group["d"], group["k"]) == (0.2, 0.5, 1e-4, 2)
    del state[0]["built"]  # of an earlier version
    group = resumed(state)
    assert (group["d"], group["k"], group["momentum"]) == (1e-6, 0, 0.9)
    state[0]["param_groups"].append(state[0]["param_groups"][0])
    with pytest.raises(ValueError, match="zip"):
        resumed(state)


def stepped(*groups: list[nn.Parameter], **settings: Any) -> optim.Optimizers:
    kind = settings.pop("kind", torch.optim.AdamW)
    made = optim.Optimizers([kind([{"params": group} for group in groups], lr=0.1, **settings)])
    for group in groups:
        for weight in group:
            weight.grad = torch.ones_like(weight)
    made.step()
    return made


def test_a_state_of_other_groups_order_or_settings_does_not_fit() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    SGD, RMSprop = torch.optim.SGD, torch.optim.RMSprop
    whole = stepped([weight, bias]).state_dict()
    assert stepped([weight, bias]).fits(whole)
    assert stepped([weight, bias], weight_decay=0.5, betas=(0.5, 0.6)).fits(whole)
    assert not stepped([weight], [bias]).fits(whole), "decayed and other ones"
    assert not stepped([bias, weight]).fits(whole)
    assert not stepped([weight, bias], amsgrad=True).fits(whole)
    assert stepped([weight, bias]).fits(stepped([weight, bias], amsgrad=True).state_dict())
    plain = [stepped([weight, bias], kind=kind).state_dict() for kind in (SGD, RMSprop)]
    heavy = [stepped([weight, bias], kind=kind, momentum=0.9) for kind in (SGD, RMSprop)]
    # SGD starts a momentum by itself
    assert [made.fits(state) for made, state in zip(heavy, plain, strict=True)] == [True, False]
    # moments in other shapes, as those of a projection
    for state in whole[0]["state"].values():
        state["exp_avg"] = state["exp_avg"].flatten()[:1]
    assert stepped([weight, bias]).fits(whole)


class Scheduled(Task):
    """Returns what `make` makes of its optimizer."""

    make: Callable[[torch.optim.Optimizer], Any]

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = type(self).make(super().optimizer(model))
        return found


def warmed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.001)
    return optimizer


@each(
    ("make", "named"),
    [
        (warmed, r"rate\(step, total\)"),  # would train with a thousandth of the rate
        (lambda one: torch.optim.lr_scheduler.StepLR(one, 3), "torch.StepLR"),
        (lambda one: ([one], []), "returned tuple"),
        (lambda one: None, "returned None"),
    ],
)
def test_a_scheduler_of_torch_is_refused(
    make: Callable[[torch.optim.Optimizer], Any], named: str
) -> None:
    own = type("Own", (Scheduled,), {"make": staticmethod(make)})
    task = own(SimpleNamespace(), Config(), torch.device("cpu"))
    with pytest.raises(TypeError, match=rf"optimizer\(\) of Own .*{named}"):
        task.optimizers(task.model())


@each("rate", [None, ...])
def test_an_optimizer_without_a_rate_is_refused(rate: Any) -> None:
    """As transformers.Adafactor, which has its own schedule by default."""

    def made(one: torch.optim.Optimizer) -> torch.optim.Optimizer:
        one.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        if rate is ...:
            del one.param_groups[1]["lr"]
        else:
            one.param_groups[1]["lr"] = rate
        return one

    own = type("Own", (Scheduled,), {"make": staticmethod(made)})
    task = own(SimpleNamespace(), Config(), torch.device("cpu"))
    with pytest.raises(TypeError, match=r"optimizer\(\) of Own .*lr=1e-3"):
        task.optimizers(task.model())

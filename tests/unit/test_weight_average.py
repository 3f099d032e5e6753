"""The moving average of the weights (--ema): its values, and where it is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.trained_runs import checkpoint, gpt, made
from training.core import manifest
from training.core.errors import UserError
from training.core.find_run import RunSelector
from training.tasks import load_model, trained, weights
from training.trainer import weight_average
from training.trainer.weight_average import WeightAverage, decay_at

ASKER = RunSelector("RUN", "./duet sample ", "./duet sample")


class Tied(nn.Module):
    """Weights of two types, one of them tied, one frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.small = nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight))


def test_the_average_follows_the_recurrence_in_fp32() -> None:
    torch.manual_seed(0)
    model = Tied()
    average = WeightAverage(model, 0.9)
    wanted = {name: w.detach().double() for name, w in model.named_parameters()}
    for step in range(100):
        moved(model)
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        for name, weight in model.named_parameters():
            wanted[name] = decay * wanted[name] + (1 - decay) * weight.detach().double()
    found = average.state_dict()
    assert set(found) == {"one.weight", "one.bias", "two.weight", "small"}
    assert {value.dtype for value in found.values()} == {torch.float32}
    for name, value in found.items():
        expected = wanted[name.replace("two", "one")]
        assert torch.allclose(value.double(), expected, rtol=0, atol=1e-5), name
    assert decay_at(10**6, 0.9999) == 0.9999


def test_a_skipped_step_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Tied()
    plain, scaled = WeightAverage(model, 0.9), WeightAverage(model, 0.9)
    for step in range(20):
        moved(model)
        before = {name: value.clone() for name, value in scaled.state_dict().items()}
        scaled.update(step, torch.tensor(1.0))
        for name, value in scaled.state_dict().items():
            assert torch.equal(value, before[name])
        plain.update(step)
        scaled.update(step, torch.tensor(0.0))
    for name, value in plain.state_dict().items():
        assert torch.allclose(value, scaled.state_dict()[name], atol=1e-6)


def test_the_model_has_the_average_only_inside_applied() -> None:
    torch.manual_seed(0)
    model = Tied()
    average = WeightAverage(model, 0.9)
    moved(model)
    average.update(0)
    own = {name: (w.data_ptr(), w.detach().clone()) for name, w in model.named_parameters()}
    with pytest.raises(KeyboardInterrupt), average.applied():
        for name, value in average.state_dict().items():
            weight = model.get_parameter(name)
            assert torch.equal(weight, value.to(weight.dtype)), name
        raise KeyboardInterrupt
    for name, weight in model.named_parameters():
        assert weight.data_ptr() == own[name][0] and torch.equal(weight, own[name][1])


def test_an_average_of_another_model_is_rejected() -> None:
    average = WeightAverage(nn.Linear(2, 2), 0.9)
    with pytest.raises(ValueError, match="shapes"):
        average.load_state_dict(WeightAverage(nn.Linear(3, 2), 0.9).state_dict())


def test_weights_that_are_frozen_or_trained_by_now_continue_the_average_of_the_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    before = WeightAverage(model, 0.9)
    moved(model)
    saved = before.state_dict()
    model[0].requires_grad_(True)
    model[1].requires_grad_(False)
    average = WeightAverage(model, 0.9)
    average.load_state_dict(saved)
    found = average.state_dict()
    assert {name.partition(".")[0] for name in found} == {"0", "2"}
    assert torch.equal(found["0.weight"], model[0].weight), "from its current value on"
    assert torch.equal(found["2.weight"], saved["2.weight"])
    assert not torch.equal(found["2.weight"], model[2].weight)
    with pytest.raises(ValueError, match="names"):
        average.load_state_dict({**saved, "3.weight": saved["2.weight"]})


def test_the_average_is_the_default_of_every_reader(tmp_path: Path) -> None:
    model, other = gpt(1, seed=1), gpt(1, seed=2)
    run = made(tmp_path / "run", model)
    place = run.checkpoints / "step_00000007"
    state = {"model": model.state_dict(), "optimizer": {}, "ema": dict(other.named_parameters())}
    with_average(place, state)
    checkpoint(run, model.state_dict(), manifest.read(place)[0]["shape"], 6)  # type: ignore[index]
    name = next(iter(dict(other.named_parameters())))
    for kind, wanted in ((None, other), ("ema", other), ("raw", model)):
        found = load_model(run.path, kind=kind)
        assert torch.equal(found.model.get_parameter(name), wanted.get_parameter(name)), kind
        assert found.weights.kind == (kind or "ema")
    old = run.checkpoints / "step_00000006"
    assert load_model(old).weights.kind == "raw"
    with pytest.raises(UserError) as raised:
        weights.find(str(old), tmp_path, ASKER, "ema")
    assert [p.code for p in raised.value.problems] == ["weights.other_kind"]
    with pytest.raises(UserError) as raised:
        load_model(run.path, kind="Raw")
    (problem,) = raised.value.problems
    assert (problem.allowed, problem.fixes) == ("ema, raw, None", ['kind="raw"'])
    # of a damaged checkpoint an earlier one replaces, raw only where that is allowed
    (place / manifest.STATE).write_bytes(b"")
    assert load_model(run.path).weights.kind == "raw"
    with pytest.raises(UserError):
        trained.read_state(weights.find(str(run.path), tmp_path, ASKER, "ema"))


def with_average(place: Path, state: dict[str, object]) -> None:
    torch.save(state, place / manifest.STATE)
    facts = manifest.read(place)[0]
    assert facts
    size, checksum = (place / manifest.STATE).stat().st_size, manifest.sha256(place / "state.pt")
    new = {**facts, "ema": 0.999, "bytes": size, "sha256": checksum}
    del new["own_sha256"]
    manifest.write(place, new)  # type: ignore[arg-type]


def test_a_file_of_another_program_with_both(tmp_path: Path) -> None:
    file = tmp_path / "net.pth"
    torch.save({"params": {"w": torch.zeros(1)}, "params_ema": {"w": torch.ones(1)}}, file)
    assert trained.tensors(file, averaged=True)["w"] == 1
    assert trained.tensors(file, averaged=False)["w"] == 0


def test_large_models_are_updated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same result."""
    torch.manual_seed(0)
    model = Tied()
    whole = WeightAverage(model, 0.9)
    monkeypatch.setattr(weight_average, "PASS", 16)
    parts = WeightAverage(model, 0.9)
    moved(model)
    for overflow in (None, torch.tensor(0.0)):
        whole.update(3, overflow)
        parts.update(3, overflow)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name])

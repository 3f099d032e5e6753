"""What the methods of a task return is checked at the method."""

from __future__ import annotations

import functools
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import each
from training.config.schema import Config
from training.tasks.base import Task, moved


@each("found", [torch.ones(1), torch.ones(2, 2), (torch.ones(()), None), 0.5])
def test_a_loss_is_one_number(found: Any) -> None:
    class Wrong(Task):
        def model(self) -> Any: ...
        def train_data(self) -> Any: ...
        def loss(self, model: Any, batch: Any) -> Any:
            return found

    task = Wrong(SimpleNamespace(), Config(), torch.device("cpu"))
    with pytest.raises(TypeError, match=r"loss\(\) of Wrong returned "):
        task.checked_loss(torch.nn.Identity(), None)


class Returning(Task):
    """Each method returns an option."""

    def model(self) -> Any:
        return self.options.found

    def train_data(self) -> Any:
        return self.options.found

    def loss(self, model: Any, batch: Any) -> Any:
        return self.options.found


def returning(found: Any) -> Returning:
    return Returning(SimpleNamespace(found=found), Config(), torch.device("cpu"))


def place(error: BaseException) -> tuple[str, str, str]:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename, frame.name, (frame.line or "").partition("(")[0]


@each("found", [None, nn.Linear, [nn.Linear(1, 1)], {}])
def test_a_model_is_a_module(found: Any) -> None:
    with pytest.raises(TypeError, match=r"model\(\) of Returning returned ") as caught:
        returning(found).checked_model()
    assert place(caught.value) == (__file__, "model", "def model")
    module = nn.Linear(1, 1)
    assert returning(module).checked_model() is module


def test_a_loss_has_a_gradient_unless_none_is_wanted() -> None:
    model = nn.Linear(1, 1)
    found = model.weight.sum()
    assert returning(found).checked_loss(model, None) is found
    with pytest.raises(TypeError, match="without a gradient") as caught:
        returning(found.detach()).checked_loss(model, None)
    assert place(caught.value) == (__file__, "loss", "def loss")
    with torch.no_grad():
        returning(found.detach()).checked_loss(model, None)


def test_a_loss_is_where_the_model_is() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="on meta") as caught:
        returning(model.weight.sum().to("meta")).checked_loss(model, None)
    assert place(caught.value) == (__file__, "loss", "def loss")
    found = torch.ones((), requires_grad=True)
    assert returning(found).checked_loss(model.to("meta"), None) is found, "of the CPU"


def test_a_wrong_return_of_a_callable_object_is_named_without_a_place() -> None:
    class Partial(Returning):
        loss = functools.partial(lambda model, batch: 3)

    task = Partial(SimpleNamespace(), Config(), torch.device("cpu"))
    with pytest.raises(TypeError, match=r"loss\(\) of Partial returned int"):
        task.checked_loss(nn.Identity(), None)


class Refusing(dict[str, Any]):
    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("this dictionary cannot be changed")


def test_a_dictionary_that_cannot_be_changed_becomes_a_plain_one() -> None:
    found = moved(Refusing(ids=torch.ones(2)), torch.device("meta"))
    assert type(found) is dict and found["ids"].device.type == "meta"

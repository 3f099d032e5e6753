"""Tasks: found by name or by file, which is read without running it, and loaded on the ranks."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.conftest import only
from tests.unit.own_task import LINE
from training import tasks
from training.config.schema import FIELDS, Config
from training.core.errors import Problem
from training.tasks import custom
from training.tasks.base import Task
from training.tasks.video_restoration.options import NAME as VIDEO

Write = Callable[..., str]
CPU = torch.device("cpu")


def refused(path: str) -> Problem:
    """The problem of an invalid task; gpt is used then."""
    kind, problems = tasks.find(path, "from --task on the command line")
    assert kind == tasks.DEFAULT == tasks.BUILT_IN["gpt"]
    return only(problems)


# ── finding a task
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_gpt_keeps_its_original_fields() -> None:
    kind, problems = tasks.find("gpt", "default")
    assert (problems, kind.unit, kind.file, kind.fields) == ([], "tokens", None, FIELDS)
    assert kind.record({}) == {"name": "gpt", "unit": "tokens", "file": None, "options": {}}


def test_a_plan_from_before_there_were_tasks_is_of_gpt() -> None:
    assert tasks.task_of({"config": {"depth": 3}}) == tasks.BUILT_IN["gpt"].record({})
    own = {"task": {"name": "line", "file": "/x/line.py", "options": {}}}
    assert tasks.spec_of({"config": {}}).reads_text and not tasks.spec_of(own).reads_text


def test_the_other_built_in_task() -> None:
    kind, problems = tasks.find(VIDEO, "default")
    assert (problems, kind.name, kind.unit, kind.file) == ([], VIDEO, "samples", None)
    assert (
        kind.own
        and set(kind.own) <= set(kind.fields)
        and "depth" not in kind.fields
        and "seed" in kind.fields
    )


def test_a_file_has_its_own_options_and_the_common_fields(home: Path, line: str) -> None:
    kind, problems = tasks.find(line, "default")
    assert (problems, kind.name, kind.unit, kind.file) == ([], "my line", "samples", home / line)
    assert {n: (f.type, f.default) for n, f in kind.own.items()} == {
        "width": ("int", 3),
        "slope": ("float", 0.5),
        "bias": ("bool", True),
        "title": ("str", "a line"),
    }
    assert {"width", "seed", "device_batch_size", "task"} <= set(kind.fields) and not {
        "depth",
        "data",
        "optimizer",
    } & set(kind.fields)
    assert not (home / f"{line}.ran").exists(), "a file is run only on the ranks"


def test_an_option_may_have_the_name_of_a_gpt_field(write: Write) -> None:
    kind, problems = tasks.find(
        write(
            "t.py", f"OPTIONS = {{'depth': 'deep', 'data': 3}}\n{LINE.replace('OPTIONS', 'OTHER')}"
        ),
        "default",
    )
    assert problems == [] and (kind.fields["depth"].type, kind.fields["data"].type) == (
        "str",
        "int",
    )


@pytest.mark.parametrize(
    "text",
    [
        "OPTIONS: dict[str, float] = {'rate': -1.5}\n",
        "OPTIONS = {\n    'rate': -1.5,  # a comment\n}\n",
    ],
)
def test_options_may_be_written_in_several_ways(text: str, write: Write) -> None:
    kind, problems = tasks.find(
        write("t.py", f"{text}class My(Task): model = train_data = loss = 0\n"), "default"
    )
    assert problems == [] and kind.own["rate"].default == -1.5


def test_a_task_without_options(write: Write) -> None:
    kind, problems = tasks.find(
        write("t.py", "class My(Task): model = train_data = loss = 0\n"), "default"
    )
    assert (problems, kind.own, kind.name) == ([], {}, "t")


# ── errors
# ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("typed", "near"), [("gtp", "gpt"), ("video_restauration", VIDEO)])
def test_the_nearest_name_is_suggested(typed: str, near: str) -> None:
    problem = refused(typed)
    assert problem.what == f"task is {typed!r} (from --task on the command line): unknown task"
    assert problem.allowed == f"gpt, {VIDEO}, or a .py file" and problem.fixes == [f"--task={near}"]


def test_an_existing_file_is_suggested(home: Path, line: str) -> None:
    problem = refused("my_line.py")
    assert (
        problem.what
        == "task is 'my_line.py' (from --task on the command line): cannot be read: No such file "
        "or directory"
    )
    assert problem.fixes == ["--task='my line.py'"]
    assert refused("no folder/my_line.py").fixes == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class My(Task)\n    pass\n", "t.py:1: expected ':': 'class My(Task)'"),
        (
            "x = 1\nclass My:\n    pass\n",
            "task is 't.py' (from --task on the command line): the file has no Task class",
        ),
        (
            "from torch import nn\nclass My(object):\n    pass\nclass Net(nn.Module): ...\n"
            "class Deep(Net): ...\n",
            "task is 't.py' (from --task on the command line): the file has no Task class",
        ),
        (
            "from torch.utils.data import Dataset\nclass D(Dataset): ...\nclass My(Task):\n    def "
            "model(self): ...\n",
            "t.py:3: class My lacks train_data, loss",
        ),
        (
            "import os\nOPTIONS = {'a': os.sep}\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:2: OPTIONS cannot be read without running the file",
        ),
        (
            "OPTIONS = dict(a=1)\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: OPTIONS cannot be read without running the file",
        ),
        (
            "OPTIONS = ['a']\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: OPTIONS cannot be read without running the file",
        ),
        (
            "OPTIONS: dict\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: OPTIONS cannot be read without running the file",
        ),
        (
            "OPTIONS = {'seed': 1}\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: option 'seed' of OPTIONS is the name of a common field",
        ),
        (
            "OPTIONS = {'task': 'x'}\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: option 'task' of OPTIONS is the name of a common field",
        ),
        (
            "OPTIONS = {'lang': 'de'}\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: option 'lang' of OPTIONS is the name of a common field",
        ),
        (
            "OPTIONS = {'config': 'x'}\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: option 'config' of OPTIONS is the name of a common field",
        ),
        (
            "OPTIONS = {'opt': 'x'}\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: option 'opt' of OPTIONS is the name of a common field",
        ),
        (
            "OPTIONS = {'sizes': [1, 2]}\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: option 'sizes' of OPTIONS has type list",
        ),
        (
            "OPTIONS = {'cap': 1e999}\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: option 'cap' of OPTIONS is inf, not a finite number",
        ),
        (
            "OPTIONS = {'size': None}\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: option 'size' of OPTIONS has type NoneType",
        ),
        (
            "OPTIONS = {'a-b': 1}\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: option 'a-b' of OPTIONS is not a valid name",
        ),
        (
            "OPTIONS = {'lambda': 1}\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: option 'lambda' of OPTIONS is not a valid name",
        ),
        (
            "OPTIONS = {3: 1}\nclass My(Task): model = train_data = loss = 0\n",
            "t.py:1: option 3 of OPTIONS is not a valid name",
        ),
    ],
)
def test_problems_of_a_file_are_reported_with_their_line(
    text: str, message: str, write: Write
) -> None:
    problem = refused(write("t.py", text))
    assert problem.what == message and problem.allowed


def test_all_invalid_options_are_reported_at_once(write: Write) -> None:
    _, problems = tasks.find(
        write(
            "t.py",
            "OPTIONS = {'seed': 1, 'good': 1, 'sizes': (1, 2)}\nclass My(Task): model = train_data "
            "= loss = 0\n",
        ),
        "default",
    )
    assert [p.what.split("'")[1] for p in problems] == ["seed", "sizes"]


@pytest.mark.parametrize(
    "text", [b"\xff\xfe\x00bad", b"class My(Task):\n    x = '\x00'\n", b"x = " + b"(" * 5000]
)
def test_a_file_that_is_not_python(text: bytes, write: Write) -> None:
    assert "t.py" in refused(write("t.py", text)).what


def test_a_folder_is_not_a_task(home: Path) -> None:
    (home / "t.py").mkdir()
    assert "cannot be read: Is a directory" in refused("t.py").what


@pytest.mark.parametrize("name", ["gpt", VIDEO])
def test_a_file_may_not_have_the_name_of_a_built_in_task(name: str, write: Write) -> None:
    """Plans, checkpoints and messages identify a task by its name."""
    problem = refused(write(f"{name}.py", LINE))
    assert f"{name}.py" in problem.what and "another name" in problem.allowed


@pytest.mark.parametrize("name", ["training", "random", "torch"])
def test_a_file_may_not_hide_a_module(name: str, write: Write) -> None:
    problem = refused(write(f"{name}.py", LINE))
    assert problem.code == "task.name_taken" and name in problem.what


# ── the class
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_can_import_modules_beside_it(home: Path, line: str, imports: None) -> None:
    made = custom.load(
        home / line, {"width": 4, "slope": 0.5, "bias": False, "title": ""}, Config(), CPU
    )
    assert (
        type(made).__name__ == "Line"
        and isinstance(made, Task)
        and (made.options.width, made.device) == (4, CPU)
    )
    model = made.model()
    assert isinstance(model, nn.Linear) and (model.in_features, model.bias) == (4, None)
    rows = made.rows("train")
    assert rows is not None and len(rows) == 12 and made.rows("val") is None
    batch = made.arrive(rows.rows([3, 5]))
    assert made.count(batch) == 2 and torch.equal(batch[1], 2 * batch[0].sum(1))
    assert made.loss(model, batch).shape == ()
    assert made.metrics(model, batch)["loss"].shape == (2,)
    assert made.optimizer(model).param_groups[0]["lr"] == 1e-3
    made.options.lr = 0.5
    assert made.optimizer(model).param_groups[0]["lr"] == 0.5
    assert inspect.getfile(type(made)) == str(home / line)


def test_a_plan_makes_its_task(home: Path, line: str, imports: None) -> None:
    plan = {
        "config": {"task": line, "seed": 4},
        "task": custom.CustomSpec("my line", {}, home / line).record({"width": 2, "bias": True}),
    }
    made = tasks.make(plan, CPU, None)
    assert (type(made).__name__, made.options.width, made.config.seed) == ("Line", 2, 4)


def test_missing_methods_found_before_the_start_are_those_a_task_needs(write: Write) -> None:
    assert set(custom.REQUIRED) == Task.__abstractmethods__
    for text in (
        "from mine import Base\nclass My(Base): ...\n",  # known only when it runs
        "class Half(Task):\n    def model(self): ...\nclass Whole(Half):\n    train_data = loss = "
        "model = 0\n",
    ):
        assert tasks.find(write("t.py", text), "default")[1] == []


def test_an_incomplete_class_is_named(home: Path, write: Write, imports: None) -> None:
    text = "from training.tasks.base import Task\nclass Half(Task):\n    def model(self): ...\n"
    path = home / write("lacking.py", text)
    with pytest.raises(
        TypeError, match="has no class that is a complete Task: Half lacks loss, train_data"
    ) as caught:
        custom.load(path, {}, Config(), CPU)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno, last.name) == (str(path), 2, "Half")

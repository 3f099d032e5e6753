"""Code outside `training/tasks/` has no task names: it uses the spec of a plan's task
(training.tasks.spec)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.unit.conftest import ROOT
from tests.unit.test_rooms import FILES, imports
from training import tasks

# The default of the field `task` is in the schema, like all defaults.
THE_DEFAULT = ("training.config.schema", tasks.DEFAULT.name)
PACKAGES = {name for name in tasks.BUILT_IN if f"training.tasks.{name}" in FILES}
NAMES = {*tasks.BUILT_IN, "video"}


def outside(module: str) -> bool:
    return not module.startswith("training.tasks")


def names_in(path: Path) -> Iterator[tuple[str, int]]:
    """Literals that are exactly the name of a task; help texts and comments may mention one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and node.value in tasks.BUILT_IN:
            yield str(node.value), node.lineno


def test_each_built_in_task_has_a_folder() -> None:
    assert set(tasks.BUILT_IN) == PACKAGES == {"gpt", "video_restoration"}


def test_only_the_tasks_package_imports_from_a_task() -> None:
    own = [f"training.tasks.{name}" for name in PACKAGES]
    wrong = [
        f"{FILES[module]}:{line} imports {other}"
        for module in FILES
        if outside(module)
        for other, line in imports(module)
        if any(other == package or other.startswith(f"{package}.") for package in own)
    ]
    assert wrong == []


def test_no_literal_outside_is_a_task_name() -> None:
    found = [
        (module, name, line)
        for module in FILES
        if outside(module)
        for name, line in names_in(FILES[module])
    ]
    assert [(module, name) for module, name, _ in found] == [THE_DEFAULT], found


def test_no_name_constant_is_used_outside() -> None:
    """`tasks.GPT` would be the same knowledge by another name."""
    wrong = [
        f"{FILES[module]}:{node.lineno}"
        for module in FILES
        if outside(module)
        for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr.lower() in NAMES)
        or (
            isinstance(node, ast.ImportFrom)
            and NAMES & {alias.name.lower() for alias in node.names}
        )
    ]
    assert wrong == []


def test_the_search_finds_task_names(tmp_path: Path) -> None:
    path = tmp_path / "leak.py"
    path.write_text(
        'import x\n"""gpt is not the whole of this text"""\nif x.name == "video_restoration":\n    '
        'kind = {"gpt": 1}\n'
    )
    assert list(names_in(path)) == [("video_restoration", 3), ("gpt", 4)]
    assert FILES["training.tasks.gpt.spec"] == (ROOT / "training/tasks/gpt/spec.py") and dict(
        names_in(FILES["training.tasks.gpt.spec"])
    )

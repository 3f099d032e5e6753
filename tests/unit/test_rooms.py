"""The rooms of the house: what there is, who imports whom, and that the documentation shows the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.unit.conftest import ROOT

ROOMS = ["core", "config", "host", "data", "tasks", "inspector", "diagnose", "plan", "trainer", "watchdog", "launcher", "monitor", "cli"]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in (ROOT / "training").rglob("*.py")
}


def imports(module: str) -> Iterator[tuple[str, int]]:
    """Modules of ours that a module imports, at any depth, with the line; not those that only type checkers see."""
    path = FILES[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = {
        id(n) for test in ast.walk(tree) if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.dump(test.test) for n in ast.walk(test)
    }
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if id(node) in types:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                found = f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base
                if found in FILES and found != module:
                    yield found, node.lineno


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_each_entry_is_a_package_that_says_what_belongs_there() -> None:
    entries = sorted(p.name for p in (ROOT / "training").iterdir() if p.name not in ("__init__.py", "__pycache__"))
    assert entries == sorted(ROOMS)
    assert [r for r in ROOMS if not ast.get_docstring(ast.parse(FILES[f"training.{r}"].read_text(encoding="utf-8")))] == []


def test_imports_go_up_the_list_only() -> None:
    at = {name: i for i, name in enumerate(ROOMS)}
    wrong = [
        f"{FILES[module]}:{line} imports {other}"
        for module in FILES
        for other, line in imports(module)
        if room(module) and room(other) and at[room(other)] > at[room(module)]
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    # A package's own file may be imported by what is in it: `training` itself holds nothing but its version.
    graph = {module: {other for other, _ in imports(module) if other != "training"} for module in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {error.args[1]}")


def test_the_inspector_imports_nothing_else_of_ours() -> None:
    """It also runs where `training` is somebody else's package (lib/run_script.py); the helpers of a rank do not."""
    own = [m for m in FILES if room(m) == "inspector" and m != "training.inspector.distributed"]
    assert {other for module in own for other, _ in imports(module) if room(other) not in ("inspector", "")} == set()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_documentation_shows_the_same_rooms(page: str) -> None:
    text = Path(ROOT / page).read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)/` \|", text.partition("| room |")[2], re.MULTILINE) == ROOMS

"""The codes in the source, in training.core.codes and in docs/codes.md are the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from training.core import codes, failure_kinds, problem_codes
from training.core.contracts import kinds
from training.watchdog import hang_report

ROOT = Path(__file__).parents[2]
# A forwarded problem keeps its code; a failed check has its own.
PASSED_ON = {"problem.code", "p.code", "self.code", "check.code", "one['code']"}
CALLS = [
    (path, node)
    for path in sorted((ROOT / "training").rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Call)
]


def name_of(call: ast.Call) -> str:
    return (
        call.func.attr
        if isinstance(call.func, ast.Attribute)
        else call.func.id
        if isinstance(call.func, ast.Name)
        else ""
    )


def first_arguments(function: str) -> Iterator[tuple[Path, ast.expr]]:
    return ((path, call.args[0]) for path, call in CALLS if name_of(call) == function and call.args)


def test_problems() -> None:
    used = set()
    for path, code in first_arguments("Problem"):
        if isinstance(code, ast.Constant):
            used.add(code.value)
        else:
            assert ast.unparse(code) in PASSED_ON, (
                f"{path}:{code.lineno}: the code of a Problem is a literal"
            )
    shell = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "lib").glob("*.sh"))
    used |= set(re.findall(r"messages::refuse(?:_as_json)? ([a-z_]+\.[a-z_]+)", shell))
    assert used == set(problem_codes.PROBLEMS)


def test_events() -> None:
    used = {code.value for _, code in first_arguments("event") if isinstance(code, ast.Constant)}
    used |= {code.value for _, code in first_arguments("_event") if isinstance(code, ast.Constant)}
    assert used == set(codes.EVENTS)


def test_every_warning_event_has_a_code() -> None:
    for path, call in CALLS:
        if (
            name_of(call) in ("event", "_event")
            and call.args
            and ast.unparse(call.args[0]) == "'warning'"
        ):
            assert "code" in {k.arg for k in call.keywords}, f"{path}:{call.lineno}"
    used = {
        node.value
        for path in (ROOT / "training").rglob("*.py")
        if path.name != "codes.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("warning.")
    }
    assert used == set(codes.WARNINGS)


def test_alerts() -> None:
    used = {
        f"alert.{code.value}"
        for _, code in first_arguments("_alert")
        if isinstance(code, ast.Constant)
    }
    full = {f"alert.{name}_full" for name in ("ram", "shm", "disk")}
    assert used | full == set(codes.ALERTS)


def test_verdicts() -> None:
    words = [*vars(hang_report).items(), *vars(failure_kinds).items()]
    used = {value for name, value in words if name.isupper() and isinstance(value, str)}
    used |= {*get_args(kinds.ExitKind)}
    assert used == set(codes.VERDICTS)


def test_a_check_has_a_code() -> None:
    names = {
        "GPU 0 state": "gpu_state",
        "W&B": "wandb",
        "/dev/shm": "shm",
        "memory of a step": "memory_of_a_step",
    }
    assert {name: codes.of_check(name) for name in names} == names


def test_the_documentation_has_the_tables() -> None:
    text = (ROOT / "docs/codes.md").read_text(encoding="utf-8")
    assert "\n".join(codes.table()) in text, (
        "regenerate it: python lib/run_module.py training.core.codes"
    )

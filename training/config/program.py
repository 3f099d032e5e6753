"""Detection of a program passed as a config, to report one problem instead of one per line."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

CONFIG, PROGRAM, TASK = "config", "program", "task"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
STEPS = (ast.For, ast.While, ast.With, ast.Try)


def kind(path: Path, fields: Iterable[str]) -> str:
    """CONFIG, PROGRAM or TASK. Unreadable files and invalid Python are CONFIG: the config reader
    reports the reason. `fields`: names that a config may assign."""
    try:
        body = ast.parse(path.read_bytes()).body if path.suffix == ".py" else []
    except (OSError, SyntaxError, ValueError, RecursionError):
        return CONFIG
    if any(
        isinstance(one, ast.ClassDef) and any(_name(base) == "Task" for base in one.bases)
        for one in body
    ):
        return TASK
    if any(isinstance(one, ast.If) and "__name__" in _names(one.test) for one in body):
        return PROGRAM
    known = set(fields)
    settings = sum(
        isinstance(one, (ast.Assign, ast.AnnAssign)) and bool(_names(one) & known) for one in body
    )
    definitions = sum(isinstance(one, DEFINITIONS) for one in body)
    steps = sum(isinstance(one, STEPS) or _is_call(one) for one in body)
    imports = sum(isinstance(one, (ast.Import, ast.ImportFrom)) for one in body)
    does = definitions + (steps if imports or not settings else 0)
    return PROGRAM if does > settings or (does and imports > settings) else CONFIG


def _name(base: ast.expr) -> str:
    return (
        base.attr
        if isinstance(base, ast.Attribute)
        else base.id
        if isinstance(base, ast.Name)
        else ""
    )


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _is_call(one: ast.stmt) -> bool:
    return isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)

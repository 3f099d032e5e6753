"""Stable exit codes, and the text of a problem."""

from __future__ import annotations

import ast

from tests.unit.conftest import ROOT
from training.core.errors import EXIT_MEANING, RANK_DISK_FULL, RANK_FAILED, Exit, Problem, UserError


def test_the_exit_codes_are_fixed() -> None:
    assert {e.name: e.value for e in Exit} == {
        "DONE": 0,
        "CONFIG": 2,
        "RESOURCES": 3,
        "TRAINING": 4,
        "HANG": 5,
        "LEFT": 6,
        "PREEMPTED": 75,
        "INTERRUPTED": 130,
    }
    assert set(EXIT_MEANING) == set(Exit)
    # Statuses of a rank, distinct from Duet's exit codes.
    assert (RANK_FAILED, RANK_DISK_FULL) == (1, 74)
    assert not {RANK_FAILED, RANK_DISK_FULL} & set(Exit)
    assert all(EXIT_MEANING.values())


def test_a_problem_has_allowed_values_and_fixes() -> None:
    assert Problem("field.value", "depth is 0", "from 1", ["first", "second", "third"]).lines() == [
        "depth is 0",
        "    allowed: from 1",
        "    try:     first",
        "    or:      second",
        "    or:      third",
    ]
    assert Problem("field.value", "depth is 0").lines() == ["depth is 0"]


def test_one_problem_or_many_with_their_exit_code() -> None:
    one, two = Problem("a.a", "a"), Problem("b.b", "b")
    assert UserError(one).problems == [one]
    assert UserError(one).code == Exit.CONFIG
    both = UserError([one, two], Exit.RESOURCES)
    assert both.problems == [one, two]
    assert both.code == Exit.RESOURCES
    assert str(both) == "a; b"


def test_the_module_imports_only_the_messages() -> None:
    tree = ast.parse((ROOT / "training/core/errors.py").read_text())
    modules = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    modules += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert [m for m in modules if m.startswith("training")] == ["training.core.messages"]

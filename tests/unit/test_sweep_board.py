"""The live table of a sweep on a terminal that rewraps or cuts its rows when it is resized."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import each
from training.cli.sweep.board import Board
from training.core.cells import cells
from training.core.plain_text import without_escapes
from training.core.sweep_dir import SweepDir


class Rewrapping:
    """What the board writes to a terminal; `rows`: of the last table at a width."""

    def __init__(self) -> None:
        self.width, self.written = 80, ""

    def rows(self) -> int:
        count = 0
        for line in without_escapes(self.written).strip("\r").splitlines():
            used = 0
            for c in line:
                count += used + cells(c) > self.width
                used = cells(c) if used + cells(c) > self.width else used + cells(c)
            count += 1
        return count

    def up(self) -> int:
        found = re.search(r"\x1b\[(\d+)A", self.written)
        return int(found[1]) if found else 0


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Rewrapping:
    seen = Rewrapping()
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("TMUX", "STY", "XTERM_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((seen.width, 24)))
    monkeypatch.setattr("training.cli.sweep.board.REDRAWN_S", 0.0)
    return seen


@pytest.fixture
def board(tmp_path: Path, terminal: Rewrapping, monkeypatch: pytest.MonkeyPatch) -> Board:
    values = {"depth": 2, "data": "a_long_name_of_a_text", "run": "名字" * 9}
    runs = [{"name": f"s1_{i}", "values": {**values, "seed": i}} for i in range(4)]
    sweep: Any = SimpleNamespace(folder=SweepDir(tmp_path, "s1"), record={"runs": runs}, jobs=1)
    made = Board(sweep, ascii_only=False)
    made.live = True

    def write(text: str) -> None:
        terminal.written = text

    monkeypatch.setattr(made, "_write", write)
    return made


def test_a_narrower_terminal_keeps_nothing_of_the_old_table(
    board: Board, terminal: Rewrapping
) -> None:
    """The rows that are left of it are those of the old table at the new width."""
    waiting = ["waiting"] * 4
    board.refresh(waiting)
    assert terminal.up() == 0 and terminal.rows() == 6
    for width in (60, 25, 9, 80):
        terminal.width = width
        there = terminal.rows()
        board.refresh(waiting)
        assert terminal.up() == there, width
    terminal.width = 40
    there = terminal.rows()
    board.clear()
    assert terminal.up() == there > 6
    board.clear()
    board.refresh(waiting)
    assert terminal.up() == 0


@each(
    ("variables", "cuts"),
    [
        ({"XTERM_VERSION": "XTerm(390)"}, True),
        ({"XTERM_VERSION": "XTerm(390)", "TMUX": "/tmp/tmux"}, False),
        ({"XTERM_VERSION": "XTerm(390)", "STY": "7.pts-0"}, False),
        ({"TERM": "putty-256color"}, True),
        ({"TERM": "st-256color"}, True),
        ({"TERM": "xterm-kitty"}, False),
    ],
)
def test_a_narrower_terminal_keeps_the_errors_above_the_table(
    variables: dict[str, str],
    cuts: bool,
    board: Board,
    terminal: Rewrapping,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal.width = 80
    board.refresh(["waiting"] * 4)
    terminal.width = 40
    whole, wrapped = len(board._drawn), terminal.rows()
    board.clear()
    assert wrapped > whole and terminal.up() == (whole if cuts else wrapped)

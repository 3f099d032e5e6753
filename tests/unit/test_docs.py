"""Pages of docs/: links, first lines, index, and the tables that are generated."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import each
from tests.conftest import ROOT
from training.config import flags
from training.plan import request

PAGES = sorted((ROOT / "docs").rglob("*.md"))
ALL = [*ROOT.glob("*.md"), *PAGES]
INDEX = ROOT / "docs/README.md"
# The first line under the title: who needs the page, and when.
AUDIENCE = re.compile(r"\A# .+\n\n(For |\*\*For )")

# Commands of the launch scripts without names that the reader fills in.
COMMANDS = [
    (page.name, script, command)
    for page in ALL
    for script, command in re.findall(
        r"(?:^ {4}|^|[`$] ?(?:\w+=\S+ )?)\./((?:launch_train|train_dual_gpu(?:_enhanced)?)\.sh)([^`|\n]*)",
        page.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    if not re.search(r"…|\[|\bCONFIG\b|\bN\b|^$|==", command)
]
# Needs an earlier run, a program, a config or data that the repository does not contain.
ABSENT = re.compile(
    r"--(resume|init_from|script|inject=list|help)\b|\b(my_\w+|small\.py|next\.py|main\.py)"
    r"|options/vrt/|configs/video/"
)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each("page", ALL, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


@each("page", [p for p in PAGES if p != INDEX], ids=lambda page: page.name)
def test_the_first_line_names_the_reader(page: Path) -> None:
    assert AUDIENCE.match(page.read_text(encoding="utf-8"))


@each("page, script, command", COMMANDS)
def test_launch_commands_have_known_flags(page: str, script: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    own = words[: words.index("--")] if "--" in words else words
    found = flags.parse([w for w in own if not w.startswith(("--width", "--points"))])
    assert not found.problems, page


@each("page, script, command", [one for one in COMMANDS if not ABSENT.search(one[2])])
def test_launch_commands_are_accepted(
    page: str, script: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that is checked before the machine is examined; nothing is written."""
    monkeypatch.chdir(ROOT)
    found = request.read(script, shlex.split(command, comments=True), {})
    assert found.ranks, page


def test_the_index_has_every_page_once() -> None:
    listed = re.findall(r"^\| \[[^]]+\]\(([^)#]+\.md)\) \|", INDEX.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(p.relative_to(INDEX.parent)) for p in PAGES if p != INDEX)


def test_generated_tables_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "docs/tables.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

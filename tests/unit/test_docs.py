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
from training.cli import __main__ as duet
from training.cli import commands
from training.config import flags
from training.core.contracts.state import HealthRecord
from training.core.contracts.verdict import DiagnosisRecord
from training.plan import request

PAGES = sorted((ROOT / "docs").rglob("*.md"))
ALL = [*ROOT.glob("*.md"), *PAGES]
INDEX = ROOT / "docs/README.md"
# The first line under the title: who needs the page, and when.
AUDIENCE = re.compile(r"\A# .+\n\n(For |\*\*For )")

# Pages, and helps with examples of trainings.
TEXTS = [
    *((page.name, page.read_text(encoding="utf-8")) for page in ALL),
    *((s.name, re.sub("^# ?", "", s.read_text("utf-8"), flags=re.M)) for s in ROOT.glob("*.sh")),
    ("./duet help", duet.EXAMPLES),
    ("./duet doctor --help", duet.DOCTOR_HELP),
]
# Commands of the launch scripts without names that the reader fills in, and without what follows:
# an explanation, a file for the output.
COMMANDS = [
    (where, command, re.split(r" {2}| [>#]", rest)[0])
    for where, text in TEXTS
    for command, rest in re.findall(
        r"(?:^ {2,4}|^|[`$] ?(?:\w+=\S+ )?)\./((?:launch_train|train_dual_gpu(?:_enhanced)?)\.sh"
        r"|duet (?:launch|train|train-enhanced|doctor)(?= ))([^`|\n]*)",
        text,
        re.MULTILINE,
    )
    if not re.search(r"…|\[|\bCONFIG\b|\bN\b|^$|==", rest)
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


def started(command: str, words: str) -> tuple[str, list[str]]:
    """The script that a command starts, and its arguments."""
    first: tuple[str, ...] = ()
    if command.startswith("duet "):
        known = commands.COMMANDS[command.removeprefix("duet ")]
        command, first = known.script, known.first
    return command, [*first, *shlex.split(words)]


@each("where, command, words", COMMANDS)
def test_launch_commands_have_known_flags(where: str, command: str, words: str) -> None:
    _, given = started(command, words)
    own = given[: given.index("--")] if "--" in given else given
    found = flags.parse([w for w in own if not w.startswith(("--width", "--points"))])
    assert not found.problems, where


@each("where, command, words", [one for one in COMMANDS if not ABSENT.search(one[2])])
def test_launch_commands_are_accepted(
    where: str, command: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that is checked before the machine is examined; nothing is written."""
    monkeypatch.chdir(ROOT)
    script, given = started(command, words)
    assert request.read(script, given, {}).ranks, where


def test_the_index_has_every_page_once() -> None:
    listed = re.findall(r"^\| \[[^]]+\]\(([^)#]+\.md)\) \|", INDEX.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(p.relative_to(INDEX.parent)) for p in PAGES if p != INDEX)


@each("page, record", [("diagnosis.md", DiagnosisRecord), ("inspect.md", HealthRecord)])
def test_json_output_is_described(page: str, record: type) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (section,) = re.findall(r"^## JSON\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert set(record.__annotations__) - set(re.findall(r"`(\w+)`", section)) == set()


def test_generated_tables_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "docs/tables.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

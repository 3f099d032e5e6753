"""README.md and README.zh-CN.md against the code: tables, links, commands, and each other."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from tests.cases import each
from tests.conftest import ROOT
from training.config import flags, loader
from training.core.errors import Exit
from training.plan.cli_args import SCRIPTS

PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")
}
ENGLISH, CHINESE = PAGES.values()
WORDS = 1200  # length of the English page, about


def commands(page: str) -> list[str]:
    """Lines of the bash blocks, without comments."""
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    lines = (line.partition(" #")[0].strip() for line in blocks.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def shape(page: str) -> list[str]:
    """What both languages share: level of headings, links, code blocks without their comments."""
    lines = []
    for line in re.sub(r"README(\.zh-CN)?\.md", "README", page).splitlines():
        if heading := re.match(r"#+ ", line):
            lines.append(heading[0])
        lines += re.findall(r"\]\(([^)]+)\)", line)
    return lines


def test_both_languages_have_the_same_commands() -> None:
    assert len(commands(ENGLISH)) > 12
    assert commands(ENGLISH) == commands(CHINESE)


def test_both_languages_have_the_same_structure() -> None:
    assert shape(ENGLISH) == shape(CHINESE)


def test_length() -> None:
    assert len(ENGLISH.split()) <= WORDS


@pytest.mark.parametrize("page", PAGES)
def test_exit_codes(page: str) -> None:
    assert re.findall(r"^\| (\d+) \|", PAGES[page], re.MULTILINE) == [str(int(c)) for c in Exit]


@pytest.mark.parametrize("page", PAGES)
def test_configs(page: str) -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", PAGES[page], re.MULTILINE
    )
    assert {row[0] for row in rows} == {
        p.stem for p in (ROOT / "configs/dual_gpu").glob("[a-z]*.py")
    }
    for name, *shown in rows:
        values, _ = loader.load(ROOT / f"configs/dual_gpu/{name}.py")
        fields = ("depth", "device_batch_size", "total_batch_size", "max_seq_len")
        assert [int(number) for number in shown] == [values[field][0] for field in fields]


@each("command", [c for c in commands(ENGLISH) if c.split()[0].removeprefix("./") in SCRIPTS])
def test_flags_of_a_launch_script(command: str) -> None:
    _, *words = shlex.split(command)
    own = words[: words.index("--")] if "--" in words else words
    assert not flags.parse(own).problems
    if "--script" not in own:
        assert all(
            (ROOT / word).exists() for word in own if word.endswith(".py") and word[0] != "-"
        )


@each(
    "command", [c for c in commands(ENGLISH) if c.split()[0] in ("./duet", "./monitor_training.sh")]
)
def test_flags_of_another_command(command: str) -> None:
    """tests/e2e/test_readme_commands.py runs them."""
    words = shlex.split(command)
    program = words[: 2 if words[0] == "./duet" else 1]
    done = subprocess.run(
        [*program, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    for word in words[len(program) :]:
        assert word.partition("=")[0] in done.stdout if word.startswith("--") else True

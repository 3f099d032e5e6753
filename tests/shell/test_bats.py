"""Every .bats test here as a pytest test: one run of bats per file, and one for its slow tests, the
results reported one by one."""

from __future__ import annotations

import os
import re
import subprocess
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT, TOKEN

HERE = Path(__file__).parent
BATS = ROOT / ".tools/bats"
TIME_LIMIT_S = 600  # of a file; busy cores take three times as long
pytestmark = pytest.mark.timeout(TIME_LIMIT_S)


def named(file: Path) -> list[tuple[str, bool]]:
    """The tests of a file, as bats will call them (`\\$` and `\\"` in a name are escapes), and whether
    each is slow."""
    tests = r'^(# bats test_tags=slow\n)?@test "(.*)" \{$'
    found = re.findall(tests, file.read_text(encoding="utf-8"), re.MULTILINE)
    return [(re.sub(r"\\(.)", r"\1", name), bool(tag)) for tag, name in found]


CASES = [
    pytest.param(
        file, name, slow, id=f"{file.name}: {name}", marks=[pytest.mark.slow] if slow else []
    )
    for file in sorted(HERE.glob("*.bats"))
    for name, slow in named(file)
]


@cache
def verdicts(file: Path, slow: bool, token: str) -> dict[str, ET.Element]:
    """Run a file; the JUnit record of each test by its name."""
    if not BATS.exists():
        pytest.fail("bats is missing: `make env` installs it")
    # The records go through a pipe, so that no file is left.
    done = subprocess.run(
        [BATS, "--formatter", "junit", "--filter-tags", "slow" if slow else "!slow", file],
        capture_output=True,
        text=True,
        env=os.environ | {TOKEN: token},
        timeout=TIME_LIMIT_S,
        check=False,
    )
    try:
        return {case.attrib["name"]: case for case in ET.fromstring(done.stdout).iter("testcase")}
    except ET.ParseError:
        pytest.fail(f"bats gave no report (exit {done.returncode}):\n{done.stdout}\n{done.stderr}")


@pytest.mark.parametrize(("file", "name", "slow"), CASES)
def test_bats(file: Path, name: str, slow: bool, module_token: str) -> None:
    case = verdicts(file, slow, module_token).get(name)
    assert case is not None, (
        f"bats did not run this test; it ran: {sorted(verdicts(file, slow, module_token))}"
    )
    if (skipped := case.find("skipped")) is not None:
        pytest.skip(skipped.text or "skipped by bats")
    if (failure := case.find("failure")) is not None:
        pytest.fail(failure.text or "failed without a word", pytrace=False)


def test_every_bats_file_was_read() -> None:
    for file in HERE.glob("*.bats"):
        assert (
            len(named(file))
            == len(re.findall(r"^@test", file.read_text(encoding="utf-8"), re.MULTILINE))
            > 0
        ), file

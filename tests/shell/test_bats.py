"""Every .bats test here as a pytest test: one run of bats per file, its results reported
one by one."""

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
TIME_LIMIT_S = 240


def names(file: Path) -> list[str]:
    """The tests of a file, as bats will call them: `\\$` and `\\"` in a name are escapes."""
    found = re.findall(r'^@test "(.*)" \{$', file.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"\\(.)", r"\1", name) for name in found]


CASES = [
    pytest.param(file, name, id=f"{file.name}: {name}")
    for file in sorted(HERE.glob("*.bats"))
    for name in names(file)
]


@cache
def verdicts(file: Path, token: str) -> dict[str, ET.Element]:
    """Run a file; the JUnit record of each test by its name."""
    if not BATS.exists():
        pytest.fail("bats is missing: `make env` installs it")
    # The records go through a pipe, so that no file is left.
    done = subprocess.run(
        [BATS, "--formatter", "junit", file],
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


@pytest.mark.parametrize(("file", "name"), CASES)
def test_bats(file: Path, name: str, module_token: str) -> None:
    case = verdicts(file, module_token).get(name)
    assert case is not None, (
        f"bats did not run this test; it ran: {sorted(verdicts(file, module_token))}"
    )
    if (skipped := case.find("skipped")) is not None:
        pytest.skip(skipped.text or "skipped by bats")
    if (failure := case.find("failure")) is not None:
        pytest.fail(failure.text or "failed without a word", pytrace=False)


def test_every_bats_file_was_read() -> None:
    for file in HERE.glob("*.bats"):
        assert (
            len(names(file))
            == len(re.findall(r"^@test", file.read_text(encoding="utf-8"), re.MULTILINE))
            > 0
        ), file

"""tests.cases.each: all cases are run, and each failing one is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cases import SHOWN, each


def test_each_reports_every_failing_case_with_its_reason() -> None:
    seen = []

    @each("number, half", [(2, 1), pytest.param(3, 1, id="odd"), (5, 2), (8, 4)])
    def halved(number: int, half: int) -> None:
        seen.append(number)
        assert number == 2 * half, f"{number} is not twice {half}"

    with pytest.raises(pytest.fail.Exception) as caught:
        halved()
    text = str(caught.value)
    assert seen == [2, 3, 5, 8]
    assert (
        text.startswith("2 of 4 cases failed\n") and "── 1: odd\n" in text and "── 2: 5-2\n" in text
    )
    assert "3 is not twice 1" in text and "5 is not twice 2" in text and "test_cases.py" in text


def test_each_shortens_the_reasons_of_many_failures() -> None:
    @each("number", range(3 * SHOWN))
    def failing(number: int) -> None:
        raise ValueError(f"reason {number}")

    with pytest.raises(pytest.fail.Exception) as caught:
        failing()
    text = str(caught.value)
    assert all(f"── {number}: {number}" in text for number in range(3 * SHOWN))
    assert "reason 0" in text and f"reason {3 * SHOWN - 1}" not in text


@each("name", ["first", "second"])
@each("value", ["1", "2"])
def test_each_case_has_its_own_folder_and_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    assert "DUET_CASE" not in os.environ and not list(tmp_path.iterdir())
    monkeypatch.setenv("DUET_CASE", value)
    (tmp_path / name).touch()


def test_each_rejects_empty_cases_and_unknown_names() -> None:
    with pytest.raises(AssertionError, match="no case"):
        each("number", [])
    with pytest.raises(AssertionError, match="does not take"):
        each("number", [1])(lambda first: None)

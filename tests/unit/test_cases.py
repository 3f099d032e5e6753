"""Many cases in one test: none is left out, and each that fails is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cases import SHOWN, each


def test_each_names_every_case_that_fails_with_its_reason() -> None:
    seen = []

    @each("number, half", [(2, 1), pytest.param(3, 1, id="odd"), (5, 2), (8, 4)])
    def halved(number: int, half: int) -> None:
        seen.append(number)
        assert number == 2 * half, f"{number} is not twice {half}"

    with pytest.raises(pytest.fail.Exception) as caught:
        halved()
    told = str(caught.value)
    assert seen == [2, 3, 5, 8]
    assert (
        told.startswith("2 of 4 cases failed\n") and "── 1: odd\n" in told and "── 2: 5-2\n" in told
    )
    assert "3 is not twice 1" in told and "5 is not twice 2" in told and "test_cases.py" in told


def test_each_cuts_the_reasons_of_many_failures_but_not_their_names() -> None:
    @each("number", range(3 * SHOWN))
    def failing(number: int) -> None:
        raise ValueError(f"reason {number}")

    with pytest.raises(pytest.fail.Exception) as caught:
        failing()
    told = str(caught.value)
    assert all(f"── {number}: {number}" in told for number in range(3 * SHOWN))
    assert "reason 0" in told and f"reason {3 * SHOWN - 1}" not in told


@each("name", ["first", "second"])
@each("value", ["1", "2"])
def test_each_case_has_a_folder_and_patches_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    assert "DUET_CASE" not in os.environ and not list(tmp_path.iterdir())
    monkeypatch.setenv("DUET_CASE", value)
    (tmp_path / name).touch()


def test_each_without_a_case_or_with_a_name_that_the_test_does_not_take_is_refused() -> None:
    with pytest.raises(AssertionError, match="no case"):
        each("number", [])
    with pytest.raises(AssertionError, match="does not take"):
        each("number", [1])(lambda first: None)

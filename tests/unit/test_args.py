"""Table-driven flag parser: spellings of flags, and the error for each mistake."""

from __future__ import annotations

import pytest

from training.core import args
from training.core.args import parse
from training.core.errors import Problem

FLAGS = {
    "count": args.whole(1, 9, 3),
    "every-s": args.seconds(0.5, 60, 10, bare=10.0),
    "kind": args.one_of("fast", "slow"),
    "out": args.TEXT,
    "quiet": args.SWITCH,
    "help": args.SWITCH,
}


@pytest.mark.parametrize(
    ("line", "values", "words"),
    [
        ("--count=3 --out=a=b x", {"count": 3, "out": "a=b"}, ["x"]),
        ("--count 3 --quiet x -", {"count": 3, "quiet": True}, ["x", "-"]),
        ("--every-s x", {"every_s": 10.0}, ["x"]),
        ("--every_s=0.5 -h", {"every_s": 0.5, "help": True}, []),
        ("--kind=slow --kind=slow", {"kind": "slow"}, []),
    ],
)
def test_accepted_spellings(line: str, values: dict[str, object], words: list[str]) -> None:
    found = parse(line.split(), FLAGS, "do")
    assert (found.values, found.words, found.problems) == (values, words, [])


@pytest.mark.parametrize(
    ("line", "code", "fixes"),
    [
        ("--count=10 x", "flag.value", ["do x --count=9"]),
        ("--count=x", "flag.value", ["do --count=3"]),
        ("--every-s=100", "flag.value", ["do --every-s=60"]),
        ("--every-s=nan", "flag.value", ["do --every-s=10"]),
        ("--kind=fats", "flag.value", ["do --kind=fast"]),
        ("--count", "flag.no_value", []),
        ("--count=", "flag.no_value", []),
        ("--quiet=yes", "flag.unexpected_value", ["do --quiet"]),
        ("--count=1 --count=2", "flag.twice", []),
        ("--cuont 4 x", "flag.unknown", ["do x --count=4"]),
        (
            "--count=10 --out=a&b --quiet --every-s x",
            "flag.value",
            ["do x --out='a&b' --quiet --every-s --count=9"],
        ),
        ("--cuont=4 --count=3 --kind=fast", "flag.unknown", ["do --kind=fast --count=4"]),
        ("--frobnicate", "flag.unknown", ["do --help"]),
        ("-q", "flag.unknown", ["do --help"]),
    ],
)
def test_errors_have_a_code_and_a_command(line: str, code: str, fixes: list[str]) -> None:
    (problem,) = parse(line.split(), FLAGS, "do").problems
    assert (problem.code, problem.fixes) == (code, fixes)


def test_suggestions_correct_each_other() -> None:
    first, second = parse(["--count=10", "--kind=fats"], FLAGS, "do").problems
    assert first.fixes == ["do --kind=fast --count=9"]
    assert second.fixes == ["do --count=9 --kind=fast"]


def test_a_word_in_quotes_stays_quoted() -> None:
    (problem,) = parse(["--quiet=yes", "two words"], FLAGS, "do").problems
    assert problem.fixes == ["do 'two words' --quiet"]


def test_all_problems_are_reported_and_valid_values_kept() -> None:
    found = parse(["--count=0", "--kind=x", "--out=here", "--nothing"], FLAGS, "do")
    assert [p.field for p in found.problems] == ["count", "kind", ""] and found.values[
        "out"
    ] == "here"


def test_foreign_flags_are_passed_through() -> None:
    found = parse(
        ["--lr=1", "--cuont=2", "x"], FLAGS, "do", lambda word: "count" if "cuont" in word else None
    )
    assert found.words == ["--lr=1", "x"] and [p.code for p in found.problems] == ["flag.unknown"]


def test_without_positionals_an_unknown_flag_consumes_its_value() -> None:
    found = parse(["--frobnicate", "7"], FLAGS, "do", positional=False)
    assert found.words == [] and [p.code for p in found.problems] == ["flag.unknown"]


def test_numbers_are_ascii_digits() -> None:
    assert [args.is_whole(text) for text in ("12", "²", "-1", "1.0", "", "9" * 20)] == [
        True,
        False,
        False,
        False,
        False,
        False,
    ]


def test_suggestions_of_flags_alone_become_the_users_command() -> None:
    flags = {"data": args.TEXT, "text-field": args.TEXT, "json": args.SWITCH}
    for argv, fix, whole in (
        (["a b", "--data=x"], "--data=y", "./duet it 'a b' --data=y"),
        (["--data", "x", "run", "--json"], "--data=y", "./duet it run --json --data=y"),
        (["run"], "--text_field=t", "./duet it run --text_field=t"),
        (["--text-field", "s", "--data=x"], "--text_field=t", "./duet it --data=x --text_field=t"),
        (["run"], "--other=1", "--other=1"),
        (["run"], "mkdir -p x", "mkdir -p x"),
        (["run"], "--data=the model's", "--data=the model's"),
    ):
        line = args.parse(argv, flags, "./duet it", positional=True)
        (problem,) = line.completed([Problem("c", "w", "", [fix])], flags)
        assert problem.fixes == [whole], argv

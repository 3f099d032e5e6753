"""Spellings of flags, and unknown names."""

from __future__ import annotations

import pytest

from tests.cases import each
from tests.unit.conftest import ENHANCED, SIMPLE, only, wrong
from training.config import meant
from training.config.flags import SWITCHES, CommandLine, parse
from training.config.resolve import resolve
from training.config.schema import FIELDS


def good(*argv: str) -> CommandLine:
    line = parse(list(argv))
    assert line.problems == []
    return line


def texts(*argv: str) -> dict[str, str]:
    return {name: text for name, (text, _) in good(*argv).flags.items()}


@pytest.mark.parametrize(
    "argv",
    [
        ["--max_seq_len=64"],
        ["--max-seq-len=64"],
        ["--max_seq_len", "64"],
        ["--max-seq-len", "64"],
        ["--max-seq_len", "64"],
    ],
)
def test_spellings_of_a_value(argv: list[str]) -> None:
    line = good(*argv)
    assert {n: t for n, (t, _) in line.flags.items()} == {"max_seq_len": "64"}
    assert line.flags["max_seq_len"][1] == argv[0].partition("=")[0]
    assert line.positional == []


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--persistent_workers"], "true"),
        (["--persistent-workers"], "true"),
        (["--no-persistent-workers"], "false"),
        (["--no_persistent_workers"], "false"),
        (["--no-persistent_workers"], "false"),
        (["--persistent_workers=false"], "false"),
        (["--persistent-workers=1"], "1"),
        (["--persistent_workers", "off"], "off"),
        (["--persistent_workers", "--depth=2"], "true"),
    ],
)
def test_spellings_of_a_switch(argv: list[str], text: str) -> None:
    assert texts(*argv)["persistent_workers"] == text


@each("word", ["true", "True", "yes", "on", "1"])
@each(("other", "value"), [("", True), ("not", False)])
def test_words_for_true_and_false(word: str, other: str, value: bool) -> None:
    opposite = {"true": "false", "True": "False", "yes": "no", "on": "off", "1": "0"}
    text = opposite[word] if other else word
    resolved = resolve(good(f"--debug={text}"), {}, {})
    assert resolved.problems == []
    assert resolved.config.debug is value


def test_a_switch_does_not_consume_the_config() -> None:
    line = good("--debug", "a.py")
    assert (line.positional, line.on("debug")) == (["a.py"], True)
    line = good("--dry_run", "2", "a.py")
    assert (line.positional, line.on("dry_run")) == (["2", "a.py"], True)


def test_a_switch_does_not_consume_the_number_of_processes() -> None:
    # ./launch_train.sh --dry_run 1 a.py
    line = good("--dry_run", "1", "a.py")
    assert (line.positional, line.on("dry_run")) == (["1", "a.py"], True)


def test_actions_are_off_by_default() -> None:
    assert not good().on("dry_run")
    assert good("--dry_run").on("dry_run")
    assert good("--dry-run").on("dry_run")
    assert not good("--dry_run=false").on("dry_run")
    assert "dry_run" in only(parse(["--dry_run=perhaps"]).problems).what


def test_positional_arguments_keep_their_order_among_flags() -> None:
    line = good("2", "--depth=3", "a b.py", "--", "c.py")
    assert line.positional == ["2", "a b.py", "c.py"]


def test_unusual_values_are_kept() -> None:
    assert texts("--data=a=b c\nd")["data"] == "a=b c\nd"
    assert texts("--run_name", "-x")["run_name"] == "-x"
    assert texts("--run_name=")["run_name"] == ""
    assert texts("--run_name=--x")["run_name"] == "--x"


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("--depht=12", "--depth=12"),
        ("--device_batchsize=8", "--device_batch_size=8"),
        ("--device-batchsize=8", "--device_batch_size=8"),
        ("--total_batch=8", "--total_batch_size=8"),
        ("--num_iteration=5", "--num_iterations=5"),
        ("--persistant_workers", "--persistent_workers=true"),
        ("--depth_=6", "--depth=6"),
        ("--dryrun", "--dry_run"),
    ],
)
def test_the_nearest_name_is_suggested_first(typed: str, fix: str) -> None:
    line = parse([typed])
    assert line.problems == [] and [one.typed for one in line.unknown] == [typed.partition("=")[0]]
    found = meant.name(line.unknown[0].name, line.unknown[0].text, FIELDS, actions=SWITCHES)
    assert meant.flags_of(found.changes[0]) == fix
    assert parse([fix]).unknown == []


@pytest.mark.parametrize(
    "typed",
    ["qqqqqq=1", "vocab=3", "block_siz=12", "n_heads=4", "dept=twelve", "seed_=first", "eval=x"],
)
def test_no_suggestion_without_a_similar_name_and_valid_value(typed: str) -> None:
    name, _, text = typed.partition("=")
    found = meant.name(name, text, FIELDS, actions=SWITCHES).changes
    assert not any("vocab_size" in changes or "depth" in changes for changes in found)
    assert not found or typed.startswith("block_siz")


def test_a_secret_is_not_repeated() -> None:
    assert meant.name("wandb_api_key", "abc", FIELDS).changes == ()


def test_unknown_flags_have_their_position() -> None:
    line = parse(["2", "--max_steps", "100", "c.py", "--fp16", "d.py", "-depth=3"])
    assert [(one.typed, one.text, one.start, one.stop) for one in line.unknown] == [
        ("--max_steps", "100", 1, 3),
        ("--fp16", None, 4, 5),
        ("-depth", "3", 6, 7),
    ]
    assert (line.positional, line.positional_at) == (["2", "c.py", "d.py"], [0, 3, 5])


def test_an_unknown_flag_consumes_its_value() -> None:
    assert parse(["--depht", "12", "a.py"]).positional == ["a.py"]
    assert parse(["--depht", "a.py"]).positional == ["a.py"]
    assert parse(["--depht=12", "a.py"]).positional == ["a.py"]


@pytest.mark.parametrize("word", ["-x", "-depth=12", "-5"])
def test_a_single_dash_is_not_a_flag(word: str) -> None:
    problem = only(wrong(word))
    assert word.partition("=")[0] in problem.what
    assert "--depth=12" in problem.allowed


@pytest.mark.parametrize("argv", [["--depth"], ["--depth", "--seed=1"]])
def test_a_flag_without_its_value(argv: list[str]) -> None:
    problem = only(parse(argv).problems)
    assert problem.what == "--depth has no value"
    assert problem.allowed == "--depth=VALUE"


def test_two_values_for_one_flag() -> None:
    problem = only(parse(["--depth=12", "--depth=16"]).problems)
    assert "'12'" in problem.what and "'16'" in problem.what
    assert texts("--depth=12", "--depth=12") == {"depth": "12"}
    assert (
        "--no-persistent-workers is given twice"
        in only(parse(["--persistent_workers", "--no-persistent-workers"]).problems).what
    )


def test_all_problems_at_once() -> None:
    line = parse(["--depht=1", "-x", "--seed", "--max_seq_len=1", "--max_seq_len=2"])
    assert len(line.unknown) == 2 == len(line.problems)


def test_numbers_have_no_off_form() -> None:
    assert only(wrong("--no-depth")).what == "--no-depth is not a known flag"


def test_a_resume_without_its_value_is_one_problem() -> None:
    """Also for the script that needs a config: with the value it needs none."""
    for script in (ENHANCED, SIMPLE):
        problem = only(wrong("--resume", script=script))
        assert problem.code == "flag.no_value"
        assert problem.fixes == [f"./{script} --resume=latest"]

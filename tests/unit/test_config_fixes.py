"""Suggested values for invalid ones."""

from __future__ import annotations

from tests.cases import each
from tests.unit.test_config_resolve import accepted, merge, refused
from training.config import meant
from training.config.schema import FIELDS
from training.config.translate import FALSE, TRUE


@each(
    ("typed", "wanted"),
    [
        ("8 h", "8h"),
        ("90 min", "90m"),
        ("2 days 3 hours", "2d3h"),
        ("5 ms", "8h"),
        ("abc", "8h"),
        ("", "0"),
    ],
)
def test_a_duration_with_spaces_or_words_is_suggested(typed: str, wanted: str) -> None:
    fixes = refused(merge(f"--max_time={typed}")).fixes
    assert fixes == [f"--max_time={wanted}"]
    accepted(merge(fixes[0]))


def test_zero_is_suggested_with_its_meaning() -> None:
    for name in ("max_time", "num_iterations", "num_epochs"):
        problem = refused(merge(f"--{name}=-5"))
        assert problem.fixes == [f"--{name}=0"] and "no limit" in problem.what
    assert "no limit" not in refused(merge("--sample_tokens=-5")).what


@each(
    ("name", "text", "fixes"),
    [
        ("num_iterations", "1e99", ["1000000000"]),
        ("num_epochs", "1000000001", ["1000000000"]),
        ("gradient_compression", "fp8", ["none"]),
        ("gradient_compression", "bf61", ["bf16"]),
        ("deterministic", "maybe", ["false"]),
        ("profile", "fifty", ["0"]),
        ("precision", "fp64", ["fp16"]),
        ("precision", "double", ["auto"]),
        ("depth", "", ["12"]),
        ("out_dir", "", ["experiments"]),
        ("wandb_mode", "dryrun", ["offline"]),  # of early W&B
        ("wandb_mode", "run", ["online"]),
        ("numa", "both", ["auto"]),
        ("numa", "-1", ["auto", "off"]),  # the nearest number is another node
        ("numa", "1024", ["auto", "off"]),
    ],
)
def test_an_invalid_value_has_a_fix(name: str, text: str, fixes: list[str]) -> None:
    problem = refused(merge(f"--{name}={text}"))
    assert problem.fixes == [f"--{name}={fix}" for fix in fixes]
    accepted(merge(problem.fixes[0]))
    (first, *_) = refused(merge(env={f"DUET_{name.upper()}": text or "\0"})).fixes
    assert first.startswith(f"export DUET_{name.upper()}=")


@each("name", [name for name, f in FIELDS.items() if f.metadata["choices"] or f.metadata["words"]])
def test_off_in_any_spelling_does_not_suggest_on(name: str) -> None:
    meta = FIELDS[name].metadata
    allowed = [*meta["choices"], *meta["words"]]
    off = {"0", "off", "none", "disabled", "fp32"} & {*allowed}
    for word in {*FALSE, *TRUE} - {"0", "1", *allowed}:
        (first, *_), _ = meant.value(name, word, FIELDS)
        if word in TRUE or off:
            assert (first in off) == (word in FALSE), f"--{name}={word}: {first}"


def test_an_invalid_value_in_a_file_has_a_fix() -> None:
    assert refused(merge(file={"precision": "double"})).fixes == ["precision = 'auto'   # c.py:1"]
    problem = refused(merge(file={"precision": 3}))
    assert problem.fixes == ["precision = 'auto'   # c.py:1"]
    problem = refused(merge(file={"data": 3}))
    assert problem.what.endswith(", an int") and problem.fixes == ["data = '3'   # c.py:1"]
    problem = refused(merge(file={"persistent_workers": 1}))
    assert problem.fixes == ["persistent_workers = True   # c.py:1"]

"""Secrets in an option file: returned by one function only and never shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.option_files import KEY, KNOWN, read, small, visible
from training.config import resolve
from training.config.flags import CommandLine
from training.tasks.video_restoration.kair import keys
from training.tasks.video_restoration.kair.keys import KEYS
from training.tasks.video_restoration.kair.loader import api_key, load

# Secrets.


def test_only_one_function_returns_the_key(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    path.write_text(
        json.dumps(small(logging__use_wandb=True, logging__wandb_api_key=f" {KEY} ")) + "// end",
        encoding="utf-8",
    )
    loaded = load(path, path.read_text(encoding="utf-8"))
    assert loaded.problems == []
    assert api_key(path) == KEY
    assert KEY not in visible(loaded)
    assert loaded.notes == []


@pytest.mark.parametrize("held", ["", "  ", None, 5, {"a": KEY}, [KEY]])
def test_invalid_keys_are_none(held: Any, tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    tree = small(logging__wandb_api_key=held)
    path.write_text(json.dumps(tree), encoding="utf-8")
    assert api_key(path) is None
    loaded = read(tree)
    assert KEY not in visible(loaded)
    assert len(loaded.problems) == (held is not None and not isinstance(held, str))


def test_an_unreadable_file_has_no_key(tmp_path: Path) -> None:
    assert api_key(tmp_path / "none.json") is None
    for content in (b"{", b"\xff\xfe", b"[1]", b'{"logging": 5}', b""):
        (tmp_path / "o.json").write_bytes(content)
        assert api_key(tmp_path / "o.json") is None


PLAIN = "correct-horse-battery"  # a key that matches no pattern


@each("secret", [KEY, PLAIN])
@each(
    "text",
    [
        '{"logging": {"wandb_api_key": "SECRET" "a": 1}}',
        '{"logging": {"wandb_api_key": "SECRET}}',
        '{"logging": {"wandb_api_key": SECRET}}',
        '{"logging": {"wandb_api_key":\n\n // the key\n SECRET}}',
        '{"logging": {"wandb_api_key": [\n "x",\n "SECRET" "y"]}}',
        '{"logging": {"wandb_api_key" "SECRET"}}',
        '{"logging": {"wandb_apikey": "SECRET",}}',
        '{"logging": {"WANDB_KEY": "SECRET", "x" 1}}',
        '{"logging": {"wandb_api_key": "SECRET", "wandb_api_key": "SECRET"}}',
        '{"logging": {"wandb_apikey": "SECRET"}}',
        '{"wandb_api_key": "SECRET"}',
        '{"loging": {"wandb_api_key": "SECRET"}}',
        '{"logging": {"wandb_api_key": {"SECRET": "SECRET"}}}',
        '{"logging": {"logfire_token": "SECRET", "swanlab_api_key": "SECRET", "use_swanlab": true}}',
        '{"train": {"E_decay": {"wandb_api_key": "SECRET"}, "fix_keys": [{"key": "SECRET"}], '
        '"fix_iter": 5}}',
        '{"gpu_ids": {"wandb_api_key": "SECRET"}, "n_channels": ["SECRET", {"x": 1}]}',
        '{"logging": [{"wandb_api_key": "SECRET"}]}',
    ],
)
def test_a_key_is_never_shown_in_errors(text: str, secret: str) -> None:
    loaded = read(text.replace("SECRET", secret))
    assert secret not in visible(loaded)


ODD = [
    True,
    -1,
    0.5,
    10**17,
    1e300,
    "",
    "x\0y",
    "\x1b[2J",
    [],
    ["a", None],
    [1, [2]],
    {},
    {"note": PLAIN},
    [{"a": PLAIN}],
]


@each("dotted", [*sorted(KEYS), *sorted(keys.SECTIONS), "duet.device", "unknown"])
def test_any_value_of_any_key_is_handled(dotted: str) -> None:
    """No crash, no escape sequences, and no contents of objects in a message."""
    for odd in ODD:
        for also in (
            {},
            {
                "scale": 1,
                "datasets__train__spike_channels": 1,
                "train__fix_iter": 5,
                "datasets__train__name": "REDS",
            },
        ):
            loaded = read(small(**also | {dotted.replace(".", "__"): odd}))
            resolved = resolve.resolve(CommandLine(), loaded.values, {}, fields=KNOWN)
            texts = [line for problem in loaded.problems for line in problem.lines()] + [
                *loaded.notes,
                loaded.title,
            ]
            assert all(line.isprintable() for line in texts)
            assert PLAIN not in visible(loaded)
            assert set(loaded.values) <= set(KNOWN)
            assert all(problem.what for problem in resolved.problems)

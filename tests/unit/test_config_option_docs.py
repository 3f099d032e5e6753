"""Every key of the option files is in one table of docs/option_files.md (made by docs/tables.py)."""

from __future__ import annotations

from tests.conftest import ROOT
from training.tasks.video_restoration.kair.keys import (
    AGREE,
    KEYS,
    NETWORK,
    SAME_AS_TRAIN,
    UNUSED,
    Key,
)

PAGE = (ROOT / "docs/option_files.md").read_text(encoding="utf-8")


def test_every_key_is_in_one_table() -> None:
    for name, key in KEYS.items():
        assert isinstance(key, Key)
        kinds = [
            bool(key.field),
            key.harmless is not None,
            bool(key.why) and not key.field and key.harmless is None,
            key == UNUSED,
        ]
        assert sum(kinds) == 1, name
    assert NETWORK in PAGE
    assert AGREE in PAGE
    assert SAME_AS_TRAIN in PAGE

"""docs/option_files.md matches the code for every key."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.tasks.video_restoration.kair.keys import (
    AGREE,
    KEYS,
    NETWORK,
    SAME_AS_TRAIN,
    UNUSED,
    Key,
    leaf,
)

PAGE = (Path(__file__).resolve().parents[2] / "docs/option_files.md").read_text(encoding="utf-8")


def used() -> list[str]:
    """Keys with another name in Duet, or with a remark."""
    lines = ["| key | sets | |", "|---|---|---|"]
    for name, key in KEYS.items():
        absent = "" if key.absent is None else f"not there: {str(key.absent).lower()}"
        if key.field and (key.why or absent or leaf(name) != key.field):
            lines.append(f"| `{name}` | `{key.field}` | {key.why or absent} |")
    return lines


def same() -> list[str]:
    """Keys with the same name in Duet."""
    sections: dict[str, list[str]] = {}
    for name, key in KEYS.items():
        if leaf(name) == key.field and not key.why and key.absent is None:
            sections.setdefault(name.rpartition(".")[0], []).append(f"`{key.field}`")
    return ["| section | keys |", "|---|---|"] + [
        f"| {f'`{s}`' if s else 'at the top'} | {', '.join(n)} |" for s, n in sections.items()
    ]


def remarks() -> list[str]:
    lines = ["| key | |", "|---|---|"]
    return lines + [
        f"| `{name}` | {key.why} |"
        for name, key in KEYS.items()
        if key.why and not key.field and key.harmless is None
    ]


def lacks() -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, key in KEYS.items():
        if key.harmless is not None:
            section, _, word = name.rpartition(".")
            both = all(f"datasets.{part}.{word}" in KEYS for part in ("train", "test"))
            names = groups.setdefault(
                ("datasets.*" if both and section.startswith("datasets") else section, key.why), []
            )
            names += [f"`{word}`"] if f"`{word}`" not in names else []
    rows = [
        f"| `{section}`: {', '.join(names)} | {why} |" for (section, why), names in groups.items()
    ]
    return ["| keys | |", "|---|---|", *rows]


def unused() -> list[str]:
    sections: dict[str, list[str]] = {}
    for name, key in KEYS.items():
        if key == UNUSED:
            sections.setdefault(name.rpartition(".")[0], []).append(f"`{leaf(name)}`")
    return ["| section | keys |", "|---|---|"] + [
        f"| {f'`{s}`' if s else 'at the top'} | {', '.join(n)} |" for s, n in sections.items()
    ]


@pytest.mark.parametrize("table", [used, same, remarks, lacks, unused])
def test_the_page_contains_the_generated_tables(table: object) -> None:
    lines = table()  # type: ignore[operator]
    assert "\n".join(lines) in PAGE, "docs/option_files.md must contain:\n" + "\n".join(lines)


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

"""KAIR's option files: nested JSON with // comments. Keys become Duet's fields (keys.py) with their
line numbers; unsupported requests are reported before anything starts.

A value whose name is that of a key or token never leaves this module, except through api_key().
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from training.config.jsonc import JsoncError, kind, parse, without_comments
from training.config.loader import ConfigFile
from training.config.schema import FIELDS
from training.core.errors import Problem
from training.core.messages import msg
from training.core.redact import masked
from training.core.suggest import suggest
from training.tasks.video_restoration.kair.keys import MARKS, SECTIONS
from training.tasks.video_restoration.kair.reader import OptionReader
from training.tasks.video_restoration.options import NAME

SHAPE = '{"task": …, "datasets": {…}, …}'
API_KEY = ("logging", "wandb_api_key")
# A line that may contain a secret, whatever is wrong with it.
_SECRET_LINE = re.compile(r"key(?!s)|token|secret|passw|credential|auth", re.IGNORECASE)
_KEY = re.compile(r'"([^"\\\n]*)"\s*:\s*(\{)?')


def is_option_file(text_or_tree: Any) -> bool:
    """Whether a text (even invalid JSON) or parsed tree is in KAIR's format, not a flat Duet
    configuration."""
    if not isinstance(text_or_tree, str):
        tree = text_or_tree
    else:
        try:
            tree = parse(text_or_tree).value
        except JsoncError:
            tree = {
                name: {} if opens else None
                for name, opens in _KEY.findall(without_comments(text_or_tree))
            }
    if not isinstance(tree, dict):
        return False
    sections = sorted(section for section in SECTIONS if "." not in section)
    nested = [
        name for name, value in tree.items() if isinstance(value, dict) and name not in FIELDS
    ]
    return any(name in MARKS and (name not in SECTIONS or name in nested) for name in tree) or any(
        suggest(n, sections) for n in nested
    )


def api_key(path: Path) -> str | None:
    """The W&B key in this file; None if it has none or no longer exists. Never write it
    anywhere."""
    try:
        tree = parse(path.read_text(encoding="utf-8-sig")).value
    except (OSError, UnicodeDecodeError, JsoncError):
        return None
    for name in API_KEY:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree.strip() or None if isinstance(tree, str) else None


def load(path: Path, text: str, ranks: int = 2) -> ConfigFile:
    """Read an option file, with all its problems. `ranks`: for the command that runs KAIR's own
    program; 0: unknown."""
    name = str(path)
    loaded = ConfigFile({"task": (NAME, name)})
    try:
        document = parse(text.removeprefix("\ufeff"))
    except JsoncError as wrong:
        loaded.problems = [_no_json(name, text, wrong)]
        return loaded
    if not isinstance(document.value, dict):
        loaded.problems = [
            Problem(
                "config.no_object",
                msg("tasks.kair.file.contains", name=name, kind=kind(document.value)),
                msg("tasks.kair.file.one_object", shape=SHAPE),
            )
        ]
        return loaded
    OptionReader(name, document, ranks or 2, loaded).read()
    return loaded


def _no_json(name: str, text: str, wrong: JsoncError) -> Problem:
    """Syntax problem with the line, unless the line may contain a key: by its own words, or because
    it continues the value of such a name."""
    lines = text.split("\n")
    line = lines[wrong.line - 1].strip()
    before = _KEY.findall(without_comments("\n".join(lines[: wrong.line - 1])))
    secret = _SECRET_LINE.search(line) or (before and _SECRET_LINE.search(before[-1][0]))
    shown = masked(line if line.isprintable() else repr(line))
    quoted = "" if secret or not line else f": {shown if len(shown) <= 160 else shown[:157] + '…'}"
    return Problem(
        "config.syntax",
        f"{name}:{wrong.line}:{wrong.column}: {wrong.message}{quoted}",
        msg("tasks.kair.file.json"),
    )

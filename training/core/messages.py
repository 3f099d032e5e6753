"""Messages in the user's language: `msg("plan.run_missing", name=name)`.

core/text/<room>.json has the English and the Chinese template of every message of a room; the first
word of an ID is the room. DUET_LANG (which --lang sets) selects the language, else the locale does.
Codes, JSON keys and log lines that programs parse are the same in every language.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path

LANGUAGES = ("en", "zh")
VARIABLE = "DUET_LANG"
FOLDER = Path(__file__).parent / "text"
_LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")  # in the order of gettext


def language(environ: Mapping[str, str] | None = None) -> str:
    """`zh` if DUET_LANG or the locale is Chinese, else `en`."""
    known = os.environ if environ is None else environ
    asked = known.get(VARIABLE, "")
    chosen = asked or next((known[name] for name in _LOCALE if known.get(name)), "")
    # The shell part prints UTF-8, which is unreadable in a terminal with another encoding.
    unreadable = not asked and "." in chosen and "utf" not in chosen.lower()
    return "zh" if chosen.lower().startswith("zh") and not unreadable else "en"


@functools.lru_cache(maxsize=None)  # noqa: UP033 – Python 3.8: a user script imports this module
def templates(room: str) -> dict[str, dict[str, str]]:
    """ID → language → template."""
    found: dict[str, dict[str, str]] = json.loads((FOLDER / f"{room}.json").read_text("utf-8"))
    return found


def load_all() -> None:
    """Read all templates now: a program that runs for days must not read those of a newer version
    later."""
    for file in FOLDER.glob("*.json"):
        templates(file.stem)


def msg(message_id: str, /, **values: object) -> str:
    """The message in the selected language. Raises KeyError for an unknown ID or a missing
    value."""
    template = templates(message_id.partition(".")[0])[message_id][language()]
    return template.format(**values) if values else template

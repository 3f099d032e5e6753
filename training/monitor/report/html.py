"""HTML builder that escapes all text except `Html`."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VOID = ("img", "meta")


class Html(str):
    """Text that already is HTML."""

    __slots__ = ()


def text(value: object) -> Html:
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def join(parts: Iterable[object]) -> Html:
    return Html("".join(text(part) for part in parts if part is not None))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_="x"` becomes class="x", `data_id` becomes data-id; True is an attribute
    without a value; None and False are omitted."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = key.rstrip("_").replace("_", "-")
        words.append(shown if value is True else f'{shown}="{html.escape(str(value))}"')
    opened = Html(f"<{' '.join(words)}>")
    return opened if name in VOID else Html(f"{opened}{join(children)}</{name}>")


def table(head: Sequence[object], rows: Iterable[Sequence[object]], **attributes: object) -> Html:
    """A table. A cell that is a Mapping has attributes: {"": content, "class_": …}. The first cell
    of a row is its header."""
    top = (
        tag("thead", tag("tr", *(_cell("th", cell, scope="col") for cell in head)))
        if head
        else None
    )
    lines = [
        tag(
            "tr",
            *(
                _cell("td" if i else "th", cell, scope=None if i else "row")
                for i, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    return tag(
        "div", tag("table", top, tag("tbody", *lines), **attributes), class_="wide", tabindex="0"
    )


def _cell(name: str, cell: object, **attributes: object) -> Html:
    facts: dict[str, object] = {**cell} if isinstance(cell, Mapping) else {"": cell}
    content = facts.pop("")
    return tag(name, content, **{**attributes, **facts})


def data(value: Any) -> Html:
    """JSON for <script type="application/json">; it cannot contain the end of the element."""
    return Html(
        json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
            "<", "\\u003c"
        )
    )

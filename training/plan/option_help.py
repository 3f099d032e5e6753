"""The option list of `--help`, from the schema. Runs under `python -I -S` before anything is
installed."""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from dataclasses import Field
from typing import Any

from training import tasks
from training.config.flags import ACTIONS
from training.config.schema import FIELDS, GROUPS, Known, kind
from training.core.errors import EXIT_MEANING

WIDTH, INDENT = 80, 26  # columns


def option_lines(left_out: Collection[str] = ()) -> list[str]:
    lines = ["", "Actions:"]
    for name, text in ACTIONS.items():
        if name not in left_out:
            lines += _entry(f"  --{name}", text)
    lines += ["", "Fields with =bool: --FIELD is --FIELD=true, --no-FIELD is --FIELD=false."]
    for group, title in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, f in FIELDS.items():
            if f.metadata["group"] == group and name not in left_out:
                lines += _entry(*_option(name, f, FIELDS))
    for spec in tasks.BUILT_IN.values():
        if spec.own:
            lines += [
                "",
                f"Options of --task={spec.name} (not those marked {tasks.DEFAULT.name} only):",
            ]
            for name, f in spec.own.items():
                lines += _entry(*_option(name, f, spec.own))
    lines += ["", "Exit codes:"]
    for code, meaning in EXIT_MEANING.items():
        lines += _entry(f"  {int(code):>3}", meaning, 7)
    return lines


def _option(name: str, f: Field[Any], fields: Known) -> tuple[str, str]:
    """(the flag with its kind of value, its help with unit and default)."""
    meta = f.metadata
    shown = (
        "|".join(meta["choices"])
        if meta["choices"]
        else "|".join((kind(name, fields), *meta["words"]))
    )
    default = (
        "''"
        if f.default == ""
        else str(f.default).lower()
        if isinstance(f.default, bool)
        else f.default
    )
    unit = f" [{meta['unit']}]" if meta["unit"] else ""
    only = f"; {tasks.DEFAULT.name} only" if meta["own"] else ""
    also = f"; also {meta['env']}" if meta["env"] else ""
    return f"  --{name}={shown}", f"{meta['help']}{unit} (default {default}{only}{also})"


def _entry(option: str, text: str, indent: int = INDENT) -> list[str]:
    """An option with its text wrapped beside it, or below it where the option is long."""
    lines = textwrap.wrap(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    if len(option) > indent - 2:
        return [option, *(" " * indent + line for line in lines)]
    return [f"{option if number == 0 else '':<{indent}}{line}" for number, line in enumerate(lines)]

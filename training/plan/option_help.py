"""The option list of `--help`, from the schema. Runs under `python -I -S`: it must answer at
once."""

from __future__ import annotations

from dataclasses import Field
from typing import Any

from training import tasks
from training.config.flags import ACTIONS
from training.config.schema import FIELDS, GROUPS, Known, kind
from training.core.errors import EXIT_MEANING


def option_lines() -> list[str]:
    lines = ["", "Flags that choose what happens:"]
    lines += [f"  --{name:<24} {text}" for name, text in ACTIONS.items()]
    for group, title in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, f in FIELDS.items():
            meta = f.metadata
            if meta["group"] != group:
                continue
            lines.append(_line(name, f, FIELDS))
    for spec in tasks.BUILT_IN.values():
        if spec.own:
            lines += [
                "",
                f"Options of --task={spec.name} (instead of those for {tasks.DEFAULT.name} alone):",
            ]
            lines += [_line(name, f, spec.own) for name, f in spec.own.items()]
    lines += [
        "",
        "Exit codes:",
        *(f"  {int(code):>3}  {meaning}" for code, meaning in EXIT_MEANING.items()),
    ]
    return lines


def _line(name: str, f: Field[Any], fields: Known) -> str:
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
    alone = f"; {tasks.DEFAULT.name} alone" if meta["own"] else ""
    also = f"; also {meta['env']}" if meta["env"] else ""
    return f"  --{name + '=' + shown:<36} {meta['help']}{unit} (default {default}{alone}{also})"


if __name__ == "__main__":
    print("\n".join(option_lines()))

"""`--save_config=FILE`: the resolved configuration as a config file, with the origin of each
value."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config.schema import FIELDS, of_the_run
from training.core.errors import Problem
from training.core.messages import msg

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues

SUFFIXES = (".py", ".json")
EACH_START = ("resume", "run_name", "node_rank")  # specific to a start or a machine


def problems(path: Path) -> list[Problem]:
    what = msg("config.saved.given", path=str(path))
    if path.suffix not in SUFFIXES:
        return [
            Problem(
                "save_config.suffix",
                msg("config.saved.suffix", what=what),
                msg("config.saved.allowed_file"),
                [f"--save_config={shlex.quote(f'{path}.py')}"],
            )
        ]
    if not path.parent.is_dir():
        return [
            Problem(
                "save_config.no_folder",
                msg("config.saved.no_folder", what=what),
                msg("config.saved.existing_folder"),
                [f"mkdir -p {shlex.quote(str(path.parent))}"],
            )
        ]
    return []


def chosen(values: Mapping[str, Any], origins: Mapping[str, str]) -> FieldValues:
    """The values to write: all that a resumed run keeps, and other ones that are not default."""

    def kept(name: str) -> bool:
        return name not in EACH_START and (
            name not in FIELDS or of_the_run(name) or origins[name] != "default"
        )

    return {name: value for name, value in values.items() if kept(name)}


def write(path: Path, values: Mapping[str, Any], origins: Mapping[str, str]) -> list[Problem]:
    """Write the file and return the problems. An existing file with the same content is kept."""
    text = _json(values, origins) if path.suffix == ".json" else _python(values, origins)
    try:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink()  # half of a config is a valid one
                raise
    except FileExistsError:
        if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
            free = next(
                p for n in range(2, 1000) if not (p := path.with_stem(f"{path.stem}_{n}")).exists()
            )
            what = msg("config.saved.exists", path=str(path))
            return [
                Problem(
                    "save_config.exists",
                    what,
                    msg("config.saved.new_file"),
                    [f"--save_config={shlex.quote(str(free))}"],
                )
            ]
    except OSError as error:
        return [
            Problem(
                "output.unwritable",
                msg("config.saved.unwritable", path=str(path), strerror=error.strerror),
                msg("config.saved.writable_file"),
            )
        ]
    return []


def _origin(name: str, origins: Mapping[str, str]) -> str:
    return " ".join(origins[name].removeprefix("from ").split())


def _python(values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    head = msg("config.saved.head")
    return f'"""{head}"""\n\n' + "".join(
        f"{name} = {value!r}  # {_origin(name, origins)}\n" for name, value in values.items()
    )


def _json(values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    lines = (
        f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}, // "
        f"{_origin(name, origins)}"
        for name, value in values.items()
    )
    return "{\n" + "\n".join(lines) + "\n}\n"

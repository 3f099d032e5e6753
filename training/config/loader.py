"""Reader of config files: `.py` with plain assignments or `.json` with one flat object. Nothing is
executed."""

from __future__ import annotations

import ast
import json
import operator
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from training.config.jsonc import kind, relaxed
from training.core import suggest
from training.core.errors import Problem
from training.core.jsonl import Record
from training.core.messages import msg
from training.core.project import ENTRYPOINT

# Allowed arithmetic, as in `total_batch_size = 2 * device_batch_size * max_seq_len`. Without power
# and shift, which can produce a number that fills the memory.
OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
MAX_BITS = 128
QUICKSTART = "quickstart"  # the config for a first try
EXAMPLE = '{"depth": 12}'
Values = dict[str, tuple[Any, str]]  # name → (value, origin 'file:line')


@dataclass
class ConfigFile:
    """The contents of a config file. `title`: its own name; `notes`: for the plan; `gpu_ids`: of a
    KAIR option file."""

    values: Values = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    title: str = ""
    notes: list[str] = field(default_factory=list)
    gpu_ids: list[int] = field(default_factory=list)


class NotPlain(Exception):
    """An expression that is not allowed in a config."""


def read(
    path: Path,
    others: Sequence[Callable[[Path, str, int], ConfigFile | None]],
    ranks: int,
) -> ConfigFile:
    """Read a Duet config or a file in another format. `others`: a reader of each, which returns
    None for a file that is not in its format; `ranks`: number of ranks, 0 if unknown."""
    text, problems = _text(path)
    if problems:
        return ConfigFile({}, problems)
    for reader in others if path.suffix == ".json" else ():
        if (found := reader(path, text, ranks)) is not None:
            return found
    return ConfigFile(*_parsed(path, text))


def load(path: Path) -> tuple[Values, list[Problem]]:
    """The assignments of a Duet config with their origins, and all problems of the file."""
    text, problems = _text(path)
    return ({}, problems) if problems else _parsed(path, text)


def _text(path: Path) -> tuple[str, list[Problem]]:
    allowed = msg("config.loader.allowed_file") + ", ".join(map(str, _ready("dual_gpu")))
    # os.path, since Path raises for names that the file system rejects.
    if os.path.isdir(path):
        inside = sorted([*path.glob("[a-z]*.py"), *path.glob("*.json")])[:4]
        return "", [
            Problem(
                "config.is_folder",
                msg("config.loader.is_folder", path=path),
                allowed,
                _as_flags(inside or near(path)),
            )
        ]
    if not os.path.exists(path):
        ready = [p for p in _ready("dual_gpu") if p.stem == QUICKSTART]
        hint = _as_flags(near(path) or ready)
        return "", [
            Problem("config.missing", msg("config.loader.missing", path=path), allowed, hint)
        ]
    if path.suffix not in (".py", ".json"):
        hint = _as_flags(near(path))
        return "", [Problem("config.suffix", msg("config.loader.suffix", path=path), allowed, hint)]
    try:
        return path.read_text(encoding="utf-8-sig"), []
    except (OSError, UnicodeDecodeError) as error:
        return "", [
            Problem(
                "config.unreadable",
                msg("config.loader.unreadable", path=path, error=error),
                msg("config.loader.readable_utf8"),
            )
        ]


def _as_flags(paths: Iterable[Path]) -> list[str]:
    return [f"--config={shlex.quote(str(path))}" for path in paths]


def near(path: Path) -> list[Path]:
    """Suggested config files for a path that is not one: a missing suffix, or the (misspelled) name
    of a file beside it or of a provided config."""
    known = [Path(f"{path}{suffix}") for suffix in (".py", ".json")]
    there = [p for p in known if os.path.isfile(p)]  # noqa: PTH113 – Path.is_file raises for names that the file system rejects
    if there:
        return there
    ready = _ready("*")
    if named := [p for p in ready if path.name in (p.name, p.stem)]:
        return named[:1]
    # a file, not the path itself, as a dangling link
    beside = (p for p in _spelled(path, _beside(path)) if p.is_file())
    return list(islice(chain(beside, _spelled(path, ready)), 1))


def _spelled(path: Path, known: list[Path]) -> list[Path]:
    near = suggest.suggest(path.stem, [p.stem for p in known])
    return [p for name in near for p in known if p.stem == name]


def _beside(path: Path) -> list[Path]:
    """What is in its folder and may be a config; nothing for a single word: it may be a number."""
    if not path.suffix and path.parent == Path():
        return []
    try:
        there = sorted(path.parent.iterdir())
    except (OSError, ValueError):
        return []
    return [p for p in there if p.suffix in (".py", ".json") and p.name != ENTRYPOINT]


def _ready(folder: str) -> list[Path]:
    """The provided configs, relative to the working directory if possible."""
    found = sorted((Path(__file__).resolve().parents[2] / "configs").glob(f"{folder}/[a-z]*.py"))
    return [p.relative_to(Path.cwd()) if p.is_relative_to(Path.cwd()) else p for p in found]


def _parsed(path: Path, text: str) -> tuple[Values, list[Problem]]:
    return (load_python if path.suffix == ".py" else load_json)(text, str(path))


def load_python(text: str, name: str) -> tuple[Values, list[Problem]]:
    try:
        tree = ast.parse(text, filename=name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        shown = text.splitlines()[line - 1].strip() if line <= len(text.splitlines()) else ""
        message = getattr(error, "msg", None) or str(error)
        return {}, [
            Problem(
                "config.syntax",
                f"{name}:{line}: {message}: {shown!r}",
                msg("config.loader.assignments"),
            )
        ]
    values: Values = {}
    problems: list[Problem] = []
    for node in tree.body:
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            continue  # docstring
        where = f"{name}:{node.lineno}"
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        value_node = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if value_node is None or len(targets) != 1 or not isinstance(targets[0], ast.Name):
            source = (ast.get_source_segment(text, node) or "").splitlines()[0]
            problems.append(
                Problem(
                    "config.not_plain",
                    msg("config.loader.not_plain", where=where, source=source),
                    msg("config.loader.lines_such_as"),
                )
            )
            continue
        try:
            values[targets[0].id] = (_evaluate(value_node, values), where)
        except (NotPlain, RecursionError) as error:
            problems.append(
                Problem(
                    "config.not_plain",
                    f"{where}: {targets[0].id}: {error}",
                    msg("config.loader.plain_values"),
                    field=targets[0].id,
                )
            )
    return values, problems


def _evaluate(node: ast.expr, known: Values) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id in known:
            return known[node.id][0]
        raise NotPlain(msg("config.loader.not_assigned", name=node.id))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return _evaluate(
            ast.BinOp(
                ast.Constant(0),
                ast.Sub() if isinstance(node.op, ast.USub) else ast.Add(),
                node.operand,
            ),
            known,
        )
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _evaluate(node.left, known), _evaluate(node.right, known)
        for side in (left, right):
            if isinstance(side, bool) or not isinstance(side, (int, float)):
                raise NotPlain(msg("config.loader.arithmetic", side=side))
        try:
            value = OPERATORS[type(node.op)](left, right)
        except (ArithmeticError, ValueError) as error:
            raise NotPlain(str(error)) from None
        # Repeated squaring would fill the memory.
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise NotPlain(msg("config.loader.number_too_large"))
        return value
    raise NotPlain(msg("config.loader.not_plain_value"))


def load_json(text: str, name: str) -> tuple[Values, list[Problem]]:
    """Parse JSON with // comments and trailing commas."""
    duplicates: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> Record:
        seen: Record = {}
        for key, value in items:
            if key in seen:
                duplicates.append(key)
            seen[key] = value
        return seen

    try:
        value = json.loads(relaxed(text), object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        return {}, [
            Problem(
                "config.syntax",
                f"{name}:{error.lineno}:{error.colno}: {error.msg}",
                msg("config.loader.one_object", example=EXAMPLE),
            )
        ]
    except (RecursionError, ValueError) as error:  # ValueError: a number with more than 4300 digits
        why = msg("config.loader.nested_too_deep") if isinstance(error, RecursionError) else error
        return {}, [
            Problem(
                "config.syntax", f"{name}: {why}", msg("config.loader.flat_object", example=EXAMPLE)
            )
        ]
    if not isinstance(value, dict):
        return {}, [
            Problem(
                "config.no_object",
                msg("config.loader.no_object", name=name, kind=kind(value)),
                msg("config.loader.one_object", example=EXAMPLE),
            )
        ]
    problems = [
        Problem(
            "config.key_twice",
            msg("config.loader.key_twice", name=name, key=key),
            msg("config.loader.each_key_once"),
        )
        for key in duplicates
    ]
    return {key: (item, f"{name}: {key!r}") for key, item in value.items()}, problems

"""Texts of a Parquet file: one column, a page and some rows at a time."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from training.core.errors import Problem, UserError
from training.core.messages import msg

ROWS, READ_BYTES = 256, 64 << 20  # the most per read
SHOWN = 8  # further files with the same problem


def texts(file: Path, size: int, text_field: str) -> Iterator[tuple[bytes, int]]:
    """The text of each row in UTF-8, and how many of the `size` bytes are done. Raises
    UserError."""
    row = 0
    with _opened(file, text_field, lambda: row) as table:
        rows = table.metadata.num_rows
        for batch in table.iter_batches(
            _rows_per_read(table, text_field), columns=[text_field], use_threads=False
        ):
            for value in batch.column(0):
                row += 1
                yield _text(value, file, row, text_field), size * row // rows


def check(files: Iterable[Path], text_field: str) -> list[Problem]:
    """One problem for the Parquet files among these that are incomplete, and one for those without
    such a column; no text is read."""
    found: dict[str, list[tuple[Path, Problem]]] = {}
    for file in (f for f in files if f.suffix.lower() == ".parquet"):
        try:
            with _opened(file, text_field):
                pass
        except UserError as error:
            for problem in error.problems:
                found.setdefault(problem.code, []).append((file, problem))
    return [_of_all(same) for same in found.values()]


def _of_all(same: list[tuple[Path, Problem]]) -> Problem:
    """The first one, with the names of the other files."""
    (_, first), *others = same
    if not others:
        return first
    names = ", ".join(str(file) for file, _ in others[:SHOWN])
    if len(others) > SHOWN:
        names += msg("data.reader.and_more", count=len(others) - SHOWN)
    return replace(first, what=first.what + msg("data.reader.also", files=names))


@contextmanager
def _opened(file: Path, text_field: str, row: Callable[[], int] = lambda: 0) -> Iterator[Any]:
    """A ParquetFile with this column. `row`: the last one that was read, for the error."""
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    try:
        # Read part of a column at a time, however large the row groups are; page checksums are
        # verified if present.
        with parquet.ParquetFile(
            file, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
        ) as table:
            _has_text(arrow, file, table.schema_arrow, text_field)
            yield table
    except MemoryError:  # of pyarrow, which is also an ArrowException
        raise
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        first = str(error).partition("\n")[0]
        what = (
            msg("data.reader.damaged_parquet", file=file)
            + (msg("data.reader.after_row", row=row()) if row() else "")
            + msg("data.reader.reason", reason=first)
        )
        raise UserError(
            Problem("data.damaged", what, msg("data.reader.complete_parquet"))
        ) from None


def text_fields(names: list[str]) -> list[str]:
    """The flags that name one of these columns."""
    return [f"--text_field={shlex.quote(name)}" for name in names[:3]]


def _rows_per_read(table: Any, text_field: str) -> int:
    """As many as fit into READ_BYTES by the mean size of a text."""
    schema, facts = table.schema, table.metadata
    column = next(n for n in range(facts.num_columns) if schema.column(n).path == text_field)
    groups = map(facts.row_group, range(facts.num_row_groups))
    means = (g.column(column).total_uncompressed_size // max(1, g.num_rows) for g in groups)
    return max(1, min(ROWS, READ_BYTES // max(1, max(means, default=1))))


def _text(value: Any, file: Path, row: int, text_field: str) -> bytes:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        what = msg("data.reader.row_not_utf8", file=file, row=row, text_field=text_field)
        raise UserError(
            Problem("data.encoding_damaged", what, msg("data.reader.utf8_text"))
        ) from None
    if text is None:
        what = msg("data.reader.no_text_in_row", file=file, row=row, text_field=text_field)
        raise UserError(Problem("data.no_text_field", what, msg("data.reader.every_row")))
    return bytes(text.encode("utf-8", "replace"))


def _has_text(arrow: Any, file: Path, schema: Any, text_field: str) -> None:
    """Check that the column exists once and contains text."""

    def is_text(kind: Any) -> bool:
        kinds = arrow.types
        kind = kind.value_type if kinds.is_dictionary(kind) else kind
        return bool(
            kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)
        )

    found = [field for field in schema if field.name == text_field]
    if len(found) == 1 and is_text(found[0].type):
        return
    fixes = text_fields(
        [field.name for field in schema if is_text(field.type) and field.name != text_field]
    )
    columns = ", ".join(f"{field.name} ({field.type})" for field in list(schema)[:12])
    what = (
        msg("data.reader.wrong_type", text_field=text_field, type=found[0].type)
        if len(found) == 1
        else msg("data.reader.no_column", text_field=text_field)
    )
    if len(found) > 1:
        what = msg("data.reader.columns", count=len(found), text_field=text_field)
    raise UserError(
        Problem(
            "data.no_text_field",
            msg("data.reader.its_columns", file=file, what=what, columns=columns),
            msg("data.reader.text_column"),
            fixes,
        )
    )

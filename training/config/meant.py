"""Suggestions for unknown names and invalid values: names used by other tools, or similar spellings
of a matching type.

Shared by flags, config file keys and DUET_ variables.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Container
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from training.config import batch
from training.config.convert import as_text, convert
from training.config.flags import WORDS, bool_words
from training.config.foreign_names import NAMES, VALUES, Foreign, row_of
from training.config.schema import DURATION, FIELDS, NODE, Config, Known, describe, kind
from training.config.translate import FALSE, RANKS, TRUE, Changes, Sizes, none
from training.core.messages import msg
from training.core.suggest import suggest

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues

EXAMPLE = "8h"  # of a duration
NO_LIMIT = "0: no limit"  # in the help of a field
ON, OFF = ("1", "auto"), ("0", "off", "none", "disabled")  # of a field that is not a switch
SPELLED_UNIT = re.compile(r"(day|hour|hr|minute|min|second|sec)s?\b")
SUFFIXES = {"k": 3, "m": 6, "g": 9, "b": 9}
SECRET = re.compile(r"key|token$|secret|passw|credential")
NEGATION = re.compile(r"(?:no|disable|without)_?(\w{3,})")
# A guess must not continue another run or write elsewhere: no name similar to another tool's name
# for one of these (checkpoint_save, checkpoint_dir) suggests it.
OTHER_RUN = ("resume", "out_dir")
DEFAULT = Sizes(8, 1536, 2, 24576, 0, 12)


@dataclass(frozen=True)
class Meant:
    """`changes`: suggested replacements, best first; `why`: explanation for the first line of the
    problem."""

    changes: tuple[Changes, ...] = ()
    why: str = ""
    allowed: str = ""


def name(
    typed: str,
    text: str | None,
    fields: Known,
    sizes: Sizes = DEFAULT,
    actions: tuple[str, ...] = (),
    dashes: str = "",
    given: Container[str] = (),
) -> Meant:
    """Suggestions for the unknown name `typed`. `text`: its value as text, None without one;
    `actions`: other known names; `dashes`: prefix of field names in sentences; `given`: fields that
    the same command sets, which no similar spelling replaces."""
    row = row_of(typed)
    if row is not None and not (text is None and row.example):
        found = _foreign(row, "true" if text is None else text, fields, sizes, dashes)
        if found is not None:
            return found
    elif row is not None:
        return Meant((), _target(row, fields, dashes, exact=True), _allowed(row, fields))
    plain = typed.replace("-", "_").lower().rpartition(".")[2]
    if SECRET.search(plain):
        return Meant()  # never repeat its value
    if negated := _negated(plain, text, fields):
        return Meant((negated,))
    fitting = [
        n for n in suggest(plain, [*fields, *actions]) if n not in given and fits(n, text, fields)
    ]
    if not fitting and text is not None and (spelled := suggest(plain, list(NAMES), 0.8)[:1]):
        row = NAMES[spelled[0]]
        if any(field in OTHER_RUN or field in given for field in row.to):
            return Meant()
        return _foreign(row, text, fields, sizes, dashes) or Meant()
    switched = {n: "true" if n in fields else "" for n in fitting}  # an action needs no value
    return Meant(tuple({n: switched[n] if text is None else text} for n in fitting))


def _negated(plain: str, text: str | None, fields: Known) -> Changes:
    """The opposite value of the bool that `plain` switches off, as in notensorboard; {} for any
    other name."""
    match, on = NEGATION.fullmatch(plain), WORDS.get((text or "true").lower())
    if not match or on is None:
        return {}
    near = suggest(match[1], [n for n in fields if kind(n, fields) == "bool"], most=1)
    return dict.fromkeys(near, "false" if on else "true")


def fits(field: str, text: str | None, fields: Known) -> bool:
    """Whether `text` is a valid value of the field; None is valid only for a bool."""
    if field not in fields:
        return True  # an action
    if text is None:
        return kind(field, fields) == "bool"
    return convert(field, text, True, fields)[1] is None


def _foreign(row: Foreign, text: str, fields: Known, sizes: Sizes, dashes: str) -> Meant | None:
    """Suggestions from a row of foreign_names; None if the task lacks its fields."""
    if row.to and not any(field in fields or field == RANKS for field in row.to):
        return None
    changes = row.translate(text, sizes)
    if changes is not None and not all(
        fits(n, v, fields) for n, v in changes.items() if n in FIELDS or n in fields
    ):
        changes = None
    if changes is not None and any(n in FIELDS and n not in fields for n in changes):
        return None
    exact = row.translate is not none and len(row.to) == 1
    return Meant(
        () if changes is None else (changes,),
        _target(row, fields, dashes, exact),
        _allowed(row, fields),
    )


def _target(row: Foreign, fields: Known, dashes: str, exact: bool) -> str:
    """The corresponding fields as text. `exact`: a single one with the same meaning."""
    known = ", ".join(f"{dashes}{n}" for n in row.to if n in fields)
    if exact:
        return msg("config.meant.separator").join(
            filter(None, (msg("config.meant.use", known=known) if known else "", row.note))
        )
    return msg("config.meant.separator").join(
        filter(None, (row.note, msg("config.meant.see", known=known) if known else ""))
    )


def _allowed(row: Foreign, fields: Known) -> str:
    return msg("config.meant.separator").join(
        f"--{n}: {describe(n, fields)}" for n in row.to if n in fields
    )


def value(field: str, raw: Any, fields: Known) -> tuple[list[str], str]:
    """(suggested values as text, best first; a note on the first)."""
    text = as_text(raw).strip()
    meta, word = fields[field].metadata, text.lower()
    found = (
        [VALUES[field][word]]
        if word in VALUES.get(field, {}) and fields[field] is FIELDS.get(field)
        else []
    )
    if field == "device" and re.fullmatch(r"(cuda|gpu):[\d,]+", word):
        return (
            ["cuda"],
            msg("config.meant.visible_devices", gpus=word.partition(":")[2]),
        )
    if field == "nnodes" and (machines := re.fullmatch(r"\d+:(\d+)", word)):
        return [machines[1]], msg("config.meant.elastic")
    if allowed := [*meta["choices"], *meta["words"]]:
        switched = OFF if word in FALSE else ON if word in TRUE else ()
        found += [one for one in switched if one in allowed][:1]
        begin = [one for one in allowed if len(word) > 1 and one.startswith(word)]
        found += suggest(word, allowed, most=1) or (begin if len(begin) == 1 else [])
    if kind(field, fields) == "bool":
        found += [str(WORDS[word]).lower()] if word in WORDS else bool_words(word)
    if kind(field, fields) == "str" and not meta["choices"] and isinstance(raw, (int, float)):
        found.append(text)
    if meta["unit"] == NODE and re.fullmatch(r"[+-]?\d+", text):
        return [*meta["words"]], ""  # the nearest node is another one
    if kind(field, fields) in ("int", "float") and not meta["choices"]:
        found += _numbers(text, fields[field].metadata, kind(field, fields))
    if meta["unit"] == DURATION:
        found.append(SPELLED_UNIT.sub(lambda unit: unit[1][0], word).replace(" ", ""))  # 8 hours
    fitting = [v for v in dict.fromkeys(found) if fits(field, v, fields)]
    if not fitting:
        unlimited = meta["unit"] == DURATION and bool(text)  # the default would end no training
        found = [EXAMPLE if unlimited else _default(fields[field].default)]
        return [v for v in found if v and fits(field, v, fields)], ""
    endless = fitting[:1] == ["0"] and NO_LIMIT in meta["help"]
    return fitting[:2], msg("config.meant.no_limit") if endless else ""


def _default(raw: Any) -> str:
    return f"{raw:g}" if isinstance(raw, float) else as_text(raw)


def _numbers(text: str, meta: Any, wanted: str) -> list[str]:
    """Numbers in the range of the field for text such as 64K, 1e5, 12.5, 4,096 or -1."""
    if re.fullmatch(r"\d{1,3}(,\d{3})+", text):
        return [text.replace(",", "")]
    match = re.fullmatch(
        r"([+-]?(?:\d{1,30}\.?\d{0,30}|\.\d{1,30})(?:[eE][+-]?\d{1,2})?)\s*([kKmMgGbB]?)(i?)[bB]?",
        text,
    )
    if not match:
        return []
    number, suffix = Fraction(match[1]), match[2].lower()
    candidates = [number]
    if suffix:
        power = SUFFIXES[suffix]
        candidates = [number * 1024 ** (power // 3), number * 10**power]
        if match[2] == "k" and not match[3]:  # 1k steps are 1000, 64K tokens are 65536
            candidates.reverse()
    low, high = meta["low"], meta["high"]
    bounded = [max(n, Fraction(low)) if low is not None else n for n in candidates]
    bounded = [min(n, Fraction(high)) if high is not None else n for n in bounded]
    if wanted == "float":
        return [f"{float(n):g}" for n in bounded]
    return [str(int(n)) for n in bounded]


def line(names: Changes, origin: str, fields: Known) -> str:
    """The replacement for a line of a config file. `origin`: file:line of a .py file, or file:
    'key' of a JSON file."""
    values = {field: convert(field, text, True, fields)[0] for field, text in names.items()}
    if re.search(r"\.py:\d+$", origin):
        return "; ".join(f"{n} = {v!r}" for n, v in values.items()) + f"   # {origin}"
    if origin.endswith("'"):
        return ", ".join(f"{json.dumps(n)}: {json.dumps(v)}" for n, v in values.items()) + msg(
            "config.meant.in_file", origin=origin
        )
    return flags_of(names)  # an option file uses other names: suggest a flag, which overrides it


def sizes_of(
    config: Config, ranks: int, fields: Known, runs: tuple[str, ...] = (), nnodes: int = 0
) -> Sizes:
    """`ranks`: on each of `nnodes` machines; 0: unknown, as many as the configuration has."""
    each = config.device_batch_size if isinstance(config.device_batch_size, int) else 1
    return Sizes(
        each,
        config.max_seq_len if "max_seq_len" in fields else 1,
        ranks or 2,
        config.total_batch_size,
        config.num_iterations,
        config.depth,
        runs,
        nnodes or config.nnodes,
    )


def with_changes(sizes: Sizes, changes: Changes) -> Sizes:
    """`sizes` with these changes applied."""
    known: FieldValues = {
        n: int(v) for n, v in changes.items() if n in Sizes.__dataclass_fields__ and v.isdecimal()
    }
    if changes.get(RANKS, "").isdecimal():
        known["ranks"] = int(changes[RANKS])
    return replace(sizes, **known)


def that_divides(changes: Changes, sizes: Sizes) -> Changes:
    """`changes` with a total batch size that divides, if they have one. `sizes`: with them
    applied."""
    if "total_batch_size" not in changes:
        return changes
    found = (sizes.device_batch_size, sizes.max_seq_len, sizes.all_ranks, sizes.total_batch_size)
    if batch.split(*found):
        return changes
    return changes | {"total_batch_size": str(batch.repairs(*found)[0][1])}


def flags_of(changes: Changes) -> str:
    """The changes as flags, quoted for the shell."""
    return " ".join(f"--{n}" + (f"={shlex.quote(v)}" if v else "") for n, v in changes.items())

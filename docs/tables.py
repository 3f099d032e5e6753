"""The generated tables of the documentation, each from its one source.

    make docs                         # rewrite them
    python docs/tables.py --check     # exit status 1 and the pages that are out of date

A table is what a page has between `<!-- table: NAME -->` and `<!-- end of table -->`, and the whole
of docs/codes.md from its first heading on.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)
os.environ["DUET_LANG"] = "en"  # of the documentation, whatever the locale is

from benchmarks.elastic import table as elastic_table  # noqa: E402
from benchmarks.gpu import table as gpu_table  # noqa: E402
from benchmarks.target import __main__ as target  # noqa: E402
from training import tasks  # noqa: E402
from training.config import foreign_names  # noqa: E402
from training.config.flags import ACTIONS  # noqa: E402
from training.config.schema import FIELDS, GROUPS, Known, describe  # noqa: E402
from training.core import codes  # noqa: E402
from training.core.errors import EXIT_MEANING  # noqa: E402
from training.core.jsonl import Record  # noqa: E402
from training.diagnose import signatures  # noqa: E402
from training.host import env_catalog  # noqa: E402
from training.monitor import prom_metrics  # noqa: E402
from training.tasks.video_restoration.kair.keys import KEYS, UNUSED, leaf  # noqa: E402

CAUSES = ROOT / "training/diagnose/signatures/causes.json"
LOGS = ROOT / "tests/fixtures/logs/expected.json"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def row(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def header(*cells: str) -> list[str]:
    return [row(*cells), "|" + "---|" * len(cells)]


def _fields(known: Known, group: str | None = None) -> Iterator[str]:
    for name, field in known.items():
        meta = field.metadata
        if group in (None, meta["group"]):
            default = (
                str(field.default).lower() if isinstance(field.default, bool) else field.default
            )
            about = meta["help"]
            about += f"; also `{meta['env']}`" if meta["env"] else ""
            about += f" ({tasks.DEFAULT.name} only)" if meta["own"] else ""
            shown = "" if default == "" else f"`{default}`"
            yield row(f"`{name}`", shown, describe(name, known), about)


def fields() -> list[str]:
    """training/config/schema.py and the options of the built-in tasks."""
    lines = ["## Actions", "", *header("flag", "meaning")]
    lines += [row(f"`--{name}`", text) for name, text in ACTIONS.items()]
    columns = header("field", "default", "accepted values", "meaning")
    for group, title in GROUPS.items():
        lines += ["", f"## {title}", "", *columns, *_fields(FIELDS, group)]
    for spec in tasks.BUILT_IN.values():
        if spec.own:
            lines += ["", f"## Options of `--task={spec.name}`", "", *columns, *_fields(spec.own)]
    return lines


def variables() -> list[str]:
    """training/host/variables.json."""
    table: Record = json.loads(env_catalog.TABLE.read_text(encoding="utf-8"))
    lines: list[str] = []
    for group in table["groups"]:
        lines += ["", f"## {group['title']}", "", *header("variable", "effect")]
        lines += [row(f"`{name}`", does) for name, does in group["variables"].items()]
        if group["undocumented"]:
            names = ", ".join(f"`{name}`" for name in group["undocumented"])
            lines += ["", f"Known to {group['of']} but not documented by it: {names}."]
    lines += ["", "## Without effect, or renamed", ""]
    lines += header("variable", "problem", "instead")
    lines += [
        row(f"`{name}`", entry["why"], f"`{entry['instead'].format(value='VALUE')}`")
        for name, entry in table["wrong"].items()
    ]
    return lines[1:]


def causes() -> list[str]:
    """training/diagnose/signatures/causes.json; the number of test logs of each."""
    listed: Record = json.loads(LOGS.read_text(encoding="utf-8"))
    found = [name.partition("/")[0] for name in listed]
    lines = header("cause", "meaning", "first advice", "test logs")
    for cause in json.loads(CAUSES.read_text(encoding="utf-8")):
        advice = cause["advice"]["en"]
        # Of `with a {value} || without it` the second one.
        shown = advice[0].rpartition(" || ")[2] if advice else ""
        logs = found.count(cause["id"]) or ""
        lines.append(row(f"`{cause['id']}`", cause["title"]["en"], shown, logs))
    return lines


def catalogue() -> list[str]:
    """The size of training/diagnose/signatures/."""
    read = signatures.signatures()
    patterns = sum(len(one.patterns) for one in read)
    return [f"It has {len(read)} texts with {patterns} patterns."]


def exit_codes() -> list[str]:
    return header("exit code", "meaning") + [
        row(int(code), meaning) for code, meaning in EXIT_MEANING.items()
    ]


def _at(section: str) -> str:
    return f"`{section}`" if section else "at the top"


def kair_renamed() -> list[str]:
    """Keys that have another name here, or a remark."""
    lines = header("key", "sets", "")
    for name, key in KEYS.items():
        absent = "" if key.absent is None else f"not there: {str(key.absent).lower()}"
        if key.field and (key.why or absent or leaf(name) != key.field):
            lines.append(f"| `{name}` | `{key.field}` | {key.why or absent} |")
    return lines


def _by_section(chosen: list[str]) -> list[str]:
    sections: dict[str, list[str]] = {}
    for name in chosen:
        sections.setdefault(name.rpartition(".")[0], []).append(f"`{leaf(name)}`")
    return header("section", "keys") + [row(_at(s), ", ".join(n)) for s, n in sections.items()]


def kair_same() -> list[str]:
    """Keys that have the same name here."""
    return _by_section(
        [n for n, k in KEYS.items() if leaf(n) == k.field and not k.why and k.absent is None]
    )


def kair_special() -> list[str]:
    return header("key", "") + [
        f"| `{name}` | {key.why} |"
        for name, key in KEYS.items()
        if key.why and not key.field and key.harmless is None
    ]


def kair_missing() -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, key in KEYS.items():
        if key.harmless is not None:
            section, _, word = name.rpartition(".")
            both = all(f"datasets.{part}.{word}" in KEYS for part in ("train", "test"))
            names = groups.setdefault(
                ("datasets.*" if both and section.startswith("datasets") else section, key.why), []
            )
            names += [f"`{word}`"] if f"`{word}`" not in names else []
    return header("keys", "") + [
        f"| `{section}`: {', '.join(names)} | {why} |" for (section, why), names in groups.items()
    ]


def kair_unused() -> list[str]:
    return _by_section([name for name, key in KEYS.items() if key == UNUSED])


def spirals() -> list[str]:
    """The example of a task."""
    return ["```python", *(ROOT / "examples/spirals.py").read_text().splitlines(), "```"]


TABLES = {
    "fields": fields,
    "variables": variables,
    "catalogue": catalogue,
    "causes": causes,
    "elastic": lambda: elastic_table.single(elastic_table.kept()),
    "elastic_random": lambda: elastic_table.drawn(elastic_table.kept()),
    "exit_codes": exit_codes,
    "gpu": lambda: gpu_table.lines(gpu_table.results()),
    "metrics": lambda: prom_metrics.table().splitlines(),
    "names": foreign_names.table,
    "spirals": spirals,
    "target": lambda: target.published("nanochat"),
    "target_windows": lambda: target.published("nanochat_windows"),
    "target_long": lambda: target.published_long("stdlib"),
    "target_sources": lambda: target.published_long("sources"),
    "kair_renamed": kair_renamed,
    "kair_same": kair_same,
    "kair_special": kair_special,
    "kair_missing": kair_missing,
    "kair_unused": kair_unused,
}


def current(page: str, text: str) -> str:
    """`text` of the file `page` with its tables as the code has them now."""
    if page == "codes.md":
        head, found, _ = text.partition("\n## ")
        return "\n".join([head, *codes.table()[1:], ""]) if found else text
    return BLOCK.sub(lambda m: "\n".join([m[1], *TABLES[m[2]](), "", m[3]]), text)


def main() -> int:
    out_of_date = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := current(page.name, text)) != text:
            out_of_date.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    for name in out_of_date:
        print(name, "is out of date: make docs" if "--check" in sys.argv else "written")
    return int("--check" in sys.argv and bool(out_of_date))


if __name__ == "__main__":
    sys.exit(main())

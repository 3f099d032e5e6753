"""gpu.html: one page that needs no other file."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.gpu import draw
from benchmarks.gpu.speed import BARE_IS, CONFIGS
from training.tasks.memory import gib

CSS = Path(__file__).with_name("page.css")
# Not in the plain table.
SHOWN_ELSEWHERE = (
    "curves",
    "relative_difference",
    "loops",
    "load",
    "memory",
    "tests",
    "rows",
    "notes",
)


def html(result: Mapping[str, Any]) -> str:
    """The page of a gpu.json."""
    stages = result["stages"]
    parts = [f"<h1>Duet on {escape(result['name'])}</h1>", *_banners(result), _facts(result)]
    parts += _overview(stages)
    for record in stages.values():
        parts += _stage(record)
    title = escape(f"Duet on {result['name']}")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>"
        f"<style>{CSS.read_text(encoding='utf-8')}</style><body>{''.join(parts)}</body></html>\n"
    )


def _banners(result: Mapping[str, Any]) -> Iterator[str]:
    if result["machine"]["null_gpu"]:
        yield (
            '<p class="banner">null GPU: a device that computes nothing. This page shows that the '
            "stages run; no figure on it means anything.</p>"
        )
    if result["smoke"]:
        yield '<p class="banner">Smoke run with tiny sizes: its figures mean nothing.</p>'


def _facts(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    kinds = Counter(map(_kind, machine["gpus"]))
    torch = f"{machine['torch']}, CUDA {machine['cuda']}, NCCL {machine['nccl']}"
    rows = {
        "Driver": machine["driver"] or "not reported",
        "torch": f"{torch}, Python {machine['python']}",
        "Host": f"{machine['cpu']}, {machine['cores']} cores, {gib(machine['memory_bytes'])}",
        "Commit": result["commit"],
        "Written": time.strftime("%Y-%m-%d %H:%M", time.localtime(result["created"])),
        "Not installed": ", ".join(machine["missing"]) or "nothing that Duet uses",
    }
    return _table([*(("GPU", f"{count} × {kind}") for kind, count in kinds.items()), *rows.items()])


def _kind(gpu: Mapping[str, Any]) -> str:
    capability = ".".join(map(str, gpu["capability"]))
    return f"{gpu['name']}, {gib(gpu['memory_bytes'])}, compute capability {capability}"


def _overview(stages: Mapping[str, Any]) -> Iterator[str]:
    """MFU and memory of the three configurations."""
    found = {
        name: stages[f"mfu_{name}"]["figures"]
        for name in CONFIGS
        if stages.get(f"mfu_{name}", {}).get("figures")
    }
    if not found:
        return
    loops = {config: figures["loops"] for config, figures in found.items()}
    if all(loop["mfu"] is not None for group in loops.values() for loop in group.values()):
        yield "<h2>Share of the GPU's arithmetic (MFU)</h2>"
        shares = {c: {n: loop["mfu"] for n, loop in group.items()} for c, group in loops.items()}
        yield draw.bars(shares, lambda share: f"{100 * share:.1f} %")
        yield f'<p class="muted">{BARE_IS}</p>'
    else:
        yield "<h2>Tokens per second</h2>"
        speeds = {c: {n: loop["tokens_per_s"] for n, loop in g.items()} for c, g in loops.items()}
        yield draw.bars(speeds, lambda speed: f"{speed:,.0f}")
    yield "<h2>Peak memory against the plan's estimate</h2>"
    sizes = {
        config: {"estimate": f["memory"]["estimate_bytes"], "peak": f["memory"]["peak_bytes"]}
        for config, f in found.items()
    }
    rows = stages.get("memory", {}).get("figures", {}).get("rows", {})
    sizes |= {
        name: {"estimate": row["estimate_bytes"], "peak": row["peak_bytes"]}
        for name, row in rows.items()
    }
    yield draw.bars(sizes, lambda size: gib(int(size)))


def _stage(record: Mapping[str, Any]) -> Iterator[str]:
    status = f"{record['status']}, {record['seconds']:.0f} s"
    mark = f'<span class="status {record["status"]}">{status}</span>'
    yield f"<h2>{escape(record['title'])} {mark}</h2>"
    for line in record.get("in_use", []):
        yield f'<p class="banner">Measured beside other work. {escape(line)}</p>'
    if record["reason"]:
        yield f"<pre>{escape(record['reason'])}</pre>"
    yield "<ul>"
    for check in record["checks"]:
        mark, kind = ("✓", "done") if check["ok"] else ("✗", "bad")
        yield (
            f'<li><span class="{kind}">{mark}</span> {escape(check["name"])}: '
            f'<span class="muted">{escape(check["text"])}</span></li>'
        )
    yield "</ul>"
    figures = record["figures"]
    if figures.get("curves"):
        yield draw.lines(figures["curves"], "step")
    yield _table(_flat({k: v for k, v in figures.items() if k not in SHOWN_ELSEWHERE}))
    yield _grid(figures.get("loops", {}))
    yield _grid(figures.get("rows", {}))
    yield _grid({test["name"]: _of_test(test) for test in figures.get("tests", [])})
    version = record["key"].get("nanochat")
    notes = [f"nanochat at {version}"] if version else []
    for note in notes + figures.get("notes", []):
        yield f'<p class="muted">{escape(note)}</p>'


def _of_test(test: Mapping[str, Any]) -> dict[str, Any]:
    shown = {"outcome": test["outcome"], "seconds": test["seconds"], **test["properties"]}
    return shown | ({"reason": test["reason"]} if test["reason"] else {})


def _flat(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested figures as (name, text)."""
    for key, value in figures.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}, ")
        else:
            yield _words(name), _text(key, value)


def _words(name: str) -> str:
    name = name.replace("_per_s", " per second") if name.endswith("_per_s") else name
    for unit in ("_ms", "_s", "_bytes"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def _text(name: str, value: Any) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(name, one) for one in value)
    if not isinstance(value, (int, float)):
        return str(value)
    if name.endswith("_bytes"):
        return gib(int(value))
    if name == "mfu":
        return f"{100 * value:.1f} %"
    unit = " ms" if name.endswith("_ms") else " s" if name.endswith(("_s", "seconds")) else ""
    unit = "" if name.endswith("_per_s") else unit
    if isinstance(value, int) or not math.isfinite(value):
        return f"{value:,}{unit}"
    return f"{value:,.0f}{unit}" if abs(value) >= 1000 else f"{value:.4g}{unit}"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><td class="muted">{escape(name)}</td><td>{escape(text)}</td></tr>'
        for name, text in rows
    )
    return draw.wide(f"<table>{cells}</table>") if cells else ""


def _grid(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each entry with its figures as columns."""
    if not rows:
        return ""
    flat = {name: dict(_flat(row)) for name, row in rows.items()}
    columns = list(dict.fromkeys(key for row in flat.values() for key in row))
    head = "".join(f"<th>{escape(column)}</th>" for column in ("", *columns))
    body = "".join(
        f'<tr><td class="muted">{escape(name)}</td>'
        + "".join(f"<td>{escape(row.get(column, ''))}</td>" for column in columns)
        + "</tr>"
        for name, row in flat.items()
    )
    return draw.wide(f"<table><tr>{head}</tr>{body}</table>")

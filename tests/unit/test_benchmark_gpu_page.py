"""The page of `make gpu` and the tables of docs/gpus.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import bench, page, speed, table
from tests.unit.test_benchmark_gpu import GPU, made
from training.tasks.memory import gib


def result(**changes: Any) -> dict[str, Any]:
    loops = {
        "Duet": {"step_ms": 100.0, "tokens_per_s": 12345.0, "mfu": 0.412},
        "bare loop": {"step_ms": 101.0, "tokens_per_s": 12222.0, "mfu": 0.408},
    }
    loops["Duet"]["rounds_ms"] = [99.0, 100.0, 101.0]
    sizes = {"estimate_bytes": 20 << 30, "peak_bytes": 19 << 30}
    records = {
        "mfu_balanced": {"figures": {"loops": loops, "memory": sizes}, "status": "done"},
        "oom": {"figures": {}, "status": "failed", "reason": "exit status 4\nlog & <more>"},
        "correctness": {"figures": {"curves": {"CPU": [3.0, 2.0], "GPU": [3.0, 2.0]}}},
    }
    common = {"title": "T", "key": {}, "status": "done", "reason": "", "checks": [], "seconds": 1.0}
    checks = [bench.check("no slower than a bare loop", True, "0.990 × its time")]
    records["mfu_balanced"]["checks"] = checks
    gpus = made()
    facts = {"format": 1, "created": 0.0, "name": gpus.title, "machine": gpus.record()}
    own = {name: common | record for name, record in records.items()}
    return facts | {"commit": "abc", "smoke": False, "stages": own} | changes


def test_the_page_has_pictures_and_needs_no_other_file() -> None:
    html = page.html(result())
    assert html.count("<svg") == 3 and "41.2 %" in html and gib(19 << 30) in html
    assert speed.BARE_IS in html
    assert "log &amp; &lt;more&gt;" in html and "banner" not in html.partition("<body>")[2]
    assert not {"http:", "https:", "src=", "href="} & set(html.replace('"', " ").split())
    null = page.html(result(machine=made(null_gpu=True).record()))
    assert "null GPU: a device that computes nothing" in null


def test_wide_parts_scroll_on_a_phone() -> None:
    html = page.html(result())
    assert '<meta name="viewport" content="width=device-width' in html
    parts = html.count("<svg") + html.count("<table")
    assert parts == 5 == len(re.findall('<div class="wide"><(?:svg|table)', html)) == parts


def test_the_tables_of_the_documentation(tmp_path: Path) -> None:
    assert table.lines(table.results(tmp_path)) == [table.NONE]
    (tmp_path / "h100.json").write_text(json.dumps(result()))
    rows = table.lines(table.results(tmp_path))
    name = "1 × NVIDIA H100 80GB HBM3"
    times = "mfu_balanced 1, oom 1, correctness 1"
    assert f"| {name} | 580.1 | 2.11.0 | `abc` | {times} |" in rows
    sizes = f"{gib(19 << 30)} | {gib(20 << 30)}"
    assert f"| {name} | balanced | 12,345 | 100.0 ms | 3 | 41.2 % | 40.8 % |  | {sizes} |" in rows
    assert f"| {name} | T | failed | exit status 4 |" in rows
    assert any(speed.BARE_IS in row for row in rows)
    for meaningless in ({"smoke": True}, {"machine": made(null_gpu=True).record()}):
        (tmp_path / "h100.json").write_text(json.dumps(result(**meaningless)))
        with pytest.raises(ValueError, match=r"h100\.json"):
            table.results(tmp_path)


def test_the_page_lists_each_kind_of_gpu() -> None:
    small = {"name": "NVIDIA A10", "memory_bytes": 24 << 30, "capability": [8, 6]}
    html = page.html(result(machine=made().record() | {"gpus": [GPU, small, GPU]}))
    rows = re.findall("<tr>(.+?)</tr>", html)
    of = [re.findall("<td.*?>(.*?)</td>", row)[1] for row in rows if "×" in row]
    assert of == [
        f"2 × {GPU['name']}, {gib(80 << 30)}, compute capability 9.0",
        f"1 × NVIDIA A10, {gib(24 << 30)}, compute capability 8.6",
    ]

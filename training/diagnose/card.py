"""Failure card: cause, rank, evidence and advice on one screen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from training.core.failure_kinds import GONE, SILENT
from training.diagnose.signatures import NONE

if TYPE_CHECKING:
    from training.core.contracts.verdict import DiagnosisRecord, FailureRecord

WIDTH = 160
COLUMN = 11  # cells
NAMES = ("cause", "who", "where", "others", "evidence", "try", "stacks", "log", "also", "source")
PHRASES = ("rank", "no_rank", "line", "in", "on", "node")
WORDS = {
    "en": dict(
        zip(
            NAMES,
            (
                "Cause",
                "Who",
                "Where",
                "Others",
                "Evidence",
                "Try",
                "Stacks",
                "Log",
                "Also",
                "Source",
            ),
            strict=True,
        )
    )
    | dict(
        zip(
            PHRASES,
            ("rank {}", "no single rank", ", line {}", ", in {}", " on node {}", "node {}"),
            strict=True,
        )
    ),
    "zh": dict(
        zip(
            NAMES,
            ("原因", "进程", "代码", "其他", "依据", "建议", "调用栈", "日志", "另见", "出处"),
            strict=True,
        )
    )
    | dict(
        zip(
            PHRASES,
            ("rank {}", "无法确定单个 rank", " 第 {} 行", "，阶段：{}", "，节点 {}", "节点 {}"),
            strict=True,
        )
    ),
}


def language(environ: Mapping[str, str] = os.environ) -> str:
    """zh for a Chinese locale, else en."""
    chosen = next((environ[n] for n in ("LC_ALL", "LC_MESSAGES", "LANG") if environ.get(n)), "")
    return "zh" if chosen.lower().startswith("zh") else "en"


def row(name: str, text: str, spoken: str) -> str:
    """A name and its text in two columns, aligned for double-width characters too."""
    word = WORDS[spoken].get(name, name)
    cells = len(word) if word.isascii() else 2 * len(word)
    return word + " " * max(1, COLUMN - cells) + text


def of_run(record: FailureRecord, spoken: str | None = None) -> str:
    """Card of a failed run (failure.json)."""
    spoken = spoken or language()
    words = WORDS[spoken]
    who = words["no_rank"] if record["rank"] is None else words["rank"].format(record["rank"])
    who += words["on"].format(record["node"]) if "node" in record else ""
    who = words["node"].format(record["node"]) if record["kind"] in (SILENT, GONE) else who
    lines = [
        row("cause", f"{record['cause']}: {record['summary']}", spoken),
        row("who", who + (words["in"].format(record["phase"]) if record["phase"] else ""), spoken),
    ]
    if record["where"]:
        lines.append(row("where", record["where"], spoken))
    places = record["waiting"] or record["phases"]
    if others := [f"rank {r}: {p}" for r, p in places.items() if str(record["rank"]) != r]:
        lines.append(row("others", "; ".join(others), spoken))
    if record["evidence"]:
        lines += [WORDS[spoken]["evidence"], *(f"    │ {cut(line)}" for line in record["evidence"])]
    lines += [row("try" if i == 0 else "", text, spoken) for i, text in enumerate(record["advice"])]
    lines += [row("stacks", record["stacks"], spoken)] if record["stacks"] else []
    lines.append(row("log", record["log"], spoken))
    return "\n".join(f"  {line}" for line in lines)


def cut(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def draw(record: DiagnosisRecord, spoken: str) -> str:
    """Card of a diagnosis (training.diagnose.result)."""
    words = WORDS[spoken]
    if record["cause"] == NONE:
        return f"  {record['title']}" + (
            f" ({record['summary']})" if record["summary"] != record["title"] else ""
        )
    summary = record["summary"] if record["summary"] != record["title"] else ""
    lines = [row("cause", f"{record['cause']}: {record['title']}", spoken)]
    if summary:
        lines.append(row("", cut(summary), spoken))
    lines.append(
        row(
            "who",
            words["no_rank"] if record["rank"] is None else words["rank"].format(record["rank"]),
            spoken,
        )
    )
    if record["where"]:
        lines.append(row("where", record["where"], spoken))
    place = (record["file"] or "") + (
        words["line"].format(record["line"]) if record["line"] else ""
    )
    if place or record["lines"]:
        lines += [
            row("evidence", place, spoken),
            *(f"    │ {cut(line)}" for line in record["lines"]),
        ]
    lines += [row("try" if i == 0 else "", text, spoken) for i, text in enumerate(record["advice"])]
    if record["also"]:
        lines.append(row("also", ", ".join(record["also"]), spoken))
    lines.append(row("source", record["source"], spoken))
    return "\n".join(f"  {line}" for line in lines)

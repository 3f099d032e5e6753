"""Tables of docs/gpus.md from the results in benchmarks/results/."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.speed import BARE, BARE_IS, CONFIGS, DUET, NANOCHAT
from training.tasks.memory import gib

RESULTS = Path(__file__).resolve().parents[1] / "results"
NONE = (
    "No complete measurement of a machine with a GPU yet: `make gpu` makes one, and a copy of its "
    "`gpu.json` in `benchmarks/results/` puts it here."
)


def results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Measurements of real GPUs, by file name. Raises ValueError for a smoke run or a null GPU,
    whose figures mean nothing."""
    found = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["smoke"] or result["machine"]["null_gpu"]:
            raise ValueError(
                f"{path.name} is a smoke run or from a null GPU: its figures mean nothing"
            )
        found.append(result)
    return found


def lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: the machines, their MFU and memory, and every check."""
    if not found:
        return [NONE]
    out = ["| machine | driver | torch | commit | seconds of its stages |", "|---|---|---|---|---|"]
    for result in found:
        machine, stages = result["machine"], result["stages"]
        driver = machine["driver"] or "not reported"
        times = ", ".join(f"{name} {record['seconds']:.0f}" for name, record in stages.items())
        own = (result["name"], driver, machine["torch"], f"`{result['commit']}`", times)
        out.append(f"| {' | '.join(own)} |")
    loops = ("tokens/s", "step", "rounds", "MFU", "bare loop", "nanochat")
    heads = ("machine", "config", *loops, "memory", "estimate")
    out += ["", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *_speeds(found)]
    out += ["", BARE_IS]
    out += ["", "| machine | checked | result | |", "|---|---|---|---|", *_checks(found)]
    return out


def _speeds(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for result in found:
        for config in CONFIGS:
            record = result["stages"].get(f"mfu_{config}")
            if not record or not record["figures"]:
                why = record["reason"].splitlines()[0] if record else "not measured"
                yield f"| {result['name']} | {config} | {why} | | | | | | | |"
                continue
            loops, memory = record["figures"]["loops"], record["figures"]["memory"]
            shares = (_mfu(loops.get(name)) for name in (DUET, BARE, NANOCHAT))
            sizes = (gib(memory["peak_bytes"]), gib(memory["estimate_bytes"]))
            speed = f"{loops[DUET]['tokens_per_s']:,.0f}"
            step = f"{loops[DUET]['step_ms']:.1f} ms"
            rounds = str(len(loops[DUET]["rounds_ms"]))
            cells = (result["name"], config, speed, step, rounds, *shares, *sizes)
            yield f"| {' | '.join(cells)} |"


def _mfu(loop: Mapping[str, Any] | None) -> str:
    if loop is None:
        return ""
    return f"{loop['step_ms']:.1f} ms" if loop["mfu"] is None else f"{100 * loop['mfu']:.1f} %"


def _checks(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row for each claim; stages without figures with their reason."""
    for result in found:
        for record in result["stages"].values():
            for check in record["checks"]:
                mark = "yes" if check["ok"] else "**no**"
                yield (
                    f"| {result['name']} | {record['title']}: {check['name']} | {mark} | "
                    f"{check['text']} |"
                )
            if record["status"] != "done":
                reason = record["reason"].splitlines()[0]
                yield f"| {result['name']} | {record['title']} | {record['status']} | {reason} |"

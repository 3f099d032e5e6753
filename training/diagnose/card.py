"""Failure card: cause, rank, evidence and advice on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.core.cause_ids import (
    CONFIG_ERROR,
    EXIT_STATUS,
    GPU_HARDWARE,
    KILLED,
    NONE,
    RAISED,
    UNKNOWN,
)
from training.core.failure_kinds import GONE, SILENT
from training.core.messages import msg
from training.core.plain_text import one_line, plain, shortened
from training.core.project import typed
from training.diagnose import gpu_occupants, signatures
from training.diagnose.card_rows import row
from training.tasks.memory import gib

if TYPE_CHECKING:
    from training.core.contracts.verdict import (
        DiagnosisRecord,
        ExhaustedMemoryRecord,
        FailureRecord,
    )

WIDTH = 160
WORDLESS = {UNKNOWN, RAISED, EXIT_STATUS, CONFIG_ERROR}  # their titles are less than the summary


def of_run(record: FailureRecord) -> str:
    """Card of a failed run (failure.json)."""
    who = _who(record)
    if record["kind"] in (SILENT, GONE):
        who = msg("diagnose.card.node", node=record["node"])
    elif "node" in record:
        who += msg("diagnose.card.on_node", node=record["node"])
    who += _doing(record)
    lines = [*_cause(record), row(msg("diagnose.card.who"), who)]
    if record["where"]:
        lines.append(row(msg("diagnose.card.where"), record["where"]))
    for rank, text in record.get("threads", {}).items():
        lines.append(row(msg("diagnose.card.thread"), f"rank {rank}: {cut(text)}"))
    places = record["waiting"] or record["phases"]
    same = [str(rank) for rank in _same(record)]
    if others := [f"rank {r}: {p}" for r, p in places.items() if r not in same]:
        lines.append(row(msg("diagnose.card.others"), "; ".join(others)))
    if record["evidence"]:
        of = "" if record["stacks"] else msg("diagnose.card.last_lines")
        lines += [row(msg("diagnose.card.evidence"), of).rstrip(), *_quoted(record["evidence"])]
    lines += _kernel(record)
    lines += _memory(record)
    lines += _advice(record["advice"])
    if record["stacks"]:
        lines.append(row(msg("diagnose.card.stacks"), record["stacks"]))
    lines.append(row(msg("diagnose.card.log"), record["log"]))
    return _text(lines)


def cut(text: str) -> str:
    return shortened(text, WIDTH)


def draw(record: DiagnosisRecord) -> str:
    """Card of a diagnosis (training.diagnose.result)."""
    jobs = [_jobs(record["jobs"], "jobs_at_least" in record)] if "jobs" in record else []
    if record["cause"] == NONE:
        summary = record["summary"] if record["summary"] != record["title"] else ""
        notes = "; ".join(filter(None, [summary, *jobs]))
        title = record["title"] + (f" ({notes})" if notes else "")
        return _text([title, *_advice(record["advice"])])
    summary = record["summary"] if record["summary"] != record["title"] else ""
    lines = [row(msg("diagnose.card.cause"), f"{record['cause']}: {record['title']}")]
    if summary:
        lines.append(row("", cut(summary)))
    lines += [row("", note) for note in jobs]
    lines.append(row(msg("diagnose.card.who"), _who(record) + _doing(record)))
    if record["where"]:
        lines.append(row(msg("diagnose.card.where"), record["where"]))
    place = (record["file"] or "") + (
        msg("diagnose.card.line", line=record["line"]) if record["line"] else ""
    )
    if place or record["lines"]:
        lines += [row(msg("diagnose.card.evidence"), place), *_quoted(record["lines"])]
    lines += _memory(record)
    lines += _advice(record["advice"])
    if record["also"]:
        lines.append(row(msg("diagnose.card.also"), ", ".join(record["also"])))
    lines.append(row(msg("diagnose.card.source"), record["source"]))
    return _text(lines)


def _text(lines: Sequence[str]) -> str:
    return "\n".join(f"  {plain(line)}" for line in lines)


def _jobs(jobs: int, at_least: bool) -> str:
    if at_least:
        return msg("diagnose.card.jobs_at_least", jobs=jobs)
    return msg("diagnose.card.jobs", jobs=jobs)


def _same(record: FailureRecord | DiagnosisRecord) -> Sequence[int | None]:
    """The ranks with the error, one of which is the guilty one."""
    return record.get("ranks", [record["rank"]])


def _who(record: FailureRecord | DiagnosisRecord) -> str:
    rank, same = record["rank"], _same(record)
    if len(same) > 1:
        return msg("diagnose.card.ranks", ranks=_list(same))
    return msg("diagnose.card.no_rank") if rank is None else f"rank {rank}"


def _list(ranks: Sequence[int | None]) -> str:
    first, last = ranks[0], ranks[-1]
    if first is not None and last == first + len(ranks) - 1 and len(ranks) > 2:
        return f"{first}–{last}"
    return ", ".join(map(str, ranks))


def _cause(record: FailureRecord) -> list[str]:
    """The cause with its title, as in a diagnosis, and the exception; other summaries are titles
    themselves."""
    cause, label = record["cause"], msg("diagnose.card.cause")
    if record["kind"] != "error" or cause in WORDLESS or cause not in signatures.causes():
        return [row(label, f"{cause}: {record['summary']}")]
    title = signatures.causes()[cause].title.sentences()[0]
    return [row(label, f"{cause}: {title}"), row("", cut(record["summary"]))]


def _doing(record: FailureRecord | DiagnosisRecord) -> str:
    """The process, the GPU and the phase of the rank, if recorded."""
    process, gpu, phase = record.get("process"), record.get("gpu"), record.get("phase")
    spawned = "" if process is None else msg("diagnose.card.spawned", process=process)
    on_gpu = "" if gpu is None else msg("diagnose.card.on_gpu", gpu=gpu)
    return spawned + on_gpu + (msg("diagnose.card.in_phase", phase=phase) if phase else "")


def _kernel(record: FailureRecord) -> list[str]:
    """Messages of the kernel; that there are none only where they were to be expected."""
    found = record.get("kernel")
    if not found or not found["source"]:
        return []
    label, source = msg("diagnose.card.kernel"), found["source"]
    if found["lines"]:
        return [row(label, source), *_quoted(found["lines"])]
    if record["cause"] in (GPU_HARDWARE, KILLED):
        return [row(label, msg("diagnose.card.kernel_silent", source=source))]
    return []


def _memory(record: FailureRecord | DiagnosisRecord) -> list[str]:
    """The state of an exhausted GPU, in the units of torch's error, its snapshot, and the other
    processes on it."""
    label, texts = msg("diagnose.card.memory"), list[str]()
    if memory := record.get("memory"):
        texts.append(_state(memory))
        if file := memory.get("file"):
            texts.append(msg("diagnose.card.memory_file", file=file))
    if "occupied" in record:
        texts.append(gpu_occupants.text(record["occupied"]))
    return [row("" if i else label, text) for i, text in enumerate(texts)]


def _state(memory: ExhaustedMemoryRecord) -> str:
    state = msg(
        "diagnose.card.memory_state",
        allocated=gib(memory["allocated_bytes"]),
        reserved=gib(memory["reserved_bytes"]),
        free=gib(memory["largest_free_bytes"]),
    )
    if memory["largest"]:
        each = (f"{block['count']} × {gib(block['bytes'])}" for block in memory["largest"])
        state += msg("diagnose.card.memory_largest", largest=", ".join(each))
    return state


def _quoted(lines: Sequence[str]) -> list[str]:
    return [f"    │ {cut(one_line(line))}" for line in lines]


def _advice(sentences: Sequence[str]) -> list[str]:
    return [
        row(msg("diagnose.card.try") if i == 0 else "", typed(s)) for i, s in enumerate(sentences)
    ]

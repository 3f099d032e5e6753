"""The diagnosis of some logs as one record: what --json prints and what the card is drawn from."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.diagnose import catalogue, structured
from training.diagnose.advice import advice, filled, values
from training.diagnose.catalogue import NONE, UNKNOWN
from training.diagnose.judge import Event, Judgement, judge
from training.diagnose.line import shown
from training.diagnose.scan import scan
from training.diagnose.source import Source, logs_in, rank_of
from training.diagnose.story import Story, read
from training.rundir import RunDir, read_json

SHOWN_LINES = 10
SCHEMA_VERSION = 1


def diagnose(paths: Sequence[Path | None], language: str) -> dict[str, Any]:
    """`paths`: logs, folders of logs, run directories; None is standard input. Raises OSError."""
    run = next((r for path in paths if path and (r := structured.run_of(path))), None)
    plan = read_json(run.plan) if run else None
    whole = run is not None and any(path and path.absolute() == run.path.absolute() for path in paths)
    failure, own = structured.of_run(run) if run and whole else (None, [])
    if failure and run:
        return _of_failure(failure, run, plan, language)
    stories: list[Story] = []
    for path in paths:
        logs: Sequence[Path | None] = [path]
        errors: Sequence[Path] = []
        if path and path.is_dir():
            logs, errors = logs_in(path)
        own += structured.of_files(e for e in errors if run is None or run.path not in e.absolute().parents)
        for log in logs:
            name = str(log.relative_to(path) if path and log != path else log.name) if log else ""
            rank = rank_of(name, alone=len(paths) == len(logs) == 1)
            with contextlib.closing(Source(log, rank)) as source:  # one at a time: a folder may hold more than may be open
                stories.append(read(source, scan(source)))
    return _record(judge(stories, own), run, plan, language)


def _of_failure(failure: dict[str, Any], run: RunDir, plan: dict[str, Any] | None, language: str) -> dict[str, Any]:
    """Our own verdict, found while it happened."""
    known = values(run, plan) if plan else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "cause": failure["cause"],
        "rank": failure["rank"],
        "line": None,
        "evidence": failure["summary"],
        "confidence": "high",
        "summary": failure["summary"],
        "advice": advice(failure["cause"], None, {}, language, known),
        "also": [],
        "title": _title(failure["cause"], language),
        "file": str(run.failure),
        "where": failure["where"],
        "lines": failure["evidence"],
        "signature": None,
        "source": catalogue.causes()[failure["cause"]].source,
        "run": str(run.path),
    }


def _record(found: Judgement, run: RunDir | None, plan: dict[str, Any] | None, language: str) -> dict[str, Any]:
    event = found.event
    signature = event.signature if event else None
    groups = event.hit.groups if event and event.hit else {}
    line = (event.hit.line if event.hit else event.line) if event else None
    return {
        "schema_version": SCHEMA_VERSION,
        "cause": found.cause,
        "rank": found.rank,
        "line": line.number if line else None,
        "evidence": shown(line.text if line else "", event.hit.start if event and event.hit else 0),
        "confidence": found.confidence,
        "summary": _summary(found, groups, language),
        "advice": advice(found.cause, signature, groups, language, values(run, plan) if run and plan else None),
        "also": found.also,
        "title": _title(found.cause, language),
        "file": event.story.source.name if event and event.story else None,
        "where": event.where if event else None,
        "lines": _around(event) if event else [],
        "signature": signature.id if signature else None,
        "source": signature.source if signature else catalogue.causes()[found.cause].source,
        "run": str(run.path) if run else None,
    }


def _title(cause: str, language: str) -> str:
    return catalogue.causes()[cause].title.in_language(language)[0]


def _summary(found: Judgement, groups: dict[str, str], language: str) -> str:
    signature = found.event.signature if found.event else None
    if signature and (says := filled(signature.says, groups, language)):
        return says[0]
    if found.cause == UNKNOWN and found.event:
        return shown(found.event.line.text)
    if found.cause == NONE and found.recovered:
        times = {"en": "{n} failure(s) were overcome: training went on after them", "zh": "出现过 {n} 次错误，但之后训练继续进行"}
        return times[language].format(n=len(found.recovered))
    return _title(found.cause, language)


def _around(event: Event) -> list[str]:
    """The proof: the end of the traceback, or what stands around the line."""
    story = event.story
    if story is None:
        return event.text.splitlines()[-SHOWN_LINES:]
    own = [line for line in story.lines if line.rank == event.line.rank or event.line.rank is None]
    index = next((i for i, line in enumerate(own) if line.offset == event.line.offset), None)
    if index is None:
        return [shown(event.line.raw)]
    before = SHOWN_LINES - 2 if event.thrown else SHOWN_LINES // 2 - 1
    return [shown(line.text) for line in _near(own, index, before)]


def _near(lines: Sequence[Any], index: int, before: int) -> Sequence[Any]:
    return lines[max(0, index - before) : index + SHOWN_LINES - before]

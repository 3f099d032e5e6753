"""Digest of a Chrome trace of torch.profiler: where the time of a step went, the longest kernels or
operators, and what the rank waited for.

A GPU's time is divided by its kernels: a kernel belongs to the phase in which it was launched. A
collective counts only while nothing else runs, and the rest of the step the GPU is idle. Without a
GPU the time of the rank itself is divided by its phases; it waits for a collective while one is
under way and no operator runs.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar, cast

if TYPE_CHECKING:
    from training.core.contracts.run_files import ProfileRecord, ProfileWait

Key = TypeVar("Key")
Interval = tuple[float, float]  # begin and end, µs

MARK = "duet: "  # start of the names of the ranges that show the phases of the heartbeat
STEP = "ProfilerStep#"
COMMUNICATION, IDLE, OTHER = "communication", "idle", "other"
PARTS = ("data", "forward", "backward", "optimizer", COMMUNICATION, OTHER)
_PART_OF = {
    "fetch": "data",
    "forward": "forward",
    "backward": "backward",
    "reduce": "optimizer",  # clips the gradients
    "optimizer": "optimizer",
}
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_COLLECTIVE = re.compile(r"nccl|^gloo:|^c10d::|^mpi:|AllReduce_|rccl", re.IGNORECASE)
# Calls in which the host waits for the GPU; a copy that is not asynchronous does too, and so does
# giving memory back, which happens in a step if the allocator runs out of it.
_SYNCHRONISES = re.compile(
    r"^cu(da)?((Stream|Device|Event|Ctx)Synchronize|(Mem(cpy|set)|(Mem)?Free)(?!.*Async))"
)
LONGEST, WAITS = 10, 20  # entries
NAME = 160  # characters; the names of templates are long
GAP_US = 100.0  # between operators: shorter ones are Python's own time, not a wait


class TraceEvent(TypedDict, total=False):
    """A complete event (`ph` X) of the trace."""

    name: str
    cat: str
    ts: float  # µs
    dur: float
    tid: int
    args: dict[str, object]


def of_trace(trace: Path, rank: int, device: str, first_step: int) -> ProfileRecord:
    """The digest of a trace file. `first_step`: number of the first step in it. Raises OSError, and
    ValueError for a file without steps."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        content = json.load(file)
    events = cast(
        "list[TraceEvent]",
        [e for e in content["traceEvents"] if e.get("ph") == "X" and "dur" in e],
    )
    return digest(events, rank, device, first_step, trace.name)


def digest(
    events: Sequence[TraceEvent], rank: int, device: str, first_step: int, trace: str
) -> ProfileRecord:
    by_kind: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        by_kind[event.get("cat", "")].append(event)
    marks = by_kind["user_annotation"]
    steps = [e for e in marks if e["name"].startswith(STEP)]
    if not steps:
        raise ValueError("no step in the trace")  # language: quoted
    phases = Phases([e for e in marks if e["name"].startswith(MARK)])
    window = (steps[0]["ts"], max(map(_end, steps)))
    on_gpu = [e for kind in _GPU for e in by_kind[kind]]
    if on_gpu:
        window = (window[0], max(window[1], *map(_end, on_gpu)))
        parts, overlapped = _gpu_parts(on_gpu, by_kind, phases, window)
        waits, longest = _synchronisations(by_kind, phases), _totals(on_gpu)
    else:
        parts, overlapped, idle = _host_parts(by_kind, phases, window)
        waits, longest = _waits(idle, phases), _self_times(by_kind["cpu_op"])
    whole, count = window[1] - window[0], len(steps)
    return {
        "rank": rank,
        "device": device,
        "timeline": "gpu" if on_gpu else "host",
        "first_step": first_step,
        "last_step": first_step + count - 1,
        "step_ms": round(whole / count / 1000, 4),
        "shares": {part: round(took / whole, 4) for part, took in parts.items()},
        "overlapped": round(overlapped / whole, 4),
        "longest": [
            {
                "name": name,
                "count": round(calls / count, 2),
                "ms": round(took / count / 1000, 4),
                "share": round(took / whole, 4),
            }
            for name, (calls, took) in _most(longest, LONGEST)
        ],
        "waits": [
            _wait(key, round(calls / count, 2), round(took / count / 1000, 4))
            for key, (calls, took) in _most(waits, WAITS)
        ],
        "trace": trace,
    }


class Phases:
    """The phases of the rank over time; they do not overlap."""

    def __init__(self, marks: Sequence[TraceEvent]) -> None:
        self._marks, self._starts = marks, [e["ts"] for e in marks]

    def part(self, at: float) -> str:
        """The part of the step at this time."""
        i = bisect_right(self._starts, at) - 1
        return _part(self._marks[i]["name"]) if i >= 0 else OTHER

    def profiles(self, at: float) -> bool:
        """Whether the profiler itself is at work: outside of all phases."""
        i = bisect_right(self._starts, at) - 1
        return i < 0 or at > _end(self._marks[i])

    def times(self) -> dict[str, list[Interval]]:
        """Part → when."""
        out: dict[str, list[Interval]] = defaultdict(list)
        for mark in self._marks:
            out[_part(mark["name"])].append((mark["ts"], _end(mark)))
        return out


def _part(name: str) -> str:
    return _PART_OF.get(name.removeprefix(MARK), OTHER)


def _gpu_parts(
    on_gpu: Sequence[TraceEvent],
    by_kind: dict[str, list[TraceEvent]],
    phases: Phases,
    window: Interval,
) -> tuple[dict[str, float], float]:
    """(part → µs, µs in which a collective and other kernels run)."""
    launched = {_correlation(e): e["ts"] for kind in _CALLS for e in by_kind[kind]}
    kernels: dict[str, list[Interval]] = defaultdict(list)
    for event in on_gpu:
        at = launched.get(_correlation(event), event["ts"])
        part = COMMUNICATION if _COLLECTIVE.search(event["name"]) else phases.part(at)
        kernels[part].append((event["ts"], _end(event)))
    covered: list[Interval] = []
    out = dict.fromkeys(PARTS, 0.0)
    # Time in which kernels of several parts run belongs to the first of them; copies of data come
    # last, since they run beside the model.
    for part in ("forward", "backward", "optimizer", OTHER, "data"):
        out[part] = _length(_without(kernels[part], covered))
        covered = _union([*covered, *kernels[part]])
    alone = _length(_without(kernels[COMMUNICATION], covered))
    out[COMMUNICATION] = alone
    busy = _length(_union([*covered, *kernels[COMMUNICATION]]))
    out[IDLE] = max(0.0, window[1] - window[0] - busy)
    return out, _length(_union(kernels[COMMUNICATION])) - alone


def _host_parts(
    by_kind: dict[str, list[TraceEvent]], phases: Phases, window: Interval
) -> tuple[dict[str, float], float, list[Interval]]:
    """(part → µs, µs in which a collective is under way beside operators, the waits)."""
    operators = _union([(e["ts"], _end(e)) for e in by_kind["cpu_op"]])
    collectives = _union(
        [
            (e["ts"], _end(e))
            for e in by_kind["user_annotation"]
            if _COLLECTIVE.search(e["name"]) and not e["name"].startswith(MARK)
        ]
    )
    waits = [(a, b) for a, b in _without(collectives, operators) if b - a >= GAP_US]
    out = dict.fromkeys(PARTS, 0.0)
    for part, times in phases.times().items():
        out[part] += _length(_without(times, waits))
    out[COMMUNICATION] = _length(waits)
    out[OTHER] += max(0.0, window[1] - window[0] - sum(out.values()))
    return out, _length(collectives) - out[COMMUNICATION], waits


def _synchronisations(
    by_kind: dict[str, list[TraceEvent]], phases: Phases
) -> dict[tuple[str, str, str], tuple[int, float]]:
    """(call, operator, part) → (number, µs) of the calls that wait for the GPU."""
    found = [
        e
        for kind in _CALLS
        for e in by_kind[kind]
        if _SYNCHRONISES.match(e["name"]) and not phases.profiles(e["ts"])
    ]
    out: dict[tuple[str, str, str], tuple[int, float]] = {}
    stacks: dict[int, list[TraceEvent]] = defaultdict(list)
    # One pass by time, since a trace may have thousands of calls and a million operators; an
    # operator comes before the call that it begins with.
    for event in sorted([*by_kind["cpu_op"], *found], key=lambda e: e["ts"]):
        stack = stacks[event["tid"]]
        while stack and _end(stack[-1]) < event["ts"]:
            stack.pop()
        if event["cat"] not in _CALLS:
            stack.append(event)
            continue
        operator = stack[-1]["name"] if stack else ""
        _add(out, (event["name"], operator, phases.part(event["ts"])), event["dur"])
    return out


def _waits(
    waits: Sequence[Interval], phases: Phases
) -> dict[tuple[str, str, str], tuple[int, float]]:
    out: dict[tuple[str, str, str], tuple[int, float]] = {}
    for begin, end in waits:
        _add(out, (COMMUNICATION, "", phases.part(begin)), end - begin)
    return out


def _totals(events: Iterable[TraceEvent]) -> dict[str, tuple[int, float]]:
    out: dict[str, tuple[int, float]] = {}
    for event in events:
        _add(out, event["name"][:NAME], event["dur"])
    return out


def _self_times(operators: Iterable[TraceEvent]) -> dict[str, tuple[int, float]]:
    """The time of each operator without the operators that it calls."""
    own: dict[str, tuple[int, float]] = {}
    stacks: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in operators:  # by time, outer ones first
        stack = stacks[event["tid"]]
        while stack and _end(stack[-1]) <= event["ts"]:
            stack.pop()
        _add(own, event["name"][:NAME], event["dur"])
        if stack:
            outer = stack[-1]["name"][:NAME]
            calls, took = own[outer]
            own[outer] = calls, took - event["dur"]
        stack.append(event)
    return own


def _add(found: dict[Key, tuple[int, float]], key: Key, took: float) -> None:
    calls, before = found.get(key, (0, 0.0))
    found[key] = calls + 1, before + took


def _most(found: dict[Key, tuple[int, float]], count: int) -> list[tuple[Key, tuple[int, float]]]:
    return sorted(found.items(), key=lambda item: -item[1][1])[:count]


def _wait(key: tuple[str, str, str], count: float, ms: float) -> ProfileWait:
    name, operator, part = key
    return {"name": name, "operator": operator, "part": part, "count": count, "ms": ms}


def _correlation(event: TraceEvent) -> object:
    return event.get("args", {}).get("correlation")


def _end(event: TraceEvent) -> float:
    return event["ts"] + event["dur"]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    out: list[Interval] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def _without(intervals: Iterable[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The parts of `intervals` outside of `others`, which are in order and do not overlap."""
    out: list[Interval] = []
    ends = [end for _, end in others]
    for begin, end in _union(intervals):
        left, at = begin, bisect_right(ends, begin)
        while left < end and at < len(others) and others[at][0] < end:
            if others[at][0] > left:
                out.append((left, others[at][0]))
            left = others[at][1]
            at += 1
        if left < end:
            out.append((left, end))
    return out


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)

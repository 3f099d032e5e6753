"""The collectives that a rank has called, in order: torch's flight recorder, read from outside
while the rank is blocked (served by training.trainer.flight_recorder_server)."""

from __future__ import annotations

import contextlib
import http
import http.client
import itertools
import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from training.core.jsonl import Record
from training.core.messages import msg
from training.trainer import flight_recorder_server

ANSWER_S = 1.0
# torch's recorder for gloo, and NCCL's own one, which only CUDA builds of torch have.
NCCL = "dump_nccl_trace_json"
HANDLERS = ("fr_trace_json", NCCL)
ON_GPUS = "nccl"  # backend
# torch then has no watchdog thread for NCCL, which would retire them. The ranks have it from here.
BLOCKING_WAIT, TRUE = (
    "TORCH_NCCL_BLOCKING_WAIT",
    ("1", "y", "yes", "t", "true"),
)  # as torch reads it
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    http.client.HTTPException,
)
SCHEDULED, STARTED = "scheduled", "started"
ENDED = "time_discovered_completed_ns"  # of one that is not retired: of this answer


# Process group, backend, number of the collective: a group may have several backends, as
# "cpu:gloo,cuda:nccl", which number their own.
CallKey = tuple[str, str, int]


class Arrival(NamedTuple):
    """A rank in a collective."""

    at_ns: int  # on this machine's clock: when it was called; on GPUs, when it had ended
    late_ns: int  # compared with other ranks in the same collective: more is later


@dataclass(frozen=True)
class Call:
    """One entry: the `number`-th collective of its process group."""

    group: str
    number: int
    operation: str  # all_reduce
    shapes: str  # float32 [3, 5]
    open: bool = True  # not completed yet
    # By the GPU: SCHEDULED, STARTED (only with TORCH_NCCL_ENABLE_TIMING=1; never on gloo) or
    # completed, which a call may be for a while before its rank closes it.
    state: str = SCHEDULED
    backend: str = ""

    @property
    def key(self) -> CallKey:
        return self.group, self.backend, self.number

    def __str__(self) -> str:
        return (
            msg("watchdog.calls.with_shapes", operation=self.operation, shapes=self.shapes)
            if self.shapes
            else self.operation
        )


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("rank", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(self._path)


def read(folder: Path, rank: int) -> list[Call] | None:
    """Calls of this rank, oldest first (the last 2000); None when it does not answer."""
    try:
        return [call_of(entry) for entry in _collectives(folder, rank)]
    except UNREADABLE:
        return None


def arrivals(folder: Path, rank: int) -> dict[CallKey, Arrival] | None:
    """Of this rank in each collective; None when it does not answer."""
    try:
        found = {_key(entry): _arrival(entry) for entry in _collectives(folder, rank)}
    except UNREADABLE:
        return None
    return {key: arrival for key, arrival in found.items() if arrival}


def _arrival(entry: Record) -> Arrival | None:
    """The host may call a collective long before its GPU begins it. The kernel of the GPU that
    comes last is the shortest one. None: its duration is not known, or not yet."""
    if _key(entry)[1] != ON_GPUS:
        called = int(entry["time_created_ns"])
        return Arrival(called, called)
    if "duration_ms" not in entry:
        return None
    return Arrival(int(entry[ENDED]), -int(1e6 * entry["duration_ms"]))


def newest(folder: Path, rank: int) -> int | None:
    """When this rank has called its newest collective or exchange with another rank, or one of them
    has ended; None: unknown."""
    try:
        times = [
            max(int(entry["time_created_ns"]), int(entry.get(ENDED) or 0) * entry["retired"])
            for entry in _entries(folder, rank)
        ]
    except UNREADABLE:
        return None
    return max(times, default=None)


def pending(folder: Path, rank: int) -> bool | None:
    """Has this rank an unfinished collective? None: unknown."""
    try:
        entries, failed = _answered(folder, rank)
        if not all(entry.get("retired", False) for entry in entries):
            return True
        return False if entries and not failed else None
    except UNREADABLE:
        return None


def begun(folder: Path, rank: int) -> bool | None:
    """Has the GPU of this rank begun one of its unfinished collectives? None: it has none, or the
    recorder has no times of GPUs."""
    try:
        entries = [entry for entry in _entries(folder, rank) if _key(entry)[1] == ON_GPUS]
    except UNREADABLE:
        return None
    states = {entry.get("state") for entry in entries if not entry["retired"]}
    timed = STARTED in states or any("duration_ms" in entry for entry in entries)
    return STARTED in states if timed and states else None


def _collectives(folder: Path, rank: int) -> Iterable[Record]:
    """Where NCCL records the parts of a collective too, the last entry is the whole. A batch of
    exchanges ends with such an entry as well, with the number of the collective before."""
    entries = [(_launch(entry), entry) for entry in _entries(folder, rank)]
    exchanges = {launch for launch, entry in entries if entry.get("is_p2p")}
    return {launch: entry for launch, entry in entries if launch not in exchanges}.values()


def _launch(entry: Record) -> tuple[CallKey, object]:
    """Entries that NCCL has launched together share it; no other ones do."""
    return _key(entry), entry.get("p2p_seq_id")


def _key(entry: Mapping[str, Any]) -> CallKey:
    group = entry.get("process_group") or [""]
    backend = str(entry.get("profiling_name", "")).rpartition(":")[0]
    # By its name, which all ranks share: the description is 'undefined' for every new_group().
    return str(group[0]), backend, int(entry.get("collective_seq_id", 0))


def _entries(folder: Path, rank: int) -> list[Record]:
    """Raises one of UNREADABLE, also where only one recorder has answered. An unexpected answer of
    another torch version is only missing evidence."""
    entries, failed = _answered(folder, rank)
    if failed:
        raise failed
    return entries


def _answered(folder: Path, rank: int) -> tuple[list[Record], Exception | None]:
    """The entries of all recorders, oldest first, and why one of them has not answered."""
    answers: list[Record | None] = []
    failed: Exception | None = None
    for handler in HANDLERS:
        try:
            answers.append(_answer(folder, rank, handler))
        except TimeoutError as error:  # of a stopped rank; NCCL's, the last, may also hang alone
            failed = error
            break
        except UNREADABLE as error:
            failed = error
    entries = [answer.get("entries", []) for answer in answers if answer is not None]
    if not entries:
        failed = failed or ValueError("no flight recorder answered")
    by_time = sorted(itertools.chain(*entries), key=lambda entry: entry.get("time_created_ns", 0))
    # torch retires none of the parts of a launch, only the whole.
    done = {_launch(entry) for entry in by_time if entry.get("retired", False)}
    return [entry | {"retired": _launch(entry) in done} for entry in by_time], failed


def _answer(folder: Path, rank: int, handler: str) -> Record | None:
    """None: this torch has no such handler."""
    with (
        flight_recorder_server.short(str(folder)) as short,
        contextlib.closing(
            _Connection(f"{short}/{flight_recorder_server.address(folder, rank).name}")
        ) as connection,
    ):
        connection.request("POST", f"/handler/{handler}")
        answer = connection.getresponse()
        if answer.status == http.HTTPStatus.NOT_FOUND:
            return None
        if answer.status != http.HTTPStatus.OK:
            raise ValueError(f"{handler}: status {answer.status}")
        found: Record = json.loads(answer.read())
    blocking = os.environ.get(BLOCKING_WAIT, "").lower() in TRUE
    if handler == NCCL and blocking and found.get("entries"):
        raise ValueError(f"with {BLOCKING_WAIT} no collective of NCCL is ever retired")
    return found


def call_of(entry: Mapping[str, Any]) -> Call:
    """Raises one of UNREADABLE."""
    operation = str(entry.get("profiling_name", "?")).rpartition(":")[2]
    kinds, sizes = entry.get("input_dtypes") or [], entry.get("input_sizes") or []
    shapes = ", ".join(
        f"{str(kind).lower()} {size}" for kind, size in zip(kinds, sizes, strict=False)
    )
    group, backend, number = _key(entry)
    return Call(
        group,
        number,
        operation.lower(),
        shapes,
        open=not entry.get("retired", False),
        state=str(entry.get("state", SCHEDULED)),
        backend=backend,
    )

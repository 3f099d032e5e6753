"""Collectives that a rank has called, read from outside: servers with arbitrary answers, and what
they add to a finding."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_watch_judge import REDUCE, USER, rank, seen
from training.core.messages import msg
from training.trainer import flight_recorder_server
from training.watchdog import called as called_collectives
from training.watchdog import culprit, stall_detector
from training.watchdog.hang_report import DESYNC, HANG, STOPPED, UNEVEN, HangFinding
from training.watchdog.probes import flight_recorder, snapshot
from training.watchdog.probes.flight_recorder import Arrival, Call

ENTRY = {
    "process_group": ["3", "undefined"],
    "collective_seq_id": 4,
    "profiling_name": "gloo:all_reduce",
    "input_sizes": [[7]],
    "input_dtypes": ["Float"],
    "retired": True,
    "is_p2p": False,
}


@contextmanager
def answers(folder: Path, answer: Any, backend: str = "gloo", other: bytes = b"") -> Iterator[Path]:
    """A rank 0 with this answer of the recorder of this backend; the other one does not exist, or
    answers with `other`."""
    served = b"/handler/" + {"gloo": b"fr_trace_json", "nccl": b"dump_nccl_trace_json"}[backend]

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked = self.rfile.readline().split()[1]
            while self.rfile.readline().strip():
                pass
            status, text = b"404 Not Found", b"Handler not found"
            if asked == served:
                status, text = b"200 OK", json.dumps(answer).encode()
            elif other:
                status, text = b"200 OK", other
            self.wfile.write(
                b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text)
            )

    with (
        flight_recorder_server.short(str(folder)) as short,
        socketserver.UnixStreamServer(f"{short}/rank0.sock", Handler) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield folder
        finally:
            server.shutdown()
            thread.join()


def test_the_calls_of_a_rank(tmp_path: Path) -> None:
    waits = ENTRY | {"collective_seq_id": 5, "retired": False}
    receives = ENTRY | {"is_p2p": True, "p2p_seq_id": 1}
    with answers(tmp_path, {"entries": [ENTRY, waits, receives]}) as folder:
        called = flight_recorder.read(folder, 0)
        assert flight_recorder.pending(folder, 0) is True
    # Keyed by group number: all groups of new_group() have the same description.
    assert called == [
        Call("3", 4, "all_reduce", "float [7]", open=False, backend="gloo"),
        Call("3", 5, "all_reduce", "float [7]", open=True, backend="gloo"),
    ]
    assert flight_recorder.read(folder, 1) is None and flight_recorder.pending(folder, 1) is None
    assert (
        flight_recorder.read(folder / "none", 0) is None
        and flight_recorder.pending(folder / "none", 0) is None
    )


def test_the_calls_of_a_rank_on_nccl(tmp_path: Path) -> None:
    """NCCL has a recorder of its own; the other one is empty or does not exist."""
    entry = ENTRY | {"profiling_name": "nccl:all_reduce", "retired": False}
    with answers(tmp_path, {"entries": [entry]}, "nccl") as folder:
        assert flight_recorder.read(folder, 0) == [
            Call("3", 4, "all_reduce", "float [7]", backend="nccl")
        ]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_calls_of_one_recorder_are_not_all_calls(tmp_path: Path, backend: str) -> None:
    """A process group may have both backends, and the one without an answer the newest calls."""
    for retired, pending in ((False, True), (True, None)):
        place = tmp_path / str(retired)
        place.mkdir()
        waits = ENTRY | {"collective_seq_id": 5, "time_created_ns": 1, "retired": retired}
        with answers(place, {"entries": [waits]}, backend, other=b"{half an answ") as folder:
            assert flight_recorder.read(folder, 0) is None
            assert flight_recorder.newest(folder, 0) is flight_recorder.arrivals(folder, 0) is None
            assert flight_recorder.pending(folder, 0) is pending


def test_the_recorders_of_both_backends(tmp_path: Path) -> None:
    """Both number the collectives of a group."""
    later = ENTRY | {"profiling_name": "nccl:barrier", "time_created_ns": 2}
    later |= {"time_discovered_completed_ns": 3, "duration_ms": 1.5}
    text = json.dumps({"entries": [ENTRY | {"time_created_ns": 3}]}).encode()
    with answers(tmp_path, {"entries": [later]}, "nccl", other=text) as folder:
        calls = flight_recorder.read(folder, 0)
        times = flight_recorder.arrivals(folder, 0)
    assert calls and [call.key for call in calls] == [("3", "nccl", 4), ("3", "gloo", 4)], "by time"
    assert times and times.keys() == {call.key for call in calls}


def test_an_exchange_in_a_batch_is_not_a_collective(tmp_path: Path) -> None:
    """NCCL records a batch of sends and receives once more, with the number of the last
    collective."""
    done = ENTRY | {"profiling_name": "nccl:all_reduce", "p2p_seq_id": 0, "time_created_ns": 1}
    sent = done | {"profiling_name": "nccl:send 0->1", "p2p_seq_id": 1, "is_p2p": True}
    batch = done | {"profiling_name": "nccl:coalesced", "p2p_seq_id": 1, "time_created_ns": 2}
    parts = done | {"profiling_name": "nccl:_broadcast_oop", "collective_seq_id": 5}
    whole = parts | {"profiling_name": "nccl:ALLGATHER_coalesced", "input_sizes": []}
    with answers(tmp_path, {"entries": [done, sent, batch, parts, whole]}, "nccl") as folder:
        calls = flight_recorder.read(folder, 0)
    assert calls is not None
    assert [call.operation for call in calls] == ["all_reduce", "allgather_coalesced"]


def test_nccl_without_its_watchdog_thread_retires_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "True")
    waits = {"entries": [ENTRY | {"retired": False}]}
    for backend, found in (("nccl", None), ("gloo", True)):
        place = tmp_path / backend
        place.mkdir()
        with answers(place, waits, backend) as folder:
            assert flight_recorder.pending(folder, 0) is found


def test_an_empty_recorder_of_gloo_does_not_count_where_that_of_nccl_fails(tmp_path: Path) -> None:
    """As with a GPU that is dead: NCCL's recorder waits for the lock of its watchdog."""
    with answers(tmp_path, {"entries": []}, other=b"{half an answ") as folder:
        assert flight_recorder.read(folder, 0) is None


def test_a_rank_without_pending_collectives(tmp_path: Path) -> None:
    with answers(tmp_path, {"entries": [ENTRY, ENTRY]}) as folder:
        assert flight_recorder.pending(folder, 0) is False


def test_a_pending_receive_counts_too(tmp_path: Path) -> None:
    receives = ENTRY | {"is_p2p": True, "p2p_seq_id": 1, "retired": False}
    with answers(tmp_path, {"entries": [ENTRY, receives]}) as folder:
        assert flight_recorder.pending(folder, 0) is True


def test_a_recorder_that_is_off(tmp_path: Path) -> None:
    with answers(tmp_path, {"entries": []}) as folder:
        assert flight_recorder.pending(folder, 0) is None
        assert flight_recorder.newest(folder, 0) is None


def test_the_newest_call_of_a_rank(tmp_path: Path) -> None:
    entries = [ENTRY | {"time_created_ns": 7}, ENTRY | {"time_created_ns": 9, "is_p2p": True}]
    ended = {"time_discovered_completed_ns": 10}
    for name, more, newest in (
        ("a", {}, 9),
        ("b", ended, 10),
        ("c", ended | {"retired": False}, 9),
    ):
        place = tmp_path / name
        place.mkdir()
        other = ENTRY | {"time_created_ns": 8, "collective_seq_id": 5} | more
        with answers(place, {"entries": [*entries, other]}) as folder:
            assert flight_recorder.newest(folder, 0) == newest
    assert flight_recorder.newest(tmp_path / "none", 0) is None


@pytest.mark.parametrize(
    ("timed", "states", "begun"),
    [
        (True, ["scheduled"], False),
        (True, ["completed", "scheduled"], False),
        (True, ["started", "scheduled"], True),
        (False, ["started", "scheduled"], True),
        (False, ["scheduled"], None),
        (True, [], None),
    ],
)
def test_a_gpu_that_has_begun_a_collective(
    tmp_path: Path, timed: bool, states: list[str], begun: bool | None
) -> None:
    done = ENTRY | {"profiling_name": "nccl:all_reduce"} | ({"duration_ms": 1.5} if timed else {})
    opened = {"profiling_name": "nccl:all_reduce", "retired": False}
    waits = [
        ENTRY | opened | {"collective_seq_id": 5 + n, "state": state}
        for n, state in enumerate(states)
    ]
    with answers(tmp_path, {"entries": [done, *waits]}, "nccl") as folder:
        assert flight_recorder.begun(folder, 0) is begun
    assert flight_recorder.begun(tmp_path / "none", 0) is None


@pytest.mark.parametrize(
    "answer", [[], ["x"], 7, None, {"entries": None}, {"entries": ["x"]}, {"entries": {"a": 1}}]
)
def test_an_answer_of_another_torch_counts_as_none(tmp_path: Path, answer: Any) -> None:
    with answers(tmp_path, answer) as folder:
        assert (
            flight_recorder.read(folder, 0) is None and flight_recorder.pending(folder, 0) is None
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"collective_seq_id": None},
        {"collective_seq_id": "x"},
        {"process_group": 3},
        {"input_sizes": 3},
    ],
)
def test_fields_of_another_torch_count_as_none(tmp_path: Path, fields: dict[str, Any]) -> None:
    with answers(tmp_path, {"entries": [ENTRY | fields]}) as folder:
        assert flight_recorder.read(folder, 0) is None


def test_the_parts_of_a_launch_end_with_it(tmp_path: Path) -> None:
    """torch never retires the parts that NCCL has launched together, only the whole."""
    part = ENTRY | {"profiling_name": "nccl:send 0->1", "is_p2p": True, "retired": False}
    part |= {"p2p_seq_id": 1}
    whole = part | {"profiling_name": "nccl:coalesced", "is_p2p": False}
    for name, entries, pending in (
        ("done", [part, part, whole | {"retired": True}], False),
        ("runs", [part, part, whole], True),
        ("next", [part, whole | {"retired": True}, part | {"p2p_seq_id": 2}], True),
    ):
        place = tmp_path / name
        place.mkdir()
        with answers(place, {"entries": entries}, "nccl") as folder:
            assert flight_recorder.pending(folder, 0) is pending, name


def test_the_time_of_a_collective_on_gpus_is_that_of_its_kernel(tmp_path: Path) -> None:
    """The host may call it long before."""
    of_gpu = {"profiling_name": "nccl:all_reduce", "time_created_ns": 1_000_000}
    ended = {"time_discovered_completed_ns": 9_000_000, "duration_ms": 1.5}
    runs = ENTRY | of_gpu | {"collective_seq_id": 5, "time_discovered_completed_ns": 0}
    with answers(tmp_path, {"entries": [ENTRY | of_gpu | ended, runs]}, "nccl") as folder:
        assert flight_recorder.arrivals(folder, 0) == {
            ("3", "nccl", 4): Arrival(9_000_000, -1_500_000)
        }
    place = tmp_path / "gloo"
    place.mkdir()
    with answers(place, {"entries": [ENTRY | {"time_created_ns": 7}]}) as folder:
        assert flight_recorder.arrivals(folder, 0) == {("3", "gloo", 4): Arrival(7, 7)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("broadcast", "watchdog.all_wait.same_root"),
        ("all_reduce", "watchdog.all_wait.same_place"),
    ],
)
def test_another_root_may_be_why_all_ranks_wait(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    for what in ("_places", "_stacks", "_since"):
        monkeypatch.setattr(stall_detector, what, lambda _: {})
    found = stall_detector._all_wait({}, {0: name, 1: name}, {}, elsewhere=False)
    assert isinstance(found, HangFinding) and found.how == msg(text, name=name)


def test_a_recorder_that_is_off_does_not_count_and_is_reported() -> None:
    """TORCH_FR_BUFFER_SIZE=0, of all ranks or of one."""
    call = Call("0", 7, "all_reduce", "float [4]")
    same = {"first_step": 1, "step": 20}
    off = [rank(r, "reduce", seen(*REDUCE), calls=[], **same) for r in (0, 1)]
    found, place = culprit.find_culprit(off), msg("watchdog.all_wait.same_place")
    assert (found.kind, found.rank) == (HANG, None)
    assert found.how == msg("watchdog.calls.none", how=place, ranks="rank 0, rank 1")
    assert all(
        msg("watchdog.snapshot.no_collectives") in text for text in snapshot.texts(off).values()
    )
    found = culprit.find_culprit([rank(0, "reduce", seen(*REDUCE), calls=[call], **same), off[1]])
    assert found.rank is None, "an empty list is not one of fewer calls"
    assert found.how == msg("watchdog.calls.none", how=place, ranks="rank 1")
    begins = [
        rank(r, "building the model", seen(*REDUCE), calls=calls, first_step=0)
        for r, calls in enumerate(([call], []))
    ]
    assert culprit.find_culprit(begins).rank == 1, "it has not called any yet"
    alone = rank(0, "forward", seen(USER), calls=[], **same)
    assert culprit.find_culprit([alone]).rank == 0


def refined(
    found: HangFinding, folder: Path, *, elsewhere: bool = False, trains: bool = False
) -> HangFinding:
    """The finding for ranks 0 and 1 of a script."""
    return called_collectives.refine(
        found, folder, (0, 1), elsewhere=elsewhere, trains=lambda: trains
    )


def test_collectives_of_a_script_refine_the_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = {0: [Call("0", 7, "barrier", "")], 1: [Call("0", 7, "all_reduce", "float [9]")]}
    monkeypatch.setattr(flight_recorder, "read", lambda folder, rank: logged[rank])
    waits = HangFinding(HANG, 0, "main.py:3", "is stuck", {1: "waits"}, {}, 4.0)
    found = refined(waits, tmp_path)
    assert (found.kind, found.rank, found.where) == (DESYNC, None, None)
    assert (
        found.how
        == "the ranks call different operations at collective 7: rank 0: barrier; rank 1: all_reduce of "
        "float [9]"
    )
    uneven = refined(
        HangFinding(UNEVEN, None, None, "all ranks wait, in different places", {}, {}, 4.0),
        tmp_path,
    )
    assert uneven.kind == UNEVEN and uneven.how.startswith(
        "all ranks wait, in different places; the ranks call different operations at collective 7"
    )
    stopped = HangFinding(STOPPED, 0, None, "is stopped", {}, {}, 4.0)
    assert refined(stopped, tmp_path) is stopped


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_groups_of_all_ranks_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    logged = {0: [Call("1", 1, "all_reduce", "")], 1: [Call("2", 1, "all_reduce", "")]}
    monkeypatch.setattr(flight_recorder, "read", lambda folder, rank: logged[rank])
    waits = HangFinding(HANG, None, None, "all ranks wait", {}, {}, 4.0)
    found = refined(waits, tmp_path, elsewhere=elsewhere)
    assert (found.kind, found.rank) == (HANG if elsewhere else DESYNC, None)
    blamed = HangFinding(HANG, 0, None, "is stuck", {}, {}, 4.0)
    assert refined(blamed, tmp_path, elsewhere=elsewhere) is blamed


@pytest.mark.parametrize("trains", [True, False])
def test_a_script_without_recorders(tmp_path: Path, trains: bool) -> None:
    found = HangFinding(HANG, None, None, "all ranks wait", {0: "", 1: ""}, {}, 9.0)
    with answers(tmp_path, {"entries": []}) as folder:
        shown = refined(found, folder, trains=trains)
    how = msg("watchdog.calls.none", how=found.how, ranks="rank 0") if trains else found.how
    assert (shown.kind, shown.rank, shown.how) == (HANG, None, how)

"""What a rank has called, read from outside: a server that answers anything at all, and what counts
as a difference."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from training.trainer import flight_recorder_server
from training.watchdog.probes import flight_recorder
from training.watchdog.probes.flight_recorder import Call, mismatch

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
def answers(folder: Path, said: Any) -> Iterator[Path]:
    """A rank 0 that says this."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            text = json.dumps(said).encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))

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


def test_what_a_rank_has_called(tmp_path: Path) -> None:
    waits = ENTRY | {"collective_seq_id": 5, "retired": False}
    with answers(tmp_path, {"entries": [ENTRY, waits, ENTRY | {"is_p2p": True}]}) as folder:
        called = flight_recorder.read(folder, 0)
        assert flight_recorder.pending(folder, 0) is True
    # By the number of its group: all groups of new_group() have the same description.
    assert called == [
        Call("3", 4, "all_reduce", "float [7]", open=False),
        Call("3", 5, "all_reduce", "float [7]", open=True),
    ]
    assert flight_recorder.read(folder, 1) is None and flight_recorder.pending(folder, 1) is None
    assert (
        flight_recorder.read(folder / "none", 0) is None
        and flight_recorder.pending(folder / "none", 0) is None
    )


def test_who_has_nothing_pending(tmp_path: Path) -> None:
    with answers(tmp_path, {"entries": [ENTRY, ENTRY]}) as folder:
        assert flight_recorder.pending(folder, 0) is False


def test_a_pending_receive_counts_too(tmp_path: Path) -> None:
    with answers(
        tmp_path, {"entries": [ENTRY, ENTRY | {"is_p2p": True, "retired": False}]}
    ) as folder:
        assert flight_recorder.pending(folder, 0) is True


def test_a_recorder_that_is_off_tells_nothing(tmp_path: Path) -> None:
    with answers(tmp_path, {"entries": []}) as folder:
        assert flight_recorder.pending(folder, 0) is None


@pytest.mark.parametrize(
    "said", [[], ["x"], 7, None, {"entries": None}, {"entries": ["x"]}, {"entries": {"a": 1}}]
)
def test_an_answer_of_another_torch_is_no_answer(tmp_path: Path, said: Any) -> None:
    with answers(tmp_path, said) as folder:
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
def test_fields_of_another_torch_are_no_answer(tmp_path: Path, fields: dict[str, Any]) -> None:
    with answers(tmp_path, {"entries": [ENTRY | fields]}) as folder:
        assert flight_recorder.read(folder, 0) is None


def test_only_what_is_pending_is_compared() -> None:
    ones, twos = (
        Call("0", 1, "all_reduce", "float [1]", open=False),
        Call("0", 1, "all_reduce", "float [2]", open=False),
    )
    assert mismatch({0: [ones], 1: [twos]}) is None, "both have come out of it"
    waits = Call("0", 1, "all_reduce", "float [2]", open=True)
    found = mismatch({0: [ones], 1: [waits]})
    assert found and found.number == 1


@pytest.mark.parametrize("operation", sorted(flight_recorder.OWN_SHAPES))
def test_ranks_that_give_different_parts_do_the_same(operation: str) -> None:
    mine, other = Call("0", 1, operation, "float [2, 2]"), Call("0", 1, operation, "")
    assert mismatch({0: [mine], 1: [other]}) is None
    found = mismatch({0: [mine], 1: [other], 2: [Call("0", 1, "barrier", "")]})
    assert found and found.rank == 2


def test_groups_are_told_apart() -> None:
    first, second = Call("1", 1, "barrier", ""), Call("2", 1, "all_reduce", "float [4]")
    assert mismatch({0: [first, second], 1: [second, first]}) is None

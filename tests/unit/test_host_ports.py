"""Ports: owner and next free port, with real sockets."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from training.host import ports
from training.plan import preflight


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which this process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_free_and_taken(taken: int) -> None:
    assert not ports.is_free(taken)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    assert ports.is_free(port)


def test_a_listener_on_all_addresses_occupies_the_port() -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        assert not ports.is_free(listener.getsockname()[1])


def test_a_port_in_time_wait_is_free() -> None:
    # TIME_WAIT: the real listener can bind, so the check must accept it.
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            connection, _ = listener.accept()
            connection.close()
            assert client.recv(1) == b""
    assert ports.is_free(port)


def test_the_check_does_not_occupy_the_port(taken: int) -> None:
    free = ports.next_free(taken)
    assert free is not None
    assert ports.is_free(free)


def test_the_next_free_port_of_ten(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ports.next_free(taken)
    assert real is not None
    assert taken < real < taken + ports.TRIES
    assert ports.TRIES == 10
    asked: list[int] = []

    def none_is_free(port: int, host: str = "") -> bool:
        asked.append(port)
        return False

    monkeypatch.setattr(ports, "is_free", none_is_free)
    assert ports.next_free(12355) is None
    assert asked == list(range(12355, 12365))
    asked.clear()
    assert ports.next_free(65533) is None
    assert asked == [65533, 65534, 65535]


def test_the_owner_of_a_port(taken: int) -> None:
    assert ports.owner(taken).startswith(f"pid {os.getpid()} ({getpass.getuser()}): ")
    with ExitStack() as stack:
        unused = stack.enter_context(socket.socket())
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    assert ports.owner(port) == "an unknown process"


def test_an_owner_that_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    def denied(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    assert ports.owner(80) == "an unknown process"


def test_the_check_suggests_the_next_port_and_names_the_owner(taken: int) -> None:
    used, check = preflight.port(taken)
    assert check is not None
    assert used != taken and ports.is_free(used)
    assert check.status == preflight.WARNING
    assert check.text.startswith(f"port {taken} (--master_port) is taken by pid {os.getpid()} (")
    assert check.text.endswith(f"; using {used}")


def test_the_check_of_a_free_port_or_no_port() -> None:
    assert preflight.port(0) == (0, None)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    assert preflight.port(port) == (port, None)


def test_ten_taken_ports_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "is_free", lambda port, host="": False)
    _, check = preflight.port(12355)
    assert check is not None
    assert check.status == preflight.ERROR
    assert "so are the next 9" in check.text
    assert check.fixes

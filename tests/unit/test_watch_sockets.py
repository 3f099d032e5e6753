"""Bytes of real TCP connections, from the kernel's counters."""

from __future__ import annotations

import os
import socket

import pytest

from training.watchdog.probes import sockets


def moved(pids: list[int]) -> dict[int, int]:
    return {inode: one.moved for inode, one in sockets.connections(pids).items()}


def exchange(family: socket.AddressFamily, host: str) -> None:
    me = [os.getpid()]
    with socket.socket(family) as server:
        server.bind((host, 0))
        server.listen()
        with (
            socket.create_connection(server.getsockname()[:2]) as client,
            server.accept()[0] as other,
        ):
            before = moved(me)
            client.sendall(bytes(300_000))
            left = 300_000
            while left:
                left -= len(other.recv(65536))
            after = moved(me)
            inode = os.fstat(client.fileno()).st_ino
            arrived = os.fstat(other.fileno()).st_ino
            both = sockets.connections(me)
    assert (both[inode].here, both[inode].there) == (both[arrived].there, both[arrived].here)
    assert after[arrived] - before[arrived] == 300_000
    assert 0 < after[inode] - before[inode] <= 300_001, "acknowledged by the other side"


def test_ipv4() -> None:
    exchange(socket.AF_INET, "127.0.0.1")


def test_ipv6() -> None:
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    exchange(socket.AF_INET6, "::1")


def test_connections_of_other_processes_are_not_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert os.fstat(server.fileno()).st_ino not in sockets.connections([1 << 22])
    assert sockets.connections([]) == {}


def test_a_kernel_without_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        monkeypatch.setattr(sockets, "_SOCK_DIAG", 31)  # no such protocol
        assert sockets.connections([os.getpid()]) == {}

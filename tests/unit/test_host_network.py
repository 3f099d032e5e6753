"""Which interface reaches a meeting point: this machine's own addresses, loopback names, names that
nobody knows."""

from __future__ import annotations

import socket

import psutil
import pytest

from training.host import network


def real() -> tuple[str, str]:
    """(interface, IPv4 address) of this machine that is not the loopback."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return name, entry.address
    pytest.skip("this machine has a loopback interface only")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_loopback_name_says_nothing_of_the_network(name: str) -> None:
    assert network.interface_towards(name) is None
    assert network.own_address(name) == "", (
        "the others know this machine by another address: listen everywhere"
    )


def test_an_unknown_name() -> None:
    assert network.resolve("no-such-name.invalid") is None
    assert (
        network.interface_towards("no-such-name.invalid") is None
        and network.own_address("no-such-name.invalid") == ""
    )


def test_an_own_address_is_not_reached_by_the_loopback() -> None:
    name, address = real()
    assert network.interface_towards(address) == (name, address)
    assert network.own_address(address) == address, "node 0 listens there alone"


def test_another_machine() -> None:
    found = network.interface_towards("192.0.2.1")  # TEST-NET-1: an address that nobody has
    assert found is None or found[0] in psutil.net_if_addrs()
    assert network.own_address("192.0.2.1") == ""

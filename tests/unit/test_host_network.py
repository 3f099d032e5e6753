"""Interface towards a rendezvous address: own addresses, loopback names, unknown names."""

from __future__ import annotations

import socket

import psutil
import pytest

from training.host import network


def real() -> tuple[str, str]:
    """(interface, IPv4 address) of this machine except loopback."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return name, entry.address
    pytest.skip("this machine has a loopback interface only")


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_loopback_name_has_no_interface(name: str) -> None:
    assert network.interface_towards(name) is None
    assert network.own_address(name) == "", (
        "the others use another address: listen on all interfaces"
    )


def test_an_unknown_name() -> None:
    assert network.resolve("no-such-name.invalid") is None
    assert (
        network.interface_towards("no-such-name.invalid") is None
        and network.own_address("no-such-name.invalid") == ""
    )


def test_the_interface_of_an_own_address() -> None:
    name, address = real()
    assert network.interface_towards(address) == (name, address)
    assert network.own_address(address) == address, "node 0 listens only there"


def test_another_machine() -> None:
    found = network.interface_towards("192.0.2.1")  # TEST-NET-1: an unassigned address
    assert found is None or found[0] in psutil.net_if_addrs()
    assert network.own_address("192.0.2.1") == ""


@pytest.mark.parametrize(
    ("name", "found", "routes", "interface"),
    [
        ("node0", "127.0.1.1", ["10.0.0.1"], ("eth0", "10.0.0.1")),  # /etc/hosts of Debian
        ("node0", "127.0.1.1", ["", "fd00::1"], ("eth0", "fd00::1")),
        ("node0", "127.0.1.1", ["", ""], None),
        ("localhost", "127.0.0.1", ["10.0.0.1"], None),
        ("::1", "::1", ["10.0.0.1"], None),
    ],
)
def test_the_interface_of_a_host_name_that_is_loopback_here(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    found: str,
    routes: list[str],
    interface: tuple[str, str] | None,
) -> None:
    own = {"127.0.0.1": "lo", "::1": "lo", "10.0.0.1": "eth0", "fd00::1": "eth0"}
    monkeypatch.setattr(network, "resolve", lambda _: found)
    monkeypatch.setattr(network, "own_addresses", lambda: own)
    monkeypatch.setattr(network, "_source", lambda _: routes.pop(0))
    assert network.interface_towards(name) == interface


@pytest.mark.parametrize(
    ("found", "own", "routes", "listening"),
    [
        ("10.0.0.9", ["10.0.0.1", "fd00::1"], "46", network.IPV4),  # a service in front
        ("fd00::9", ["10.0.0.1", "fd00::1"], "46", network.BOTH),
        ("::1", ["127.0.0.1", "::1", "10.0.0.1"], "4", network.BOTH),
        ("fd00::1", ["10.0.0.1", "fd00::1"], "46", "fd00::1"),
        (None, ["127.0.0.1", "::1", "10.0.0.1", "fd00::1"], "46", network.IPV4),
        (None, ["127.0.0.1", "::1", "fd00::1"], "", network.BOTH),  # a pod without IPv4
        (None, [], "", network.IPV4),
        ("127.0.1.1", ["127.0.0.1", "10.0.0.1", "fd00::1"], "46", network.IPV4),
        ("127.0.1.1", ["127.0.0.1", "10.0.0.1", "fe80::1"], "", network.IPV4),
        ("127.0.1.1", ["127.0.0.1", "fd00::1"], "", network.BOTH),
        # only the bridge of Docker has IPv4
        ("127.0.1.1", ["127.0.0.1", "172.17.0.1", "fd00::1"], "6", network.BOTH),
    ],
)
def test_node_0_listens_where_the_others_connect(
    monkeypatch: pytest.MonkeyPatch, found: str | None, own: list[str], routes: str, listening: str
) -> None:
    towards = dict(zip(network.ELSEWHERE, "46", strict=True))
    monkeypatch.setattr(network, "_source", lambda to: to if towards[to] in routes else "")
    monkeypatch.setattr(network, "resolve", lambda _: found)
    monkeypatch.setattr(network, "own_addresses", lambda: dict.fromkeys(own, "eth0"))
    assert network.own_address("a") == listening

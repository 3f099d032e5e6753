"""Addresses and network interfaces of this machine, for the rendezvous of several machines."""

from __future__ import annotations

import ipaddress
import socket

from training.host.placement import LOOPBACK

# Listening addresses: all of this machine. BOTH, which includes IPv6, only where it is needed: an
# IPv4 address has another form there.
ALL = IPV4, BOTH = "", "::"

ELSEWHERE = "192.0.2.1", "2001:db8::1"  # of no machine, so on the default route


def resolve(name: str) -> str | None:
    """An address of this name; None if it does not resolve."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (socket.gaierror, UnicodeError):
        return None


def own_addresses() -> dict[str, str]:
    """address → interface of this machine; empty before the installation."""
    try:
        import psutil
    except ModuleNotFoundError:
        return {}

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    }


def plain(address: str) -> str:
    """As own_addresses() has it: without the zone, and IPv4 as such on a socket for both."""
    return address.partition("%")[0].removeprefix("::ffff:")


def interface_of(address: str) -> str | None:
    """The interface that has this address, except the loopback one."""
    return None if not address or _is_loopback(address) else own_addresses().get(address)


def own_address(name: str) -> str:
    """The listening address of node 0: the rendezvous address if this machine has it; one of ALL
    (all interfaces) if the others use another one (a service in front) or `name` resolves to
    loopback."""
    address, own = resolve(name), own_addresses()
    if address in own and not _is_loopback(address):
        return address
    if address and (":" in address or not _is_loopback(address)):
        return BOTH if ":" in address else IPV4
    # unknown, or in /etc/hosts, as Debian writes it: the others have another address
    families = {":" in one for one in own if not _is_loopback(one)}
    ipv4, ipv6 = map(_source, ELSEWHERE)
    return BOTH if families == {True} or (ipv6 and not ipv4) else IPV4


def from_here(listening: str) -> str:
    """Where processes of this machine reach a socket with this listening address."""
    return LOOPBACK if listening in ALL else listening


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def interface_towards(name: str) -> tuple[str, str] | None:
    """(interface, its address) of the route to the rendezvous address; None if unknown."""
    address, own = resolve(name), own_addresses()
    if address is None:
        return None
    if not _is_loopback(address):
        # node 0: the route to one of its own addresses is the loopback
        source = address if address in own else _source(address)
    elif name in ("localhost", address):
        return None
    else:  # node 0 by its own /etc/hosts, as Debian writes it; the others have another address
        source = next(filter(None, map(_source, ELSEWHERE)), "")
    return (own[source], source) if source in own else None


def source_towards(name: str) -> str:
    """The address of this machine on the route to `name`; '' if unknown."""
    address = resolve(name)
    return _source(address) if address else ""


def is_own(address: str) -> bool:
    """Whether this machine has this address. Works before the installation."""
    with socket.socket(_family(address)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _source(address: str) -> str:
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET

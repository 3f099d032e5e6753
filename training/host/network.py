"""Which of this machine's network interfaces reaches the meeting point of several machines."""

from __future__ import annotations

import ipaddress
import socket


def resolve(name: str) -> str | None:
    """An address of this name; None when it is not known."""
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


def own_address(name: str) -> str:
    """Where node 0 listens: at the meeting point's address alone when that is of this machine;
    everywhere ('') when the others know it by an address that it does not have itself (a service in
    front of it) or by its loopback name."""
    address = resolve(name)
    if address is None or ipaddress.ip_address(address).is_loopback:
        return ""
    return address if address in own_addresses() else ""


def interface_towards(name: str) -> tuple[str, str] | None:
    """(interface, its address) that packets to the meeting point leave by; None when nobody
    knows."""
    address = resolve(name)
    if address is None or ipaddress.ip_address(address).is_loopback:
        return None
    own = own_addresses()
    if address in own:  # node 0 itself: the route to an own address is the loopback
        return own[address], address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return None
        source = probe.getsockname()[0]
    return (own[source], source) if source in own else None

"""TCP connections of processes and the bytes that they have moved, from the kernel's counters
(sock_diag(7), as in `ss -i`). /proc/<pid>/io does not count them, and an upload uses hardly any CPU
time: without this it would look like a hang."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from training.watchdog.probes import procfs

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY, _DONE, _ERROR = 20, 3, 2
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_INFO = 2  # INET_DIAG_INFO: struct tcp_info
_HEADER = struct.Struct("=IHHII")
# in struct inet_diag_msg: two ports, two addresses; and its length
_PORTS_AT, _HERE_AT, _THERE_AT, _INODE_AT, _MESSAGE = 4, 8, 24, 68, 72
_ADDRESS = 16
_MAPPED = bytes(10) + b"\xff\xff"  # IPv4 in IPv6
_ACKED_AT = 120  # tcpi_bytes_acked in struct tcp_info; tcpi_bytes_received follows
_READ = 1 << 16


End = tuple[bytes, int]  # address, port


@dataclass(frozen=True)
class Connection:
    here: End
    there: End
    moved: int  # bytes sent (and acknowledged) plus received


def connections(pids: Iterable[int]) -> dict[int, Connection]:
    """By inode, the TCP connections of these processes. Empty where the kernel does not report them
    (some containers): then only CPU time shows an upload."""
    wanted = inodes(pids)
    if not wanted:
        return {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            everything = _dump(kernel, socket.AF_INET) | _dump(kernel, socket.AF_INET6)
    except OSError:
        return {}
    return {inode: one for inode, one in everything.items() if inode in wanted}


def inodes(pids: Iterable[int]) -> set[int]:
    """All sockets that these processes have open."""
    return {
        int(name[8:-1])
        for pid in pids
        for name in procfs.open_files(pid)
        if name.startswith("socket:[")
    }


def _dump(kernel: socket.socket, family: int) -> dict[int, Connection]:
    # struct inet_diag_req_v2: family, protocol, extensions, padding, states, socket id
    request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0xFFFFFFFF)
    kernel.send(
        _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_DUMP, 0, 0) + request
    )
    found: dict[int, Connection] = {}
    while True:
        data = kernel.recv(_READ)
        while len(data) >= _HEADER.size:
            length, kind, *_ = _HEADER.unpack_from(data)
            if kind in (_DONE, _ERROR) or length < _HEADER.size:
                return found
            _note(data[_HEADER.size : length], found)
            data = data[(length + 3) & ~3 :]


def _note(message: bytes, found: dict[int, Connection]) -> None:
    ports = struct.unpack_from("!HH", message, _PORTS_AT)
    here, there = (
        (_address(message[at : at + _ADDRESS], message[0]), port)
        for at, port in zip((_HERE_AT, _THERE_AT), ports, strict=True)
    )
    (inode,) = struct.unpack_from("=I", message, _INODE_AT)
    at = _MESSAGE
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            return
        if kind == _INFO and length >= 4 + _ACKED_AT + 16:
            moved = sum(struct.unpack_from("=QQ", message, at + 4 + _ACKED_AT))
            found[inode] = Connection(here, there, moved)
        at += (length + 3) & ~3


def _address(raw: bytes, family: int) -> bytes:
    """The same for IPv4 and for IPv4 in IPv6."""
    return raw[:4] if family == socket.AF_INET else raw.removeprefix(_MAPPED)

"""Checks of the rendezvous port (`--master_port`); without the flag the kernel assigns a free
one."""

from __future__ import annotations

import socket

from training.core import redact
from training.core.messages import msg
from training.host import process

TRIES, LAST = 10, 65535

# For a port that is named but not held: below the kernel's ephemeral ports (from 32768), so that no
# outgoing connection takes it by chance.
QUIET = range(20000, 30000)


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        # As in the real listener: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def following(wanted: int) -> range:
    """The TRIES ports from `wanted`; fewer near the last one."""
    return range(wanted, min(wanted + TRIES, LAST + 1))


def beside(port: int) -> int:
    """The first of TRIES other ports: the next, or those before the last one."""
    return port + 1 if port < LAST else port - TRIES


def next_free(wanted: int) -> int | None:
    """The first free port of those, or None."""
    return next((p for p in following(wanted) if is_free(p)), None)


def owner(port: int) -> str:
    """The process that listens on `port`, as text: 'pid 4711 (alice): python train.py', as far as
    this user may see it."""
    try:
        import psutil
    except ModuleNotFoundError:  # before the installation
        return msg("host.port.unknown")
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return msg("host.port.unknown")
    for c in connections:
        if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port:
            if c.pid is None:
                return msg("host.port.other_user")
            try:
                return msg(
                    "host.port.process",
                    pid=c.pid,
                    user=psutil.Process(c.pid).username(),
                    command=redact.running(process.command(c.pid), 80),
                )
            except (psutil.Error, OSError):
                return f"pid {c.pid}"
    return msg("host.port.unknown")

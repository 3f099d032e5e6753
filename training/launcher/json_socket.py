"""JSON messages, one a line, over a socket between the supervisors of several machines. What
arrives is data from a network: bounded, never executed; anything else than such a line is an error
of that connection alone.

A cut cable sends nothing. Two mechanisms notice it: the kernel, which probes an idle peer and gives
up unacknowledged data (also while a supervisor is busy with its data), and pings of the supervisor
itself (training.launcher.peer_link), because the kernel answers for a frozen process too and takes
up to 20 s once its retransmissions have become rare.
"""

from __future__ import annotations

import errno
import fcntl
import json
import socket
import sys
import termios
import time

from training.core.jsonl import Record
from training.core.messages import msg

LIMIT = 1 << 18  # bytes of a line
SEND_S = 2.0  # for a message; the peer's kernel accepts it even when its process is frozen
POLL_S = 0.01
SILENT_S = 10.0  # without any answer: the peer, or the network to it, is down
UNREACHABLE = {
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
}
KERNEL = {  # seconds idle before the first probe, between probes; milliseconds
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": int(1000 * SILENT_S),
}
ALIVE = "alive"  # key of a ping, which is handled in this module alone
PING = json.dumps({ALIVE: True}).encode() + b"\n"
Message = Record  # comes from a network


class ConnectionLost(Exception):
    """The peer has closed the connection, violates the protocol, or (`silent`) cannot be
    reached."""

    def __init__(self, text: str, *, silent: bool = False) -> None:
        super().__init__(text)
        self.silent = silent


class JsonSocket:
    """Reads whole lines; `fileno()` for a selector. `quiet_s` is reset to 0 whenever data arrives;
    the owner counts it up."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._rest, self._unsent = connection, b"", b""
        self.quiet_s, self._acknowledged = 0.0, time.monotonic()
        self._broken: ConnectionLost | None = None
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KERNEL.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Raises ConnectionLost."""
        if self._broken:
            raise self._broken
        self.socket.settimeout(SEND_S)
        try:
            self.socket.sendall(self._unsent + json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._end(error) from error
        self._unsent = b""

    def ping(self) -> None:
        """Never blocks, never raises: a full buffer is ignored, and a broken connection is raised
        by the next read."""
        if self._broken:
            return
        if not self._unacknowledged():
            self._acknowledged = time.monotonic()
        self._unsent = self._unsent or PING
        self.socket.settimeout(0.0)
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)

    def answers(self, seconds: float) -> bool:
        """Whether the peer's kernel acknowledges a ping within `seconds`. It resets the connection
        of a process that has ended."""
        end = time.monotonic() + seconds
        self.ping()
        while not self._broken and self._unacknowledged() and time.monotonic() < end:
            time.sleep(POLL_S)
        acknowledged = not self._unacknowledged()
        self.ping()
        return acknowledged and not self._broken

    def _unacknowledged(self) -> int:
        """Bytes."""
        queued = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(queued, sys.byteorder)

    @property
    def unreachable(self) -> bool:
        """While pings are sent: the peer's kernel, which answers for a frozen process too, has left
        some unacknowledged for SILENT_S / 2."""
        return time.monotonic() - self._acknowledged > SILENT_S / 2

    def receive(self, seconds: float | None) -> Message:
        """The next message. Raises ConnectionLost, TimeoutError."""
        end = None if seconds is None else time.monotonic() + seconds
        while not (message := self._line()):
            # Data that arrived before the connection broke is still readable.
            self.socket.settimeout(
                0.0 if self._broken else None if end is None else max(0.0, end - time.monotonic())
            )
            try:
                chunk = self.socket.recv(1 << 16)
            except OSError as error:
                if self._broken:
                    raise self._broken from error
                if error.errno is None or isinstance(error, BlockingIOError):
                    raise TimeoutError from error
                raise self._end(error) from error
            if not chunk:
                raise self._broken or ConnectionLost(msg("launcher.socket.closed"))
            self.quiet_s = 0.0
            self._rest += chunk
        return message

    def arrived(self) -> list[Message]:
        """All messages that have arrived, without waiting. Raises ConnectionLost when there are
        none and the connection is broken."""
        out: list[Message] = []
        try:
            while True:
                out.append(self.receive(0.0))
        except TimeoutError:
            return out
        except ConnectionLost:
            # messages before the end count; the next call raises again
            if not out:
                raise
        return out

    def _end(self, error: OSError) -> ConnectionLost:
        """The kernel reports an error once, then only 'closed': the first one is kept."""
        text = error.strerror or msg("launcher.socket.not_accepted", limit_s=SEND_S)
        self._broken = self._broken or ConnectionLost(
            text, silent=error.errno is None or error.errno in UNREACHABLE
        )
        return self._broken

    def _line(self) -> Message | None:
        """The next whole line other than a ping."""
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if not newline:
                if len(self._rest) > LIMIT:
                    raise ConnectionLost(msg("launcher.socket.too_long", limit=LIMIT))
                return None
            self._rest = rest
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                raise ConnectionLost(msg("launcher.socket.protocol"))
            if ALIVE not in message:
                return message

    def close(self) -> None:
        self.socket.close()

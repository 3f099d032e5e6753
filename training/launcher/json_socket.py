"""One JSON object a line over a socket: how the supervisors of several machines talk. What arrives
is data from a network: bounded, never executed, and everything that is no such line is an error of
that connection alone.

A cable that is cut says nothing. Two things notice it: the kernel, which asks a quiet peer by
itself and gives up unanswered data (also while a supervisor is busy with its data), and a ping that
the supervisor itself must send (training.launcher.peer_link), since the kernel answers for a frozen
program too, and takes up to 20 s where its own retransmissions have become rare.
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

LIMIT = 1 << 18  # bytes of a line
SEND_S = 2.0  # for a message; the other side's kernel takes it, even when its program is frozen
SILENT_S = 10.0  # without any answer: the other machine, or the network to it, is gone
UNREACHABLE = {
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
}
KERNEL = {  # seconds of quiet before the first question, between questions; milliseconds
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": int(1000 * SILENT_S),
}
ALIVE = "alive"  # the key of a ping, which is no message: it never leaves this file
PING = json.dumps({ALIVE: True}).encode() + b"\n"
Message = Record  # comes from a network


class ConnectionLost(Exception):
    """The other side has closed, or speaks something else, or (`silent`) can not be reached any
    more."""

    def __init__(self, text: str, *, silent: bool = False) -> None:
        super().__init__(text)
        self.silent = silent


class JsonSocket:
    """Reads whole lines; `fileno()` for a selector. `quiet_s` goes back to 0 whenever something
    arrives; who watches counts it up."""

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
        """Never waits, never raises: a full buffer is no news, and a broken line is told to who
        reads."""
        if self._broken:
            return
        if not int.from_bytes(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder):
            self._acknowledged = time.monotonic()
        self._unsent = self._unsent or PING
        self.socket.settimeout(0.0)
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)

    @property
    def unreachable(self) -> bool:
        """While pings are sent: the other machine's kernel, which answers for a frozen program too,
        has not had them all since long."""
        return time.monotonic() - self._acknowledged > SILENT_S / 2

    def receive(self, seconds: float | None) -> Message:
        """The next message. Raises ConnectionLost, TimeoutError."""
        end = None if seconds is None else time.monotonic() + seconds
        while not (message := self._line()):
            # What had arrived before the line broke is still there.
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
                raise self._broken or ConnectionLost("closed by the other side")
            self.quiet_s = 0.0
            self._rest += chunk
        return message

    def arrived(self) -> list[Message]:
        """All messages that are there, without waiting. Raises ConnectionLost when there are none
        and will be no more."""
        out: list[Message] = []
        try:
            while True:
                out.append(self.receive(0.0))
        except TimeoutError:
            return out
        except ConnectionLost:
            # what was said before the end counts; the next call finds the end again
            if not out:
                raise
        return out

    def _end(self, error: OSError) -> ConnectionLost:
        """The kernel tells an error once, then it says 'closed': the first one is kept."""
        text = error.strerror or f"takes no message within {SEND_S:g} s"
        self._broken = self._broken or ConnectionLost(
            text, silent=error.errno is None or error.errno in UNREACHABLE
        )
        return self._broken

    def _line(self) -> Message | None:
        """The next whole line that is no ping."""
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if not newline:
                if len(self._rest) > LIMIT:
                    raise ConnectionLost(f"more than {LIMIT} bytes without an end")
                return None
            self._rest = rest
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                raise ConnectionLost("it does not speak our language")
            if ALIVE not in message:
                return message

    def close(self) -> None:
        self.socket.close()

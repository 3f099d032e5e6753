"""One JSON object a line over a socket: how the supervisors of several machines talk. What arrives is data from a network: bounded,
never executed, and everything that is no such line is an error of that connection alone."""

from __future__ import annotations

import json
import socket
from typing import Any

LIMIT = 1 << 18  # bytes of a line
Message = dict[str, Any]


class Broken(Exception):
    """The other side has closed, or speaks something else."""


class Wire:
    """Reads whole lines; `fileno()` for a selector."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._rest = connection, b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Raises Broken."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Broken(error.strerror or str(error)) from error

    def receive(self, seconds: float | None) -> Message:
        """The next message. Raises Broken, TimeoutError."""
        self.socket.settimeout(seconds)
        while True:
            if ready := self._line():
                return ready
            try:
                chunk = self.socket.recv(1 << 16)
            except (TimeoutError, BlockingIOError):
                raise
            except OSError as error:
                raise Broken(error.strerror or str(error)) from error
            if not chunk:
                raise Broken("closed by the other side")
            self._rest += chunk

    def arrived(self) -> list[Message]:
        """All messages that are there, without waiting. Raises Broken when there are none and will be no more."""
        out: list[Message] = []
        try:
            while True:
                out.append(self.receive(0.0))
        except (TimeoutError, BlockingIOError):
            return out
        except Broken:  # what was said before the end counts; the next call finds the end again
            if not out:
                raise
        return out

    def _line(self) -> Message | None:
        line, newline, rest = self._rest.partition(b"\n")
        if not newline:
            if len(self._rest) > LIMIT:
                raise Broken(f"more than {LIMIT} bytes without an end")
            return None
        self._rest = rest
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise Broken("it does not speak our language")
        return message

    def close(self) -> None:
        self.socket.close()

"""The connection of one copy. Both sides prove that they know the secret of the launch (HMAC, by
the standard library); then JSON messages and blocks of bytes follow. All of them are bounded in
size and time, and nothing that arrives is executed or unpickled."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING

from training.core.jsonl import Record

if TYPE_CHECKING:
    from types import TracebackType

LIMIT = 1 << 23  # bytes of a message, which lists all pictures of a run
HELLO_S = 10.0  # for a step of the proof: a busy CPU delays processes of low priority
STALL_S = 30.0  # without a byte, while the disk of the other side may be busy
# codes of LinkError
REFUSED, CUT, STALLED, PROTOCOL = "refused", "cut", "stalled", "protocol"


class LinkError(Exception):
    """`code`: one of the above; `text`: the kernel's reason, or ''."""

    def __init__(self, code: str, text: str = "") -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


class Link:
    """One end of an accepted or connected socket, which it owns. Every method raises LinkError."""

    def __init__(self, connected: socket.socket, secret: bytes, *, accepted: bool) -> None:
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(None)
        _limit(connected, HELLO_S)
        self._connection = Connection(connected.detach())
        try:
            with _errors():
                first, second = answer_challenge, deliver_challenge
                if accepted:
                    first, second = second, first
                first(self._connection, secret)
                second(self._connection, secret)
                with socket.socket(fileno=self._connection.fileno()) as same:
                    _limit(same, STALL_S)
                    same.detach()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def send(self, message: Record) -> None:
        with _errors():
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Record:
        with _errors():
            found = json.loads(self._connection.recv_bytes(LIMIT))
        if not isinstance(found, dict):
            raise LinkError(PROTOCOL)
        return found

    def send_block(self, block: bytes) -> None:
        with _errors():
            self._connection.send_bytes(block)

    def receive_block(self, most: int) -> bytes:
        with _errors():
            return self._connection.recv_bytes(most)


def _limit(connected: socket.socket, seconds: float) -> None:
    """The kernel ends a read or write that takes longer: Connection has no time limits."""
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except AuthenticationError:
        raise LinkError(REFUSED) from None
    except BlockingIOError:
        raise LinkError(STALLED) from None
    except EOFError:
        raise LinkError(CUT) from None
    except OSError as error:
        # without a number: longer than allowed
        raise LinkError(CUT if error.errno else PROTOCOL, error.strerror or "") from None
    except (ValueError, RecursionError):  # not JSON
        raise LinkError(PROTOCOL) from None

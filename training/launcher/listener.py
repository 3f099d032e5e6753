"""A listening socket at which other machines ask or join while this one is busy with its ranks."""

from __future__ import annotations

import contextlib
import socket
import time

from training.launcher.json_socket import ConnectionLost, JsonSocket, Message

ANSWER_S = 2.0  # another program on the port does not answer at all
UNKNOWN = 64  # connections that have sent nothing yet; the kernel keeps further ones waiting


class Listener:
    """Never blocks. `store` may be replaced by another listening socket."""

    def __init__(self, store: socket.socket) -> None:
        self.store = store
        # connections without a message so far: since when, and the address
        self._unknown: list[tuple[float, JsonSocket, str]] = []

    @property
    def at(self) -> tuple[str, int]:
        """Its address and port."""
        address, port = self.store.getsockname()[:2]
        return str(address), int(port)

    def arrived(self) -> list[tuple[JsonSocket, str, Message]]:
        """Connections with their first message, and the address they come from. They are the
        caller's from now on."""
        if self.store.fileno() < 0:
            return []
        self.store.settimeout(0)
        with contextlib.suppress(OSError):
            while len(self._unknown) < UNKNOWN:
                connection, peer = self.store.accept()
                self._unknown.append((time.monotonic(), JsonSocket(connection), peer[0]))
        unknown, self._unknown = self._unknown, []
        found = []
        for since, wire, address in unknown:
            try:
                found.append((wire, address, wire.receive(0.0)))
            except TimeoutError:
                if time.monotonic() - since < ANSWER_S:
                    self._unknown.append((since, wire, address))
                else:
                    wire.close()
            except ConnectionLost:
                wire.close()
        return found

    def close(self) -> None:
        self.store.close()
        for _, wire, _ in self._unknown:
            wire.close()

"""Receives copies: a child process of the supervisor of a machine other than node 0
(training.launcher.replica.receiver). It serves one connection after the other until it is ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

from training.core.errors import Exit
from training.core.jsonl import Record
from training.core.rundir import RunDir
from training.host import program
from training.launcher.replica import records
from training.launcher.replica.link import HELLO_S, STALL_S, Link, LinkError
from training.launcher.replica.store import Invalid, NoSpace, Store

BLOCK = 1 << 20  # bytes of a checkpoint between two system calls
ALIVE_S = STALL_S / 6
NICE = 10  # the ranks come first; at 19 a copy starves where all cores are busy
# codes of an error in an answer
OTHER_LAUNCH, INVALID, NO_SPACE, DISK = "other_launch", "invalid", "no_space", "disk"


def serve(connected: socket.socket, store: Store, secret: bytes) -> None:
    """One copy. Raises LinkError."""
    with _limited(), connected:
        link = Link(connected, secret, accepted=True)
    with link:
        if link.receive().get("launch") != store.launch:
            link.send({"error": OTHER_LAUNCH})
            return
        link.send({"ready": True})
        try:
            while True:
                link.send(_answered(link.receive(), store, link))
        except Invalid as error:
            link.send({"error": INVALID, "text": str(error)})
        except NoSpace as full:
            link.send({"error": NO_SPACE, "needed": full.needed, "free": full.free})
        except OSError as error:
            with contextlib.suppress(OSError):
                store.forget_cut()
            link.send({"error": DISK, "text": error.strerror or str(error)})


def serve_until_closed(connected: socket.socket, store: Store, secret: bytes) -> None:
    # closed after the last message, or by a port scanner; node 0 reports a copy that was cut
    with contextlib.suppress(LinkError):
        serve(connected, store, secret)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """For the proof as a whole: one that sends a byte now and then must not keep out node 0."""

    def over(*_: object) -> None:
        raise LinkError("stalled")

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, 2 * HELLO_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answered(message: Record, store: Store, link: Link) -> Record:
    """Do what one message asks for. Raises LinkError, Invalid, NoSpace, OSError."""
    if isinstance(names := message.get("files"), list):
        return store.facts(names)
    if isinstance(known := message.get("set_aside"), dict):
        store.set_aside(known)
    elif "file" in message:
        content = link.receive_block(records.PART)
        store.write(message["file"], message.get("at"), content, message.get("sha256"))
    elif "checkpoint" in message:
        checkpoint = store.begin(message["checkpoint"], message.get("manifest"))
        link.send({"at": checkpoint.at})
        with checkpoint.opened() as file:
            while checkpoint.at < checkpoint.size:
                checkpoint.write(file, link.receive_block(BLOCK))
        checkpoint.verify(_alive(link))
    elif isinstance(names := message.get("keep"), list):
        store.keep(names)
    else:
        raise Invalid("message")
    return {"done": True}


def _alive(link: Link) -> Callable[[], None]:
    """Reports from time to time that reading continues: a large file takes longer than node 0
    waits for an answer."""
    last = time.monotonic()

    def moved() -> None:
        nonlocal last
        if time.monotonic() - last > ALIVE_S:
            last = time.monotonic()
            link.send({"alive": True})

    return moved


def main(argv: list[str]) -> int:
    if argv:
        print((__doc__ or "").strip())
        return int(Exit.DONE)
    # between two instructions: no part of a file is left half written
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(Exit.DONE)))
    os.nice(NICE)
    task = json.loads(sys.stdin.readline())
    store = Store(RunDir(task["run_dir"], task["node"]), task["launch"])
    listening = socket.socket(fileno=task["fd"])
    while True:
        connected, _ = listening.accept()
        serve_until_closed(connected, store, task["secret"].encode())


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, pipe=False))

"""Machines as network namespaces, connected by a bridge in a namespace of its own: nothing of the
network of this machine changes. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "10.211.9."
NOWHERE = "02:00:00:00:00:fe"  # no card has this address: the bridge and all receivers drop it
NAMES = Path("/run/netns")


def unusable() -> str:
    """Why namespaces are not possible here; '' if they are."""
    if not shutil.which("ip"):
        return "`ip` is missing: install iproute2 (apt-get install iproute2)"
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        return "network namespaces need root (or CAP_SYS_ADMIN and CAP_NET_ADMIN): use sudo"
    return ""


def address(number: int) -> str:
    return f"{PREFIX}{number + 1}"


def _card(number: int) -> str:
    return f"02:00:00:00:00:{number + 1:02x}"


class Network:
    """`machines` namespaces. The neighbour tables are fixed, so that a lost direction is only lost
    in this direction, without an answer that is missing elsewhere."""

    def __init__(self, machines: int) -> None:
        mark = uuid.uuid4().hex[:6]
        self.switch = f"e{mark}s"
        self.names = [f"e{mark}{number}" for number in range(machines)]

    def make(self) -> None:
        _ip(f"netns add {self.switch}")
        _ip("link add switch type bridge", "link set switch up", space=self.switch)
        for number, name in enumerate(self.names):
            _ip(f"netns add {name}")
            _ip(
                f"link add port{number} type veth peer name eth0 netns {name}",
                f"link set port{number} master switch up",
                space=self.switch,
            )
            _ip(
                f"link set eth0 address {_card(number)}",
                f"addr add {address(number)}/24 dev eth0",
                "link set eth0 up",
                "link set lo up",
                space=name,
            )
        for number in range(len(self.names)):
            self.join(number)

    def remove(self) -> None:
        for name in (*self.names, self.switch):
            if (NAMES / name).exists():
                _ip(f"netns del {name}")

    def unplug(self, number: int) -> None:
        """The cable of this machine: nothing arrives, nothing leaves, no side gets an error."""
        _ip(f"link set port{number} down", space=self.switch)

    def deafen(self, number: int) -> None:
        """Packets to this machine are lost."""
        for other in self._others(number):
            self._reaches(other, number, NOWHERE)

    def mute(self, number: int) -> None:
        """Packets from this machine are lost."""
        for other in self._others(number):
            self._reaches(number, other, NOWHERE)

    def part(self, one: int, other: int) -> None:
        """Packets between these two are lost."""
        self._reaches(one, other, NOWHERE)
        self._reaches(other, one, NOWHERE)

    def join(self, number: int) -> None:
        """All of this is over."""
        _ip(f"link set port{number} up", space=self.switch)
        for other in self._others(number):
            self._reaches(other, number, _card(number))
            self._reaches(number, other, _card(other))

    def processes(self, number: int) -> list[int]:
        """All processes of a machine, also those that have left their launcher's process group."""
        space, found = (NAMES / self.names[number]).stat().st_ino, []
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            try:
                if Path(entry.path, "ns/net").stat().st_ino == space:
                    found.append(int(entry.name))
            except OSError:  # it has ended
                continue
        return found

    def _others(self, number: int) -> Iterator[int]:
        return (other for other in range(len(self.names)) if other != number)

    def _reaches(self, source: int, target: int, card: str) -> None:
        _ip(
            f"neigh replace {address(target)} lladdr {card} dev eth0 nud permanent",
            space=self.names[source],
        )


@contextmanager
def network(machines: int) -> Iterator[Network]:
    """Raises SystemExit where there can be none."""
    if why := unusable():
        sys.exit(why)
    made = Network(machines)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _ip(*commands: str, space: str = "") -> None:
    where = ["-n", space] if space else []
    done = subprocess.run(
        ["ip", *where, "-batch", "-"],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"ip {'; '.join(commands)}: {done.stderr.strip()}")

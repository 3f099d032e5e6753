"""A private sshd on loopback: keys, configuration and known hosts in a temporary folder. Its client
configuration gives it several names, which are the machines."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import TOKEN, wait_until

SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
SEPARATION = Path("/run/sshd")  # an sshd of root requires it
MACHINES = ("alpha", "beta")
SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey "{folder}/host"
PidFile none
AuthorizedKeysFile "{folder}/allowed"
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
SetEnv {mark}={token}
"""
CLIENT = """\
Host {machines}
  HostName 127.0.0.1
  Port {port}
  HostKeyAlias machines
Host unverified
  HostName 127.0.0.1
  Port {port}
Host refused
  HostName 127.0.0.1
  Port {nothing}
Host nowhere
  HostName nowhere.invalid
Host locked
  HostName 127.0.0.1
  Port {port}
  HostKeyAlias machines
  User duet-unknown
Host *
  User {user}
  IdentityFile "{folder}/key"
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile "{folder}/known"
  GlobalKnownHostsFile none
"""


def missing() -> str:
    """Why sshd cannot be started here; '' if it can."""
    lacking = [name for name in ("sshd", "ssh") if not shutil.which(name, path=SEARCHED)]
    if lacking:
        return f"{', '.join(lacking)} not installed (openssh-server, openssh-client)"
    if os.geteuid() == 0 and not SEPARATION.is_dir():
        SEPARATION.mkdir(mode=0o755)
    return ""


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    arguments: str  # --ssh_args
    token: str  # of the processes of its sessions, but not of what the agents start


@contextmanager
def server(folder: Path, token: str) -> Iterator[Server]:
    for name in ("host", "key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    shutil.copy(folder / "key.pub", folder / "allowed")
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"machines {key}")
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, nothing = one.getsockname()[1], other.getsockname()[1]
    facts = {"port": port, "nothing": nothing, "folder": folder, "user": getpass.getuser()}
    facts |= {"machines": " ".join(MACHINES), "mark": TOKEN, "token": token}
    (folder / "server").write_text(SERVER.format(**facts))
    (folder / "client").write_text(CLIENT.format(**facts))
    program = shutil.which("sshd", path=SEARCHED)
    assert program, "sshd re-executes itself: an absolute path"
    with (folder / "log").open("wb") as log:
        command = [program, "-D", "-e", "-f", str(folder / "server")]
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: "listening on" in (folder / "log").read_text(), 20, "sshd listens")
        yield Server(process, f"-F '{folder}/client'", token)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)

"""The ssh command lines of `--hosts`, and the meaning of ssh's own errors."""

from __future__ import annotations

import functools
import re
import runpy
import shlex
import sys

from training.core.errors import Problem
from training.core.messages import msg
from training.core.project import ROOT

FAILED = 255  # ssh's own exit status
AGENT = str(ROOT / "lib/host_agent.py")
# ssh uses the first value of an option: a password prompt can never block, while the user's own
# arguments win over the others.
_FIRST = ("-T", "-o", "BatchMode=yes")
_LAST = (
    *("-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
    *("-o", "LogLevel=ERROR"),
)


def command(host: str, ssh_args: str, remote: str) -> list[str]:
    """`remote`: a command line for the shell of the user there."""
    return ["ssh", *_FIRST, *shlex.split(ssh_args), *_LAST, host, remote]


def agent(python: str) -> str:
    """The remote command line that starts the agent. The launch command and its variables follow on
    standard input, since any user of the machine can read command lines."""
    return f"exec {shlex.quote(python)} -I -S {shlex.quote(AGENT)}"


@functools.cache
def own_files() -> str:
    """The digest of Duet's files on this machine, as the agent of another one computes it."""
    return str(runpy.run_path(AGENT)["digest"]())


def local_agent(*words: str) -> list[str]:
    return [sys.executable, "-I", "-S", AGENT, *words]


def problem(host: str, ssh_args: str, error: str) -> Problem:
    """Why ssh could not connect. `error`: its standard error."""
    words = shlex.split(ssh_args)
    login = shlex.join(["ssh", *words, host, "true"])
    if re.search("Could not resolve hostname|Name or service not known", error):
        text, add = msg("launcher.hosts.unknown", host=host), msg("launcher.hosts.add", host=host)
        return Problem("hosts.unknown", text, "", [f"getent hosts {host}", add], "hosts")
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in error:
        text, why = msg("launcher.hosts.key_changed", host=host), msg("launcher.hosts.reinstalled")
        return Problem("hosts.key_changed", text, "", [f"ssh-keygen -R {host}   # {why}"], "hosts")
    if re.search("Host key verification failed|host key is known", error):
        text, how = msg("launcher.hosts.key_unknown", host=host), msg("launcher.hosts.accept_key")
        return Problem("hosts.key_unknown", text, "", [f"{login}   # {how}"], "hosts")
    if re.search("Permission denied|Too many authentication failures", error):
        text = msg("launcher.hosts.denied", host=host)
        copy = shlex.join(["ssh-copy-id", *words, host])
        return Problem("hosts.denied", text, "", [copy, "ssh-add"], "hosts")
    if "Connection refused" in error:
        text, there = (
            msg("launcher.hosts.refused", host=host),
            msg("launcher.hosts.there", host=host),
        )
        return Problem(
            "hosts.refused", text, "", [f"sudo systemctl start ssh   # {there}"], "hosts"
        )
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    why = lines[-1] if lines else msg("launcher.hosts.no_reason")
    if re.search("timed out|No route to host|Network is unreachable|Connection reset", error):
        text = msg("launcher.hosts.unreachable", host=host, why=why)
        return Problem("hosts.unreachable", text, "", [login], "hosts")
    return Problem("hosts.ssh", msg("launcher.hosts.ssh", host=host, why=why), "", [login], "hosts")

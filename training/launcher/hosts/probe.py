"""A look at every machine of `--hosts` before anything starts there: ssh, the folders, Python and
Duet. All at the same time, all problems at once."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from training.core.errors import Problem
from training.core.messages import msg
from training.core.project import INSTALLED, ROOT
from training.host.hosts import Host, Target, target
from training.launcher.hosts import ssh

LIMIT_S = 20.0  # ssh itself gives up connecting after 5 s
MARK = "duet-probe"  # before each answer: a login script may print more
OWN_VENV = ROOT / ".venv"
# Run by the user's shell there, from standard input. The first Python that is new enough answers.
_SCRIPT = """\
[ -d {folder} ] || echo {mark} no-folder
[ -f {agent} ] || {{ echo {mark} no-duet; exit 0; }}
{variables}
for python in {pythons}; do
  found=$(command -v "$python") || continue
  "$found" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
  echo {mark} python "$found"
  echo {mark} facts "$("$found" {agent} probe)"
  exit 0
done
echo {mark} no-python
"""
_PYTHONS = ("python3", "python3.13", "python3.12", "python3.11", "python3.10", "python")
MAKES_ENVIRONMENT = "train_dual_gpu.sh configs/dual_gpu/quickstart.py --device=cpu --check"
PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH")  # of TORCH_LOCAL_PATH


@dataclass
class Machine:
    """One machine of the run. `here`: this one, which needs no ssh; `python`: there."""

    rank: int
    host: Host
    here: bool
    python: str = ""
    problems: list[Problem] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.host.name


def machines(hosts: list[Host], ssh_args: str) -> list[Machine]:
    """In the order of their node ranks. At most one is this machine: another name for it is left to
    ssh."""
    found: list[Machine] = []
    for rank, host in enumerate(hosts):
        where: Target = target(host.name, ssh_args)
        found.append(Machine(rank, host, where.is_here() and not any(m.here for m in found)))
    return found


def look(
    found: list[Machine], ssh_args: str, environ: Mapping[str, str], *, of_script: bool = True
) -> None:
    """Sets `python` and `problems` of every machine. `of_script`: of the user's program, which
    may have another Python."""
    for one in found:
        one.python = sys.executable if one.here else ""
    remote = [one for one in found if not one.here]
    if not remote:
        return
    if not shutil.which("ssh"):
        text = msg("launcher.hosts.no_ssh", hosts=", ".join(one.name for one in remote))
        fix = "sudo apt-get install openssh-client"
        remote[0].problems.append(Problem("hosts.no_ssh", text, "", [fix], "hosts"))
        return
    script, started = _script(environ).encode(), list[_Started]()
    end = time.monotonic() + LIMIT_S
    try:
        for one in remote:
            started.append(_Started(one, ssh.command(one.name, ssh_args, "exec sh -s"), script))
        for each in started:
            each.finish(end, ssh_args)
    finally:
        for each in started:
            each.close()
    needed = _is_own() and not of_script
    for one in remote:
        if needed and one.python not in ("", sys.executable):
            one.problems.append(_no_environment(one, ssh_args))


class _Started:
    """The examination of one machine. Its output is in files: a process that ssh leaves behind (a
    master with ControlPersist, a helper of a ProxyCommand) may keep a pipe open for hours."""

    def __init__(self, one: Machine, command: list[str], script: bytes) -> None:
        self.one = one
        self._out, self._error = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=self._error,
            start_new_session=True,  # no terminal to ask for a password
        )
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # ssh has failed: finish() reports it
            self._process.stdin.write(script)
            self._process.stdin.close()

    def finish(self, end: float, ssh_args: str) -> None:
        """Adds what it has found to the machine."""
        one = self.one
        try:
            status = self._process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.problems.append(ssh.problem(one.name, ssh_args, msg("launcher.hosts.silent")))
            return
        out, error = _text(self._out), _text(self._error)
        if status == ssh.FAILED:
            one.problems.append(ssh.problem(one.name, ssh_args, error))
            return
        answers = [
            line.removeprefix(MARK).strip() for line in out.splitlines() if line.startswith(MARK)
        ]
        one.problems += _problems(one, answers, error, ssh_args)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._error.close()


def _text(file: IO[bytes]) -> str:
    """All of it, without moving the position at which others may still write."""
    number = file.fileno()
    return os.pread(number, os.fstat(number).st_size, 0).decode("utf-8", "replace")


def _script(environ: Mapping[str, str]) -> str:
    # without the environment of a checkout another Python examines the rest; others have to exist
    pythons = (sys.executable, *_PYTHONS) if _is_own() else (sys.executable,)
    variables = [f"export {n}={shlex.quote(environ[n])}" for n in PATHS if environ.get(n)]
    return _SCRIPT.format(
        folder=shlex.quote(str(Path.cwd())),
        agent=shlex.quote(ssh.AGENT),
        mark=MARK,
        variables="\n".join(variables),
        pythons=shlex.join(pythons),
    )


def _is_own() -> bool:
    """Whether this Python is that of the project's own environment."""
    return Path(sys.executable).is_relative_to(OWN_VENV)


def _problems(one: Machine, answers: list[str], error: str, ssh_args: str) -> list[Problem]:
    found, host = [], one.name
    over = shlex.join(["ssh", *shlex.split(ssh_args), host])
    facts: dict[str, object] = {}
    for kind, _, text in (answer.partition(" ") for answer in answers):
        if kind == "python":
            one.python = text
        elif kind == "facts":
            facts = _facts(text)
        elif kind == "no-folder":
            what = msg("launcher.hosts.no_folder", host=host, folder=os.getcwd())
            fix = _copy(host, ssh_args, Path.cwd())
            found.append(Problem("hosts.no_folder", what, "", [fix], "hosts"))
        elif kind == "no-duet":
            what = msg("launcher.hosts.no_duet", host=host, folder=ROOT)
            found.append(Problem("hosts.no_duet", what, "", [_duet(host, ssh_args)], "hosts"))
        elif kind == "no-python":
            what = msg("launcher.hosts.no_python", host=host, python=_wanted())
            fix = f"{over} sudo apt-get install python3 python3-venv" if _is_own() else ""
            copied = [fix] if fix else [_copy(host, ssh_args, Path(sys.prefix))]
            found.append(Problem("hosts.no_python", what, "", copied, "hosts"))
    if not answers or (one.python and not facts):
        said = (error.strip().splitlines() or [msg("launcher.hosts.no_reason")])[-1]
        what = msg("launcher.hosts.no_answer", host=host, why=said)
        found.append(Problem("hosts.ssh", what, "", [f"{over} true"], "hosts"))
    elif facts:
        found += _differences(one, facts, over, ssh_args)
    return found


def _no_environment(one: Machine, ssh_args: str) -> Problem:
    """Its creation takes longer than the others wait for the machine."""
    what = msg("launcher.hosts.no_environment", host=one.name, python=sys.executable)
    make = f"cd {shlex.quote(str(ROOT))} && ./{MAKES_ENVIRONMENT}"
    fix = shlex.join(["ssh", *shlex.split(ssh_args), one.name, make])
    return Problem("hosts.no_environment", what, "", [fix], "hosts")


def _facts(text: str) -> dict[str, object]:
    try:
        facts = json.loads(text)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _differences(one: Machine, facts: dict[str, object], over: str, ssh_args: str) -> list[Problem]:
    found = []
    if not facts.get("torch") and one.python == sys.executable and not _is_own():
        what = msg("launcher.hosts.no_torch", host=one.name, python=one.python)
        fix = f"{over} {shlex.quote(one.python)} -m pip install torch"
        found.append(Problem("hosts.no_torch", what, "", [fix], "hosts"))
    if facts.get("files") != ssh.own_files():
        what = msg("launcher.hosts.other_duet", host=one.name, folder=ROOT)
        found.append(Problem("hosts.other_duet", what, "", [_duet(one.name, ssh_args)], "hosts"))
    return found


def _wanted() -> str:
    return msg("launcher.hosts.any_python") if _is_own() else sys.executable


def _duet(host: str, ssh_args: str) -> str:
    return _copy(host, ssh_args, Path(sys.prefix) if INSTALLED else ROOT)


def _copy(host: str, ssh_args: str, folder: Path) -> str:
    """The command that copies a folder to the same path on that machine."""
    shell = shlex.join(["ssh", *shlex.split(ssh_args)])
    words = ["rsync", "-a", *(["-e", shell] if ssh_args else [])]
    words += [f"--exclude={name}" for name in (".venv*", "experiments", "logs") if folder == ROOT]
    return shlex.join([*words, "--mkpath", f"{folder}/", f"{host}:{folder}/"])

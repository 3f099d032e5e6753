"""The launch command of one machine, started by its agent (lib/host_agent.py): over ssh, or as a
child where the machine is this one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping

from training.config.resolve import INTERNAL
from training.core import project
from training.core.project import LAUNCH_SCRIPT
from training.host import topology
from training.host.hosts import VARIABLE
from training.host.placement import Topology
from training.launcher.continued_run import JOINS
from training.launcher.hosts import ssh
from training.launcher.hosts.probe import Machine
from training.plan.script_words import RUN

COMMAND = "DUET_COMMAND"  # read by lib/init.sh
# Variables of a machine, a login or a job: every machine has its own.
_OWN = {
    *("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "PWD", "OLDPWD", "SHLVL", "HOSTNAME", "HOSTTYPE"),
    *("TERM", "COLUMNS", "LINES", "DISPLAY", "WAYLAND_DISPLAY", "WINDOWID", "TMPDIR", "TMP", "_"),
    *("TEMP", "HOST", "INVOCATION_ID", "JOURNAL_STREAM", "NOTIFY_SOCKET"),
    *("KRB5CCNAME", "NVIDIA_VISIBLE_DEVICES"),
}
_OWN_PREFIXES = (
    *("SSH_", "XDG_", "DBUS_", "SLURM", "KUBERNETES_", "OMPI_", "PMI", "MPI_LOCAL", "HYDRA_"),
    *("MV2_COMM_", "PALS_"),
    *("SKYPILOT_", "JOB_COMPLETION_", "JOBSET_", "BASH_FUNC_", "TMUX", "STY"),
)
GPUS = "CUDA_VISIBLE_DEVICES"  # numbers mean the same everywhere, UUIDs do not


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that every machine gets from this one: all but those of this machine, this
    login or another launcher."""
    private = INTERNAL - {"DUET_PYTHON"}
    return {
        name: value
        for name, value in environ.items()
        if name not in _OWN
        and name not in private
        and not name.startswith(_OWN_PREFIXES)
        and not topology.belongs_to_a_launcher(name)
        and (name != GPUS or re.fullmatch(r"[\d,\s]*", value))
    }


def start(machine: Machine, ssh_args: str) -> list[str]:
    """The command that starts the agent of a machine."""
    if machine.here:
        return ssh.local_agent()
    return ssh.command(machine.name, ssh_args, ssh.agent(machine.python or "python3"))


class Node:
    """The output of node 0 is that of this command, as it is; on this machine it also has its
    standard input. `output`, `errors`: what is to be shown of it. `elastic`: the run can continue
    without this machine. `joins`: it joins a run that has continued without it."""

    def __init__(
        self,
        machine: Machine,
        place: Topology,
        script: str,
        args: list[str],
        environ: Mapping[str, str],
        ssh_args: str,
        *,
        elastic: bool = False,
        joins: bool = False,
    ) -> None:
        self.machine = machine
        self.code: int | None = None
        self.rank, self.name = machine.rank, machine.name
        # the run can lose it: the others continue when its connection is lost. Node 0 coordinates
        # it, unless another machine has taken over.
        self._lone = elastic and (machine.rank != 0 or joins)
        where = f"{place.master_addr} {place.master_port}"
        variables = {VARIABLE: f"{machine.rank} {place.nnodes} {where}"}
        variables |= {JOINS: "1"} if joins else {}
        order = {
            "folder": os.getcwd(),
            "command": [*project.script(LAUNCH_SCRIPT if script == RUN else script), *args],
            "environ": passed_on(environ) | variables | ({COMMAND: RUN} if script == RUN else {}),
            "lone": self._lone,
        }
        shown = machine.rank == 0 and not joins  # as it is
        if machine.here and shown:
            reader, self._control = os.pipe()
            self._process = subprocess.Popen(ssh.local_agent(str(reader)), pass_fds=[reader])
            os.close(reader)
        else:
            self._process = subprocess.Popen(
                start(machine, ssh_args),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if shown else subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal must not end ssh
            )
            assert self._process.stdin
            self._control = os.dup(self._process.stdin.fileno())
            self._process.stdin.close()
        self.output, self.errors = self._process.stdout, self._process.stderr
        self._send(json.dumps(order))
        os.set_blocking(self._control, False)

    def ended(self) -> bool:
        """Has it ended? Then `code` is the status of its launch command, or ssh.FAILED."""
        if self.code is None:
            self.code = self._process.poll()
        return self.code is not None

    @property
    def link_lost(self) -> bool:
        return not self.machine.here and (self.code or 0) in (ssh.FAILED, *range(-64, 0))

    def becomes_first(self) -> None:
        """This machine coordinates the run now: it is stopped in order if this launcher is lost."""
        self._lone = False
        self._send(json.dumps({"lone": False}))

    def signal(self, number: int) -> None:
        self._send(json.dumps({"signal": number}))

    def keep_alive(self) -> None:
        self._send("")

    def close(self) -> None:
        """The agent stops its command, first with SIGTERM."""
        if self._control >= 0:
            if self._lone:  # its agent would wait for another machine to end the run
                self._send(json.dumps({"signal": int(signal.SIGTERM)}))
            os.close(self._control)
            self._control = -1

    def kill(self) -> None:
        """End the connection; the agent notices that."""
        self.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def _send(self, line: str) -> None:
        if self._control < 0:
            return
        data = line.encode() + b"\n"
        # it has ended, or the connection is stuck: its end is seen by ended()
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            while data:
                data = data[os.write(self._control, data) :]

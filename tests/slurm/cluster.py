"""A private SLURM on loopback: one slurmctld and a slurmd for each node, all as this user, without
munge, cgroups or a database."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.conftest import TOKEN, processes, wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
SEARCHED = (
    f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # Debian's daemons are not on a user's path
)
UP_WITHIN_S, DOWN_WITHIN_S = 30, 20
ASK_EVERY_S = 0.2  # each query starts a program

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
GresTypes=gpu
ReturnToService=2
# Time between TERM and KILL, for saving a checkpoint on a busy machine.
KillWait=30
InactiveLimit=0
SlurmdTimeout={timeout_s}
# Requeued and freed at once, not at the next full look of the scheduler.
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
# A job here preempts those in the other partition, on a node of which it needs all.
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE PriorityTier=10
"""


def missing() -> list[str]:
    return [name for name in PROGRAMS if not shutil.which(name, path=SEARCHED)]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


@dataclass
class Cluster:
    folder: Path
    nodes: int = 2
    timeout_s: int = 300  # without an answer of a slurmd, before its node is down
    # of the daemons and the processes that they start
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)
    slurmd: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)  # by node

    @property
    def environment(self) -> dict[str, str]:
        """Environment of commands that use this SLURM rather than another one of the machine."""
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SLURM", "SBATCH_", "DUET_", "WANDB_"))
        }
        return clean | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SEARCHED}

    def start(self) -> None:
        host, ports = socket.gethostname().split(".")[0], free_ports(1 + self.nodes)
        # Any numbered device nodes serve as GPUs. Where there are none (containers), files do, but
        # the job does not see numbers.
        folder = (
            Path("/dev")
            if all(Path(f"/dev/tty{i}").is_char_device() for i in range(2))
            else self.folder
        )
        if folder == self.folder:
            for i in range(2):
                (folder / f"tty{i}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={folder}/tty[0-1]\n")
        lines = [
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1 + i]} CPUs=8 "
            f"RealMemory=1000 Gres=gpu:2 State=UNKNOWN"
            for i in range(self.nodes)
        ]
        text = CONFIGURATION.format(
            host=host,
            ports=ports,
            user=getpass.getuser(),
            folder=self.folder,
            nodes="\n".join(lines),
            timeout_s=self.timeout_s,
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        self._daemon("slurmctld", "-D")
        for i in range(self.nodes):
            self.start_node(i)
        wait_until(
            lambda: set(self.ask("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"},
            UP_WITHIN_S,
            f"idle nodes: {self.logs()}",
        )

    def start_node(self, number: int) -> None:
        self.slurmd[number] = self._daemon("slurmd", "-D", "-N", f"n{number}")

    def fail_node(self, number: int) -> None:
        """Like a power failure: its slurmd and all processes of its jobs are killed. They are stopped
        before, or a slurmstepd would report the end of a job."""
        self.slurmd[number].kill()
        while found := self._of_node(f"n{number}"):
            daemons = {one for one in found if _name(one) == "slurmstepd"}
            for act, some in (
                (psutil.Process.suspend, daemons),
                (psutil.Process.kill, found),
            ):
                for one in some:
                    with suppress(psutil.NoSuchProcess):
                        act(one)

    def freeze_node(self, number: int) -> None:
        """The processes of its jobs do not answer any more; its slurmd does."""
        for one in self._of_node(f"n{number}"):
            with suppress(psutil.NoSuchProcess):
                if _name(one) != "slurmstepd":
                    one.suspend()

    def _of_node(self, name: str) -> set[psutil.Process]:
        """The processes of jobs on a node, and their slurmstepd."""
        found = set()
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                environ = one.environ()
                own = environ.get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if own and environ.get("SLURMD_NODENAME") == name:
                    found |= {one, *(p for p in one.parents() if p.name() == "slurmstepd")}
        return found

    def _daemon(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        program = shutil.which(name, path=SEARCHED)
        assert program
        with (self.folder / f"{name}{len(self.daemons)}.out").open("wb") as out:
            env = self.environment | {TOKEN: self.token}
            self.daemons.append(
                subprocess.Popen(
                    [program, *options], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
            )
        return self.daemons[-1]

    def stop(self) -> None:
        """End the remaining jobs, then the daemons, each by its process; none may be left."""
        try:
            for job in self.ask("squeue", "-h", "-o", "%A").split():
                self.ask("scancel", job)
            wait_until(lambda: not self.ask("squeue", "-h"), 45, "no job", ASK_EVERY_S)
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
            for daemon in self.daemons:
                try:
                    daemon.wait(DOWN_WITHIN_S)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
            end = time.monotonic() + DOWN_WITHIN_S
            while (left := processes(self.token)) and time.monotonic() < end:
                time.sleep(0.05)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert not left, f"left behind: {left}"

    def ask(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        ).stdout

    def logs(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.folder.glob("*.out"))
        )

    def facts(self, job: str) -> dict[str, str]:
        """Fields of `scontrol show job`: JobState, ExitCode, Restarts, NodeList, …"""
        return dict(
            re.findall(
                r"(?:^| )([A-Za-z:/]+)=(\S*)", self.ask("scontrol", "show", "job", "-o", job)
            )
        )

    def wait_state(self, job: str, *states: str, seconds: float = 90) -> dict[str, str]:
        """Faster than `sbatch --wait`, which polls every 10 s."""
        wait_until(
            lambda: self.facts(job).get("JobState") in states,
            seconds,
            f"job {job} {states}",
            ASK_EVERY_S,
        )
        return self.facts(job)


@contextmanager
def running(folder: Path, timeout_s: int = 300) -> Iterator[Cluster]:
    cluster = Cluster(folder, timeout_s=timeout_s)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""

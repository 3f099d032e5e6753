"""Questions and requests to slurmctld, by scontrol and squeue."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 60  # for an answer of slurmctld, which may be busy
# slurmctld is restarted, or its backup takes over
AWAY = re.compile(r"contact|timed out|connect|Zero Bytes|standby", re.IGNORECASE)
UNKNOWN_CLUSTER = "Could not establish a configuration source"  # no slurm.conf, nor DNS record
AWAY_S, RETRY_S = 120.0, 5.0
PAUSE_S = 60.0  # of ask_if_there(): an attempt may take 10 s

# states of a job that does not start again
OVER = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)

# When ask_if_there() could not reach a cluster, by its options.
_away: dict[tuple[str, ...], float] = {}
_local: list[str] = []  # the answer of _local_cluster(), once known


def hostnames(nodes: str) -> tuple[list[str], str]:
    """(names in a list of nodes such as n[0-3], error or '')"""
    answer = ask("show", "hostnames", nodes)
    return ([], answer.error) if answer.status else (answer.out.split(), "")


class Answer(NamedTuple):
    status: int
    out: str
    err: str  # warnings too

    @property
    def error(self) -> str:
        return (self.err + self.out).strip()


def ask(*words: str) -> Answer:
    """Asks again while slurmctld cannot be reached, for AWAY_S."""
    end = time.monotonic() + AWAY_S
    while True:
        answer = ask_once(*words)
        if answer.status == 0 or not AWAY.search(answer.error) or time.monotonic() > end:
            return answer
        time.sleep(RETRY_S)


def ask_once(
    *words: str,
    by: str = "scontrol",
    environ: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> Answer:
    """`environ`: None for that of this process."""
    try:
        done = subprocess.run(
            [by, *words], capture_output=True, text=True, timeout=limit_s, check=False, env=environ
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(1, "", str(error))
    return Answer(done.returncode, done.stdout, done.stderr)


def ask_if_there(*words: str, cluster: str = "", limit_s: float = LIMIT_S) -> Answer:
    """Asks once, and not within PAUSE_S after slurmctld could not be reached. `cluster`: "" for the
    one that commands use by default."""
    # Other ones are found by slurmdbd, which not every site has.
    on = ("-M", cluster) if cluster and cluster != _local_cluster(limit_s) else ()
    # the name of a default cluster that is away is unknown: `cluster` may be that one
    if _is_away(on) or (not _local and _is_away(())):
        return Answer(1, "", "")
    answer = ask_once(*on, *words, limit_s=limit_s)
    if answer.status and AWAY.search(answer.error):
        _away[on] = time.monotonic()
    return answer


def _is_away(on: tuple[str, ...]) -> bool:
    return time.monotonic() - _away.get(on, -PAUSE_S) < PAUSE_S


def queued(script: Path, on: list[str]) -> str | None:
    """`NUMBER` or `NUMBER;CLUSTER` of this user's job with this script that has not ended, "" if
    there is none; None without an answer. `on`: options of another cluster."""
    ended = (*OVER, "COMPLETING")  # not over, but begun: its run knows the number
    # Without the header squeue does not name the cluster; -a: hidden partitions too.
    words = ("-a", "-t", "all", "-u", str(os.getuid()), "-o", "%A %T %o")
    # without the user's own filters and columns
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SQUEUE_")}
    answer = ask_once(*on, *words, by="squeue", environ=environ)
    cluster = ""
    for line in answer.out.splitlines():
        number, state, command = [*line.split(None, 2), "", "", ""][:3]
        if number == "CLUSTER:":
            cluster = f";{state}"
        elif command.startswith(str(script)) and state not in ended:
            return number + cluster
    nowhere = UNKNOWN_CLUSTER in answer.error  # then sbatch has reached none either
    return None if answer.status and not nowhere else ""


def _local_cluster(limit_s: float) -> str:
    """Name of the cluster that commands use by default; "": unknown so far."""
    if not _local:
        text = ask_if_there("show", "config", limit_s=limit_s).out
        _local[:] = re.findall(r"^ClusterName *= *(\S+)", text, re.MULTILINE)
    return _local[0] if _local else ""

"""The kernel's messages as evidence of a verdict: which process it has killed, which GPU has
failed."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from training.core import cause_ids, exit_status, heartbeat, log, run_reader, rundir
from training.core.messages import msg
from training.core.plain_text import one_line
from training.core.redact import masked
from training.diagnose import advice, exception_cause, kernel_lines
from training.diagnose.kernel_lines import KernelLine
from training.diagnose.signatures import ROOT, WEAK
from training.host import cgroups, gpu_processes
from training.host.kernel_log import KernelLog, KernelMessages
from training.host.visible_devices import PART
from training.host.xid_events import XidEvents
from training.launcher import seats
from training.watchdog.rank_exit import DIED, ERROR

if TYPE_CHECKING:
    from training.core.contracts.kinds import FailureKind
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import KernelRecord, RankErrorRecord
    from training.launcher.outcome import Outcome

BY_DRIVER = "NVML"
SHOWN = 3  # of the first messages, and of the last ones
WORKERS = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\)")
WAITED = (cause_ids.PEER_DIED, cause_ids.COLLECTIVE_TIMEOUT)
VAGUE = (*exception_cause.VAGUE, *WAITED)
# what the end of a process by the kernel may look like
ENDED = (*(*VAGUE, cause_ids.KILLED, cause_ids.HOST_OOM_KILLED, cause_ids.DATALOADER_WORKER_DIED),)
# and a failure of a GPU
WITHOUT_GPU = (
    *(*VAGUE, cause_ids.SEGFAULT, cause_ids.KILLED, cause_ids.GPU_HARDWARE),
    *(cause_ids.CUDA_DEVICE_ASSERT, cause_ids.NO_GPU),
    *(cause_ids.NCCL_INIT, cause_ids.NCCL_NETWORK),
)
REPORTED = (cause_ids.RAISED, cause_ids.EXIT_STATUS)  # of the rank itself
READ_FOR = {*ENDED, *WITHOUT_GPU, cause_ids.HANG}


@dataclass(frozen=True)
class Explanation:
    """A cause by the kernel's messages. `line`: None where they only refute another cause."""

    cause: str
    rank: int | None
    summary: str
    line: KernelLine | None


@dataclass(frozen=True)
class KernelEvidence:
    """`same_pids`: the kernel has the same PIDs, as not in a container; `knows_killed`: that of a
    process that it may have killed is known."""

    messages: KernelMessages
    lines: Sequence[KernelLine]
    same_pids: bool
    knows_killed: bool

    @property
    def complete(self) -> bool:
        """Does a process without a message have none?"""
        return self.same_pids and self.messages.whole

    def record(self) -> KernelRecord:
        """With the first messages about the run, and the last ones."""
        texts = [one_line(masked(line.text)) for line in self.lines]
        if len(texts) > 2 * SHOWN:
            texts = [*texts[:SHOWN], *texts[-SHOWN:]]
        if texts or (self.messages.source and self.complete):
            return {"source": self.messages.source or BY_DRIVER, "lines": texts}
        other = (
            msg("launcher.kernel.overwritten")
            if self.same_pids
            else msg("launcher.kernel.other_pids")
        )
        return {"source": "", "lines": [], "reason": self.messages.reason or other}

    def explanation(
        self, cause: str, kind: FailureKind, rank: int | None, status: int, summary: str
    ) -> Explanation | None:
        """The cause of the end of a rank, or of a hang. `cause`, `kind`, `rank` and `summary`: of
        the verdict without these messages."""
        hardware = self._first(cause_ids.GPU_HARDWARE, ROOT)
        if kind not in (DIED, ERROR):
            # One that is stuck for another reason has a GPU that works.
            its = hardware and cause == cause_ids.HANG and rank in (None, hardware.rank)
            return _explained(hardware, rank, summary) if hardware and its else None
        memory = self._first(cause_ids.HOST_OOM_KILLED, ROOT)
        if memory and cause in ENDED:
            return _explained(memory, rank, summary)
        proves = self.complete and self.knows_killed
        if cause == cause_ids.HOST_OOM_KILLED and proves and self._killed_others():
            return Explanation(cause_ids.KILLED, rank, exit_status.how(status), None)
        if hardware and cause in WITHOUT_GPU:
            return _explained(hardware, rank, summary)
        program = self._first(cause_ids.CUDA_DEVICE_ASSERT, WEAK)
        its = program and (program.rank == rank or cause not in REPORTED)
        if program and program.named and its and cause in VAGUE and not self._of_all(program):
            return _explained(program, rank, summary)
        return None

    def line_of(self, cause: str) -> KernelLine | None:
        """The first message with this cause; a hang may be that of a failed GPU."""
        of = cause_ids.GPU_HARDWARE if cause == cause_ids.HANG else cause
        return self._first(of, ROOT) or (self._first(of, WEAK) if of == cause else None)

    def _first(self, cause: str, role: str) -> KernelLine | None:
        """The first message; a broken link last: it breaks with the GPU at its other end."""
        found = [
            line for line in self.lines if line.shows(cause, role) and not self._of_abort(line)
        ]
        return min(found, key=kernel_lines.is_of_link, default=None)

    def _of_abort(self, line: KernelLine) -> bool:
        """Has the access to a rank that had ended left an error in memory that is intact?"""
        before = self.lines[: self.lines.index(line)]
        return (
            line.xid == kernel_lines.CONTAINED
            and any(other.xid == kernel_lines.PEER_ACCESS for other in before)
            and not any(other.place == line.place and other.of_memory for other in self.lines)
        )

    def _of_all(self, line: KernelLine) -> bool:
        """Did several ranks have it? Then it follows from the end of one of them."""
        return line.xid == kernel_lines.PEER_ACCESS and any(
            other.xid == line.xid and other.place != line.place for other in self.lines
        )

    def _killed_others(self) -> bool:
        return bool(kernel_lines.killed(self.messages.lines))


def begin(outcome: Outcome, plan: Plan) -> None:
    """Before the ranks are started."""
    outcome.kernel = KernelLog()
    uuids = [gpu["uuid"] for gpu in plan["gpus"] if not gpu["uuid"].startswith(PART)]
    if uuids and not outcome.kernel.may_be_read and not outcome.watched:
        try:
            outcome.xids = XidEvents(uuids)
        except OSError as error:  # too many processes: the ranks will fail to start as well
            log.warning(msg("launcher.kernel.not_followed", error=error))


def end(outcome: Outcome) -> None:
    for one in (outcome.kernel, outcome.xids):
        if one:
            one.close()


def kills_for_memory(outcome: Outcome) -> str:
    """Evidence by the count of the kernel that a rank was killed for lack of memory; '' without."""
    before, now = outcome.oom_kills, cgroups.oom_kills()
    if before is None or now is None or now <= before:
        return ""
    return msg(
        "launcher.failure.memory", how=exit_status.how(-signal.SIGKILL), before=before, now=now
    )


def consult(
    outcome: Outcome,
    run: rundir.RunDir,
    plan: Plan,
    cause: str,
    kind: FailureKind,
    own: RankErrorRecord | None,
) -> KernelEvidence | None:
    """None: the messages cannot explain this cause, or the ranks ran elsewhere."""
    if outcome.kernel is None:
        return None
    asked = kind == rundir.ASKED or outcome.torn_down
    if asked or cause not in READ_FOR or (outcome.here is None and not outcome.finding):
        end(outcome)
        return None
    read = outcome.kernel.read()
    until = outcome.kernel.until or math.inf
    if own and cause in REPORTED:
        until = min(until, own["time"])  # the end of a process leaves some as well
    events = [one for one in outcome.xids.read() if one.time <= until] if outcome.xids else []
    end(outcome)
    same = gpu_processes.own_pids()
    # a watched command selects its GPUs itself
    used = [] if outcome.watched else plan["gpus"]
    pids = _pids(outcome, run, plan, own)
    lines = kernel_lines.about(read.lines, pids if same else None, used)
    if not any(line.place is not None for line in lines):  # the journal may have the same ones
        lines += kernel_lines.of_events(events, used)
    placed = [_placed(line, plan, own) for line in lines]
    return KernelEvidence(read, placed, same, _knows_killed(outcome, pids, own))


def _knows_killed(outcome: Outcome, pids: Mapping[int, int], own: RankErrorRecord | None) -> bool:
    """Is the PID of the process that died by SIGKILL one of these? It may be below a rank: a
    process of mp.spawn, a rank of torchrun, the program in a shell script."""
    if own and "process" in own:
        return "pid" in own
    rank, status = outcome.here or (None, 0)
    return outcome.ours or (rank in pids.values() and -status == signal.SIGKILL)


def _pids(
    outcome: Outcome, run: rundir.RunDir, plan: Plan, own: RankErrorRecord | None
) -> dict[int, int]:
    """PID → rank, of this machine's ranks in this attempt and their trainings; also of processes of
    mp.spawn and data-loader workers that an error names."""
    alone = plan["place"]["nnodes"] == 1  # else they may be of another machine
    found = {beat.pid: beat.rank for beat in heartbeat.read_all(run.heartbeats) if alone}
    for entry in (run_reader.read_supervisor(run.supervisor) or {}).get("ranks", []):
        if entry["rank"] is not None:
            found[entry["pid"]] = entry["rank"]
    found |= outcome.pids
    if own and "pid" in own:
        found[own["pid"]] = own["rank"]
    workers = WORKERS.search(own["message"]) if own else None
    if own and workers:
        found |= dict.fromkeys(map(int, re.findall(r"\d+", workers["pids"])), own["rank"])
    return found


def _placed(line: KernelLine, plan: Plan, own: RankErrorRecord | None) -> KernelLine:
    """With the rank of its GPU, if that has one alone."""
    place = line.place
    if line.rank is not None or place is None or (own and "process" in own):
        return line
    address = plan["gpus"][place].get("pci")
    if [gpu.get("pci") for gpu in plan["gpus"]].count(address) > 1:
        return line
    rank = seats.ranks(plan).start + place
    return replace(line, rank=rank)


def _explained(line: KernelLine, rank: int | None, summary: str) -> Explanation:
    assert line.signature is not None
    says = advice.filled(line.signature.says, line.groups)
    text = says[0] if says else one_line(line.text)
    guilty = rank if line.rank is None else line.rank
    if rank is None or guilty == rank:
        text = msg("launcher.kernel.explains", summary=summary, text=text)
    return Explanation(line.signature.cause, guilty, text, line)

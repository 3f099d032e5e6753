"""Cause id of a rank's failure. Only structured evidence counts: the exception that the rank
reported, and the end of an aborted rank's log. Logs of other ranks are not evidence."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from training.core import cause_ids, exit_status, phases
from training.core import log as console
from training.core.messages import msg
from training.core.plain_text import one_line, shortened
from training.core.project import PACKAGE, ROOT
from training.core.tail import within
from training.diagnose import connections, signatures
from training.host.gpus import LIMIT_S
from training.host.visible_devices import PART

if TYPE_CHECKING:
    from training.core.contracts.plan import GpuRecord, Plan
    from training.core.contracts.verdict import ChainedError, RankErrorRecord, ReportedError
    from training.diagnose.root_cause import RootCause
    from training.diagnose.signatures import Signature

SEARCHED_BYTES = 64 << 20  # of a log: a second
# NVML answers within a second, or within seconds per GPU if the driver is not kept loaded, as when
# all ranks have died; it may block forever if a GPU fell off the bus.
DRIVER_S, PATIENT_S = 10.0, LIMIT_S
ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from training.host import gpus
machine = gpus.inventory({}, sys.argv[2:])
found = {"answers": machine.driver is not None, "reason": machine.reason}
found["uuids"] = [gpu.uuid for gpu in machine.gpus]
found["gpus"] = [gpu.record() for gpu in machine.gpus]
print(json.dumps(found))
"""
GPU = re.compile(r"\bGPU (\d+)")
NAMES_RANK = "(?P<rank>"  # in a pattern
SIGNALLED = "distributed.nccl.dump_signal"  # id of a signature
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
# the rank's log may be more specific
VAGUE = {cause_ids.UNKNOWN, cause_ids.RAISED, cause_ids.EXIT_STATUS}
LEFT = "SystemExit"  # type in the error file of a script that called sys.exit
BY_ELASTIC = "SignalException"  # of torchrun's handler
# A process of mp.spawn has ended without an exception: it belongs to the rank, and is not its peer.
EXITED = "ProcessExitedException"
BY_SIGNAL = re.compile(r"terminated with signal (SIG\w+)")
BUFFER = 16 << 10  # bytes that a process may still print after the traceback that ended it
WORKER = "DataLoader worker"  # in torch's messages
STOPPED_WORKER = re.compile(rf"{WORKER}.*(?:by signal: Terminated|exited unexpectedly)")
BY_TYPE = {
    "NotFinite": cause_ids.NAN_LOSS,
    "ParametersDiffer": cause_ids.DDP_PARAMS_MISMATCH,
    "OutOfMemoryError": cause_ids.GPU_OOM,
    "BarrierError": cause_ids.HANG,
    "MemoryError": cause_ids.HOST_OOM_KILLED,
    "RankEnded": cause_ids.PEER_DIED,
}


class DriverAnswer(TypedDict):
    """Output of ASK."""

    answers: bool
    uuids: list[str]
    gpus: list[GpuRecord]
    reason: str


def of_error(error: ReportedError) -> str:
    """Cause of the error that a rank reported (training.trainer.error_file)."""
    if error["type"] == EXITED and (by := BY_SIGNAL.search(error["message"])):
        return of_status(-signal.Signals[by[1]])
    chain = [_known(one) for one in (error, *error.get("before", ()))]
    own, role = chain[0]
    if own == cause_ids.PEER_DIED and _of_another_connection(error):
        own, role = cause_ids.UNKNOWN, ""
    if own == cause_ids.UNKNOWN or role == signatures.WEAK:
        own = next((cause for cause, role in chain if role == signatures.ROOT), own)
    if own == cause_ids.CHECKPOINT_CORRUPT and _reads_data(error):
        return cause_ids.RAISED
    return BY_TYPE.get(error["type"]) or (
        cause_ids.RAISED if own == cause_ids.UNKNOWN and error["type"] != LEFT else own
    )


def damaged_data(error: ReportedError) -> bool:
    """Is it the error of a damaged checkpoint, but of a file that the task itself has read?"""
    return _reads_data(error) and is_damage(_text(error))


def is_damage(text: str) -> bool:
    """Is this the text of an error that names a damaged or truncated file?"""
    from training.diagnose.scan import named

    return named(text, (cause_ids.CHECKPOINT_CORRUPT,))[0] is not None


def _reads_data(error: Mapping[str, object]) -> bool:
    """Did a rank of Duet's training read samples, or run code of the task?"""
    phase, where = str(error.get("phase") or ""), str(error.get("where") or PACKAGE)
    return bool(phase) and (phases.needs_data(phase) or not where.startswith(PACKAGE))


def of_status(status: int) -> str:
    """Cause by the exit status of a rank without a report. An abort stays unknown: the rank's log
    may name its reason."""
    if status >= 0:
        return cause_ids.EXIT_STATUS
    if -status == signal.SIGABRT:
        return cause_ids.UNKNOWN
    return cause_ids.SEGFAULT if -status in CRASHES else cause_ids.KILLED


def of_log(log: Path, rank: int | None, since: int) -> RootCause | None:
    """Cause of a rank without a report, from its log after the byte `since`: by the catalogue or
    the traceback at its end. None if there is neither."""
    from training.diagnose import events, log_analysis, root_cause, scan, source

    try:
        size = log.stat().st_size
        read = source.LogSource(log, rank, max(within(size, since), size - SEARCHED_BYTES))
    except OSError:
        return None
    try:
        found = root_cause.find_root_cause([log_analysis.read(read, scan.scan(read))])
        size = log.stat().st_size
    finally:
        read.close()
    event = found.event
    if event is None:
        return None
    if event.role == events.UNLISTED and event.thrown:
        return found if event.thrown.last > size - BUFFER else None  # an older one was not fatal
    return (
        found
        if found.cause == cause_ids.PEER_DIED
        or (event.role in events.ABOUT_ITSELF and found.cause != cause_ids.UNKNOWN)
        or end_of(found)
        else None
    )


def end_of(found: RootCause) -> str:
    """How the rank that failed first has ended, if its log has no more than torchrun's report of
    that; '' otherwise."""
    status, event = found.status, found.event
    if status is None or (event and event.thrown) or found.cause != of_status(status):
        return ""
    return exit_status.how(status)


def lost_gpus(plan: Plan, limit_s: float) -> tuple[str, tuple[int, ...]]:
    """Planned GPUs of this machine that the driver no longer lists, of all that it lists: message,
    '' if none, and their positions in the plan, () if the driver does not answer in time, which
    proves nothing."""
    if plan["device"]["value"] != "cuda" or not plan["gpus"]:
        return "", ()
    try:
        machine = ask_driver(limit_s)
    except subprocess.TimeoutExpired:
        return msg("diagnose.gpus.no_answer", limit_s=limit_s), ()
    except (OSError, ValueError) as error:
        console.warning(msg("diagnose.gpus.query_failed", error=error))
        return "", ()
    if not machine["answers"]:
        # Its files were replaced by an update, or a container lost its access to the devices: what
        # already computes continues: the GPUs may be intact.
        console.warning(msg("diagnose.gpus.query_failed", error=machine["reason"]))
        return "", ()
    lost = {
        place: f"GPU {gpu['index']} ({gpu['name']})"
        for place, gpu in enumerate(plan["gpus"])
        if gpu["uuid"] not in machine["uuids"] and not gpu["uuid"].startswith(PART)
    }
    if not lost:
        return "", ()
    names = ", ".join(lost.values())
    return msg("diagnose.gpus.lost", lost=names, reason=machine["reason"]), tuple(lost)


def gpu_of(plan: Plan, place: int, text: str) -> int | None:
    """Index on this machine of the GPU that torch names in `text` by its place among the visible
    ones; None if that is the same number, or if it is not the GPU of this local rank."""
    named = GPU.search(text)
    if not named or int(named[1]) != place or not 0 <= place < len(plan["gpus"]):
        return None
    gpu = plan["gpus"][place]
    return None if gpu["index"] == place or gpu["uuid"].startswith(PART) else gpu["index"]


def ask_driver(limit_s: float, instances: Iterable[str] = ()) -> DriverAnswer:
    """In a separate process: a process that waits for a dead GPU cannot be interrupted or killed,
    so it is abandoned. `instances`: as of gpus.inventory. Raises subprocess.TimeoutExpired, OSError
    or ValueError."""
    command = [sys.executable, "-c", ASK, str(ROOT), *instances]
    asked = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        answer, complaint = asked.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        asked.kill()
        raise
    if asked.returncode:
        raise OSError(
            complaint.decode("utf-8", "replace").strip().rpartition("\n")[2]
            or msg("diagnose.gpus.status", status=asked.returncode)
        )
    found: DriverAnswer = json.loads(answer)
    return found


def left(error: ReportedError) -> str:
    """Exit of a script that called sys.exit: with a status, or with a message (status 1)."""
    text = one_line(error["message"])
    return (
        exit_status.how(int(text) & 0xFF)
        if text.lstrip("-").isdecimal()
        else f"{exit_status.how(1)}: {shortened(text, 200)}"
    )


def is_weak(error: ReportedError) -> bool:
    """May the rank's log name the reason, which this error does not?"""
    return error["type"] not in BY_TYPE and _known(error)[1] == signatures.WEAK


def is_victim(error: ReportedError) -> bool:
    if error["type"] == LEFT:  # after an exception that the script has caught
        return _raised_from_loss(error)
    return timed_out(error) or (
        error["type"] not in (*BY_TYPE, EXITED)
        and _known(error)[1] == signatures.CASCADE
        and not _of_another_connection(error)
    )


def may_follow(error: ReportedError) -> bool:
    """May another rank's end be the reason?"""
    known = _signature(_text(error))
    return is_victim(error) or (known is not None and known.id == signatures.PEER_MEMORY)


def timed_out(error: ReportedError) -> bool:
    """Has it waited in a collective for a rank that did not take part?"""
    return error["type"] not in BY_TYPE and _waited(_signature(_text(error)))


def timed_out_by_log(found: RootCause | None) -> bool:
    """The same of a rank without a report."""
    return found is not None and found.event is not None and _waited(found.event.signature)


def only_signalled(found: RootCause | None) -> bool:
    """Has it only received the signal that NCCL sends to all ranks after a timeout of one?"""
    known = found.event.signature if found is not None and found.event is not None else None
    return known is not None and known.id == SIGNALLED


def named_as_missing(error: ReportedError) -> int | None:
    """The rank that was waited for, if the message names it."""
    from training.diagnose.scan import named

    named_rank = named(_text(error), (cause_ids.COLLECTIVE_TIMEOUT,))[1].get("rank", "")
    return int(named_rank) if named_rank.isdecimal() else None


def _waited(known: Signature | None) -> bool:
    """A message that names the missing rank is the root for a reader of logs, but the rank that
    prints it has waited."""
    if known is None or known.cause != cause_ids.COLLECTIVE_TIMEOUT:
        return False
    return known.role == signatures.VICTIM or any(NAMES_RANK in one for one in known.patterns)


def _of_another_connection(error: ReportedError) -> bool:
    """Was its connection, or file, the script's own?"""
    trace = error.get("traceback")
    return trace is not None and connections.is_own(error["type"], trace, connections.RANKS)


def lost_peer(error: ReportedError) -> bool:
    """A victim, or an error raised from one: `raise … from error`. Weaker evidence: it may be any
    connection."""
    return is_victim(error) or _raised_from_loss(error)


def _raised_from_loss(error: ReportedError) -> bool:
    trace = error.get("traceback")
    return any(
        _known(one)[0] == cause_ids.PEER_DIED
        and (trace is None or not connections.is_own(one["type"], trace, connections.RANKS))
        for one in error.get("before", ())
    )


def root(errors: Sequence[RankErrorRecord], rank: int | None) -> RankErrorRecord | None:
    """The report of the rank that failed first; if that may follow from the loss of a peer, the
    peer's: an earlier one, else a later one, as a `finally` may close the connections long before
    the exception is reported."""
    own = next((e for e in errors if e["rank"] == rank), None)
    if own is None or not may_follow(own):
        return own
    free = [e for e in errors if not may_follow(e)]
    before = [e for e in free if e["time"] <= own["time"]]
    after = [e for e in free if not lost_peer(e) and not _ended_by_request(e)]
    return min(before or after, key=lambda e: e["time"], default=own)


def _ended_by_request(error: ReportedError) -> bool:
    """May a signal have ended it, or its data-loader worker? torchrun sends SIGTERM to the ranks
    that are left."""
    if error["type"] == BY_ELASTIC or STOPPED_WORKER.search(error["message"]):
        return True
    return error["type"] in (LEFT, KeyboardInterrupt.__name__) and not error.get("before")


def suspects_gpu(error: ReportedError | None, line: str) -> bool:
    """May a defective GPU be the cause? `line`: of the log. A failed assertion of a kernel is an
    error of the program."""
    chain = (error, *error.get("before", ())) if error else ()
    found = [_signature(text) for text in (*map(_text, chain), line)]
    kernel = [s for s in found if s and s.cause == cause_ids.CUDA_DEVICE_ASSERT]
    return bool(kernel) and all(s.suspect for s in kernel)


def of_worker(error: ReportedError | None, line: str) -> bool:
    """Was a data-loader worker killed, or did it raise the error? `line`: of the log."""
    chain = (error, *error.get("before", ())) if error else ()
    return any(WORKER in text for text in (*(one["message"] for one in chain), line))


def _known(error: ChainedError) -> tuple[str, str]:
    """(cause, role) by the catalogue."""
    known = _signature(_text(error))
    return (known.cause, known.role) if known else (cause_ids.UNKNOWN, "")


def _text(error: ChainedError) -> str:
    return f"{error['type']}: {error['message']}"


def _signature(text: str) -> Signature | None:
    from training.diagnose.scan import recognised

    return next(
        (
            s
            for s in recognised(text)
            if s.role != signatures.EVIDENCE
            and (s.role != signatures.CASCADE or s.cause == cause_ids.PEER_DIED)
        ),
        None,
    )

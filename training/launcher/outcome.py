"""Result of one attempt, as seen by the supervisor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from training.core.errors import Exit
from training.host.kernel_log import KernelLog
from training.host.xid_events import XidEvents
from training.launcher.peer_link import LostPeer
from training.watchdog.hang_report import HangFinding
from training.watchdog.rank_exit import RankExit


@dataclass
class Outcome:
    """`ended` lists (rank or None, wait status as in Popen.returncode), first exit first."""

    ended: list[tuple[int | None, int]] = field(default_factory=list)
    guilty: tuple[int | None, int] | None = None  # the first that failed
    here: tuple[int | None, int] | None = None  # the first that failed on this machine
    # time.monotonic() of the first failure, or of a stop by one rank alone: the grace of the others
    # begins
    failed_at: float | None = None
    # rank → its phase when the first one failed
    phases: dict[int, str] = field(default_factory=dict)
    death: RankExit | None = None  # how and where the first rank failed
    finding: HangFinding | None = None  # the hang that ended it
    # Which rank the first one waited for, if that was ended by torch's timeout of a collective.
    missing: HangFinding | None = None
    asked: Exit = Exit.DONE  # PREEMPTED or INTERRUPTED after a stop signal
    late_stop: int | None = None  # that signal, where it came after the first failure
    resized: bool = False  # asked to save and exit, to start again with other ranks
    killed: bool = False  # asked to stop twice, or the ranks did not stop
    forced: bool = False  # the same, where an exception before the request is the failure
    # which rank made no progress then, and which ones waited for it
    stalled: HangFinding | None = None
    idle: bool = False  # killed before a rank of Duet's training had begun a step
    closed: Exit = Exit.DONE  # exit code of a training whose ranks did not exit
    blocked: str = ""  # ranks that even SIGKILL does not end
    elsewhere: bool = False  # a rank of another machine failed first
    left: int | None = (
        None  # rank of Duet's training that got a stop signal alone and exited without the others
    )
    lost: LostPeer | None = None  # the lost or silent machine, when that ended the attempt
    # command that started the ranks (./duet watch); "": Duet or torchrun did
    watched: str = ""
    ours: bool = True  # Duet's own training; False: a user script
    torn_down: bool = False  # the script had completed, and was aborted during teardown
    gone: bool = False  # the run directory was removed while ranks ran: no file can be written
    # rank → exception that has ended a thread of it
    in_threads: dict[int, str] = field(default_factory=dict)
    # rank → exception that it could not write to its file: TYPE: MESSAGE at FILE:LINE
    unwritten: dict[int, str] = field(default_factory=dict)
    # log → offset of this attempt: logs span several attempts
    log_from: dict[Path, int] = field(default_factory=dict)
    # PID → rank, of a script's ranks and of the processes below them that have trained
    pids: dict[int, int] = field(default_factory=dict)
    oom_kills: int | None = None  # the kernel's OOM-kill count before this attempt
    kernel: KernelLog | None = None  # its messages since then
    xids: XidEvents | None = None  # errors of GPUs since then, where the log may not be read

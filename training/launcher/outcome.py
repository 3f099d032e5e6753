"""What became of one start of all ranks, as the supervisor has seen it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from training.core.errors import Exit
from training.launcher.peer_link import LostPeer
from training.watchdog.hang_report import HangFinding
from training.watchdog.rank_exit import RankExit


@dataclass
class Outcome:
    """`ended` lists (rank or None, wait status as in Popen.returncode), first death first."""

    ended: list[tuple[int | None, int]] = field(default_factory=list)
    guilty: tuple[int | None, int] | None = None  # the first that failed
    here: tuple[int | None, int] | None = None  # the first that failed on this machine
    # time.monotonic() of the first failure, or of a stop by one rank alone: the grace of the others
    # begins
    failed_at: float | None = None
    # rank → what it was doing when the first one failed
    phases: dict[int, str] = field(default_factory=dict)
    death: RankExit | None = None  # what is known of the first rank that died
    finding: HangFinding | None = None  # the hang that ended it
    asked: Exit = Exit.DONE  # PREEMPTED or INTERRUPTED when a signal asked to stop
    killed: bool = False  # asked twice, or the ranks did not stop
    closed: Exit = Exit.DONE  # how the training had ended whose ranks did not leave
    blocked: str = ""  # which ranks even SIGKILL does not end
    elsewhere: bool = False  # a rank of another machine failed first
    left: int | None = (
        None  # a rank of ours that was asked to stop itself, and left without the others
    )
    lost: LostPeer | None = None  # a machine that is gone or silent, when that ended it
    ours: bool = True  # our own training; False: somebody's script
    torn_down: bool = False  # a script had come to its end, and was aborted after it
    gone: bool = (
        False  # the run directory was removed while ranks ran: nothing can be written any more
    )
    # log → where this start's words begin: logs go over several starts
    log_from: dict[Path, int] = field(default_factory=dict)
    oom_kills: int | None = None  # what the kernel had ended for memory before this start

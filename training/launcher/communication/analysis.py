"""Verdict on a communication test: guilty ranks, stage, evidence. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field

from training.core.messages import msg
from training.core.project import ROOT
from training.launcher.communication import stages
from training.launcher.communication.runner import CommunicationOutcome
from training.launcher.rank_log import UNDERLINE

OK, HANG, FAILED, WRONG, STOPPED, SLOW = (
    "ok",
    "hang",
    "failed",
    "wrong data",
    "stopped",
    "not finished",
)
MOVING = 0.1  # of the limit: a rank that entered its stage so shortly before does not hang
SHOWN_LINES = 10
FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclass(frozen=True)
class CommunicationFinding:
    """`guilty`: the ranks at fault; all of them where none differs."""

    kind: str
    text: str
    guilty: list[int] = field(default_factory=list)
    stage: str = ""
    lines: list[str] = field(default_factory=list)  # evidence, below the text
    killed: bool = False  # by SIGKILL of another process
    signature: str = ""  # ID of the error of a rank in the catalogue (training.diagnose)


def analyze(outcome: CommunicationOutcome, device: str) -> CommunicationFinding:
    order = stages.stages_for(device)
    if outcome.signal is not None:
        return CommunicationFinding(
            STOPPED, msg("launcher.communication.stopped", name=signal.Signals(outcome.signal).name)
        )
    if outcome.timed_out:
        return _hang(outcome, order)
    if not outcome.completed:
        return _failed(outcome)
    return _wrong(outcome) or CommunicationFinding(OK, msg("launcher.communication.correct"))


def ranks_text(ranks: list[int]) -> str:
    """'rank 1', 'ranks 0 and 2', 'ranks 0, 1 and 2'"""
    *most, last = map(str, ranks)
    return (
        msg("launcher.communication.ranks", most=", ".join(most), last=last)
        if most
        else msg("launcher.communication.rank", rank=last)
    )


def _hang(outcome: CommunicationOutcome, order: list[str]) -> CommunicationFinding:
    place = {
        rank: len(order) - 1 if rank in outcome.statuses else order.index(stage)
        for rank, stage in sorted(outcome.reached.items())
    }
    first, last = min(place.values()), max(place.values())
    behind = [rank for rank in place if place[rank] == first]
    others = [rank for rank in place if rank not in behind]
    stage, limit_s, kind = order[first], outcome.limit_s, HANG
    title, who = stages.title(stage), ranks_text(behind)
    since_s = min(outcome.since_s[rank] for rank in behind)
    still_s = max(MOVING * limit_s, stages.STILL_S if outcome.patient else 0.0)
    if stages.is_communication(stage) and since_s < still_s:
        kind = SLOW
        text = msg(
            "launcher.communication.slow", limit_s=limit_s, who=who, title=title, since_s=since_s
        )
    elif others:
        missed = stages.title(order[max(first + 1, order.index(stages.RENDEZVOUS))])
        reached = stages.title(order[last])
        text = (
            msg(
                "launcher.communication.never_reached_one",
                who=who,
                missed=missed,
                limit_s=limit_s,
                title=title,
                others=ranks_text(others),
                reached=reached,
            )
            if len(behind) == 1
            else msg(
                "launcher.communication.never_reached",
                who=who,
                missed=missed,
                limit_s=limit_s,
                title=title,
                others=ranks_text(others),
                reached=reached,
            )
        )
    elif stage == stages.GPU:
        text = msg("launcher.communication.no_gpu", limit_s=limit_s)
    elif not stages.is_communication(stage):
        text = msg("launcher.communication.all_slow", limit_s=limit_s, title=title)
    else:
        text = msg("launcher.communication.all_hang", limit_s=limit_s, title=title)
        suspects, how = _suspects(outcome, behind)
        if suspects:
            others, behind = [rank for rank in behind if rank not in suspects], suspects
            one = len(suspects) == 1
            stuck = (
                msg(
                    "launcher.communication.hangs",
                    limit_s=limit_s,
                    who=ranks_text(suspects),
                    title=title,
                    how=how,
                )
                if one
                else msg(
                    "launcher.communication.hang",
                    limit_s=limit_s,
                    who=ranks_text(suspects),
                    title=title,
                    how=how,
                )
            )
            waiting = _waiting(ranks_text(others), len(others) == 1, one)
            text = msg("launcher.communication.noted", text=stuck, note=waiting)
    return CommunicationFinding(kind, text, behind, stage, _evidence(outcome, behind))


def _waiting(others: str, one_waits: bool, for_one: bool) -> str:
    if one_waits:
        return (
            msg("launcher.communication.waits_for_it", others=others)
            if for_one
            else msg("launcher.communication.waits_for_them", others=others)
        )
    return (
        msg("launcher.communication.wait_for_it", others=others)
        if for_one
        else msg("launcher.communication.wait_for_them", others=others)
    )


def _suspects(outcome: CommunicationOutcome, ranks: list[int]) -> tuple[list[int], str]:
    """The ranks that differ from the others, and how; none where all do the same."""
    silent = [rank for rank in ranks if not outcome.stacks.get(rank)]
    elsewhere = [
        rank for rank in ranks if rank not in silent and not _waits(outcome.stacks[rank][0])
    ]
    for some, how in (
        (silent, msg("launcher.communication.unresponsive")),
        (elsewhere, msg("launcher.communication.outside_torch")),
    ):
        if 0 < len(some) < len(ranks):
            return some, how
    return [], ""


def _waits(frame: str) -> bool:
    """Is the rank in torch, or in a call of Duet to its compiled code? Then it waits for the
    others."""
    found = FRAME.match(frame)
    return found is not None and (
        "/torch/" in found["file"] or found["file"].startswith(f"{ROOT}/training/")
    )


def _failed(outcome: CommunicationOutcome) -> CommunicationFinding:
    """The first failure; others follow from it."""

    def when(rank: int) -> tuple[bool, float]:
        # A rank that dies without an error report is not a victim: victims report what they miss,
        # or torch aborts them.
        reported = "error" in outcome.records[rank] or outcome.statuses[rank] == -signal.SIGABRT
        return reported, outcome.records[rank].get("time", outcome.died_at[rank])

    rank = min((rank for rank in outcome.statuses if not outcome.regular(rank)), key=when)
    status, stage = outcome.statuses[rank], outcome.reached[rank]
    title, error = stages.title(stage), outcome.records[rank].get("error")
    if status < 0:
        text = msg(
            "launcher.communication.killed", rank=rank, name=_signal_name(-status), title=title
        )
    elif error:
        text = msg(
            "launcher.communication.failed",
            rank=rank,
            title=title,
            error=error.splitlines()[0][:200],
        )
    else:
        text = msg("launcher.communication.exited", rank=rank, status=status, title=title)
    return CommunicationFinding(
        FAILED,
        text,
        [rank],
        stage,
        _evidence(outcome, [rank]),
        killed=status == -signal.SIGKILL,
        signature=_signature(outcome, rank),
    )


def _signature(outcome: CommunicationOutcome, rank: int) -> str:
    from training.diagnose import scan

    error: str = outcome.records[rank].get("error", "")
    if not error and outcome.statuses[rank] == -signal.SIGABRT:  # by torch, which prints the error
        error = "\n".join(outcome.output.get(rank, []))
    return next((found.id for found in scan.recognised(error)), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return msg("launcher.communication.signal", number=number)


def _wrong(outcome: CommunicationOutcome) -> CommunicationFinding | None:
    lines, guilty, stage = [], [], ""
    for rank in range(outcome.ranks):
        for one in outcome.records[rank]["wrong"]:
            more = (
                msg("launcher.communication.more", count=one["count"] - 1)
                if one["count"] > 1
                else ""
            )
            where = stages.title(stages.collective(one["collective"], one["bytes"]))
            lines.append(
                msg(
                    "launcher.communication.element",
                    where=where,
                    rank=rank,
                    element=one["element"],
                    got=one["got"],
                    expected=one["expected"],
                    more=more,
                )
            )
            stage = stage or stages.collective(one["collective"].split(" ")[0], one["bytes"])
            guilty.append(rank)
    if not lines:
        return None
    text = msg("launcher.communication.wrong", line=lines[0])
    return CommunicationFinding(WRONG, text, sorted(set(guilty)), stage, lines[1 : 1 + SHOWN_LINES])


def _evidence(outcome: CommunicationOutcome, ranks: list[int]) -> list[str]:
    """Last output lines of the ranks and, where they hang, their position."""
    lines = []
    for rank, pid in outcome.stuck.items():
        lines.append(msg("launcher.communication.unkillable", rank=rank, pid=pid))
    for rank in ranks:
        stack = [found for frame in outcome.stacks.get(rank, []) if (found := FRAME.match(frame))]
        lines += [
            msg(
                "launcher.communication.at",
                rank=rank,
                file=f["file"],
                line=f["line"],
                function=f["function"],
            )
            for f in stack[:1]
        ]
        lines += [line for line in outcome.output.get(rank, []) if not UNDERLINE.fullmatch(line)][
            -SHOWN_LINES:
        ]
    return lines

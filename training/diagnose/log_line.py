"""Rank and time of a log line, from the launcher's prefix and the timestamp."""

from __future__ import annotations

import datetime
import re
import time
from dataclasses import dataclass

from training.core.plain_text import one_line

SHOWN = 400  # characters of a line

# `ws1 python[1234]: ` of the journal, after the time
_PROCESS = r"(?:[\w.-]+ [\w./@()-]+\[\d+\]: )?"
# A time before every line, as `ts` and the journal write it: to the second, unlike that of most
# loggers.
TIMED = re.compile(
    rf"(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d {_PROCESS}"
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (?![-|] )|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] )",
    re.ASCII,
)
# Prefixes that launchers put before the lines of a rank. `rank`: a group with the number of a rank
# (or of a task with one rank).
PREFIXES = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        # torch, torchrun --tee, Lightning
        r"\[(?:rank|Rank|RANK|default|local_rank)[ :=]*(?P<rank>\d{1,5})\]:? ?",
        r"\((?:rank|Rank|RANK|local_rank)[ :=]*(?P<rank>\d{1,5})\):? ?",
        r"(?:rank|Rank|RANK)[ _=]?(?P<rank>\d{1,5}) ?(?:[:|>]|- ) ?",
        r"\[\d{1,4},(?P<rank>\d{1,5})\]<std(?:out|err|diag)>: ?",  # mpirun --tag-output
        r"\[(?P<rank>\d{1,4})\](?=:? +\S):? +",  # mpirun -l
        r"(?P<rank>\d{1,4}): ",  # srun -l
        r"\[(?:node|host|worker)[-_ ]?\d+\][: ] ?",
        # pdsh, docker compose
        r"(?:node|host|worker|gpu|compute|ip|trainer|master|launcher)[\w.-]{0,40} *(?::|\|) ",
        r"[A-Za-z][\w.-]{1,60}: (?=\[(?:rank|default|local_rank) ?\d)",  # any host before a rank
        r"\d{1,3}(?:\.\d{1,3}){3}: ",
        r"\[(?:pod|container)/[^\]]{1,120}\] ",
        r"\((?:[A-Za-z_]\w{0,40}) (?:pid=\d+)(?:, ip=[\d.]+)?\) ",  # Ray
        # torchx, NeMo-Run: role/replica; not `step/100`
        r"(?!(?:global_?)?(?:step|iter|ep|batch|it/|update))[a-z][\w.-]{1,40}/\d{1,4} (?!\||/|\d)",
        # containers
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)? "
        rf"(?:std(?:out|err) [FP] )?{_PROCESS}",
        TIMED.pattern,
    )
)
# The number of a launcher's own prefix may be that of a task or of a rank of one machine.
OF_TORCH = re.compile(r"\[rank")
# A rank's traceback behind the unfinished line of another one: both write to the same pipe.
BEHIND = re.compile(r"(?<=.)\[rank\d{1,5}\]: ?Traceback \(most recent call last\):\s*$")
SPEAKER = re.compile(
    # [E ProcessGroupNCCL.cpp:475] [Rank 1]
    r"^(?:\[[^\]]{0,60}\] ?:?){0,2}\[(?:Rank|rank|RANK)[ :=]*(\d{1,5})\]"
    r"|^\S+:\d+:\d+ \[(\d{1,3})\] NCCL"  # host:pid:thread [device]
    r"|error: \S+: tasks? (\d{1,5}): "  # srun
    # [2024-04-18 15:55:06] CRITICAL [olmo.util:158, rank=6]
    r"|^(?:\[[^\]]{0,60}\] {1,4})?[A-Z]{4,8} {1,9}\[[\w.:]{1,60}, rank=(\d{1,5})\]"
)
TIMES = (
    re.compile(
        r"(?P<Y>\d{4})[-/](?P<m>\d\d)[-/](?P<d>\d\d)[T "
        r"_](?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?:[.,](?P<f>\d{1,9}))?(?P<z>Z|[+-]\d\d:\d\d)?"
    ),
    # glog: no year; in torch's C++ the month is not padded
    re.compile(
        r"\b[IWEF](?P<m>\d\d?)(?P<d>\d\d) (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?:\.(?P<f>\d{1,9}))?"
    ),
    # syslog
    re.compile(
        r"\b(?P<b>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(?P<d>\d{1,2}) "
        r"(?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)"
    ),
)
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
HALF_A_YEAR_S = 181 * 86400  # 182.5 days but one: clocks and time zones differ
SIDES = ("│", "|", "┃")


@dataclass(frozen=True)
class LogLine:
    """One segment of a log. `number`: of its line, from 1; `offset`: of its start, in bytes."""

    number: int
    text: str  # without its prefixes
    rank: int | None  # from its prefix
    raw: str
    offset: int


def split(raw: str) -> tuple[str, int | None]:
    """(the line without its prefixes, the rank in them)."""
    behind = BEHIND.search(raw)
    text, ranks = raw[behind.start() :] if behind else raw, list[re.Match[str]]()
    for _ in range(4):  # node: [rank1]: 2024-…
        for prefix in PREFIXES:
            if found := prefix.match(text):
                break
        else:
            break
        if "rank" in prefix.groupindex:
            ranks.append(found)
        text = text[found.end() :]
    if len(text) > 1 and text.startswith(SIDES) and text.endswith(SIDES):
        # a traceback in a frame (rich)
        text = text[1:-1].removeprefix(" ").rstrip(" ")
    of_torch = (found for found in ranks if OF_TORCH.match(found[0]))
    named = next(of_torch, ranks[0] if ranks else None)
    return text, int(named["rank"]) if named else None


def decoded(data: bytes) -> str:
    """A line in UTF-8 or GBK."""
    for encoding in ("utf-8", "gb18030"):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    return data.decode("utf-8", "replace")


def shown(text: str, middle: int = 0) -> str:
    """A line for display: cut around `middle` if it is very long."""
    text = text.rstrip()
    if len(text) <= SHOWN:
        return one_line(text)
    start = max(0, min(middle - SHOWN // 4, len(text) - SHOWN))
    before, after = "…" if start else "", "…" if start + SHOWN < len(text) else ""
    return f"{before}{one_line(text[start : start + SHOWN])}{after}"


def said_by(text: str) -> int | None:
    """The rank named inside a line: of its writer, or the one that a launcher reports."""
    found = SPEAKER.search(text)
    return int(next(g for g in found.groups() if g is not None)) if found else None


def time_of(raw: str, near: float | None = None) -> float | None:
    """Timestamp of a line in Unix seconds; UTC without a time zone, so comparable within one
    cluster only. `near`: a time of the same run; a date without a year is in the year that is
    closest to it, otherwise in the past."""
    head = raw[:120]
    for pattern in TIMES:
        if found := pattern.search(head):
            part = found.groupdict()
            if part.get("Y"):
                return _moment(part, int(part["Y"]))
            middle = time.time() - HALF_A_YEAR_S if near is None else near
            year = time.gmtime(middle).tm_year
            moments = [_moment(part, one) for one in (year - 1, year, year + 1)]
            known = [moment for moment in moments if moment is not None]
            return min(known, key=lambda moment: abs(moment - middle), default=None)
    return None


def full_time_of(raw: str) -> float | None:
    """Timestamp of a line with a year."""
    found = TIMES[0].search(raw[:120])
    return _moment(found.groupdict(), int(found["Y"])) if found else None


def _moment(part: dict[str, str | None], year: int) -> float | None:
    """None for a date that does not exist."""
    month = MONTHS.index(part["b"]) + 1 if part.get("b") else int(part["m"] or 0)
    day, hour, minute, second = (int(part[name] or 0) for name in "dHMS")
    try:
        moment = datetime.datetime(
            year, month, day, hour, minute, second, tzinfo=datetime.timezone.utc
        )
    except ValueError:
        return None
    zone = part.get("z")
    if zone and zone != "Z":
        sign = 1 if zone[0] == "+" else -1
        moment -= sign * datetime.timedelta(hours=int(zone[1:3]), minutes=int(zone[4:6]))
    return moment.timestamp() + float(f"0.{part.get('f') or 0}")

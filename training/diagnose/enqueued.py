"""The last collective that each rank has enqueued, as torch reports it after a timeout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from training.diagnose.log_line import LogLine, said_by

NUMBER = re.compile(r"[Ll]ast enqueued (?:NCCL )?work: (\d+)|last enqueued: (\d+)")
# `[PG ID 1 PG GUID 3(dp) Rank 0]`, earlier `[PG 3 Rank 0]`; the ID may differ between ranks.
GROUP = re.compile(r"\[PG (?:ID \d+ PG GUID )?([^\s(\]]+)")


class Member(NamedTuple):
    """A rank in a process group."""

    group: str  # '': the line names none
    rank: int


class Enqueued(NamedTuple):
    offset: int  # of the line
    member: Member
    number: int  # of the collective, in its process group


def of_line(line: LogLine) -> Enqueued | None:
    number = NUMBER.search(line.text)
    rank = line.rank if line.rank is not None else said_by(line.text)
    if number is None or rank is None:
        return None
    group = GROUP.search(line.text)
    member = Member(group[1] if group else "", rank)
    return Enqueued(line.offset, member, int(number[1] or number[2]))


def slowest(numbers: Mapping[Member, int]) -> int | None:
    """The one rank with the fewest collectives in its process groups, whose numbers cannot be
    compared. None if groups have different ones, or in none a single rank is behind."""
    groups: dict[str, dict[int, int]] = {}
    for member, number in numbers.items():
        groups.setdefault(member.group, {})[member.rank] = number
    found = set()
    for ranks in groups.values():
        lowest = min(ranks.values())
        last = [rank for rank, number in ranks.items() if number == lowest]
        if len(last) == 1 and len(ranks) > 1:
            found.add(last[0])
    return found.pop() if len(found) == 1 else None

"""Step and epoch counts in a log: evidence that training continued after an apparent failure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

COUNTED = re.compile(
    r"\bepochs?\b[\"']?\W{0,4}(?P<part>\d+\.\d+)\b"  # of an epoch: Hugging Face's Trainer
    r"|(?P<name>\b(?:global[_ "
    r"]step|steps?|iter(?:ation)?s?|it|updates?|num_updates|batch|epochs?|ep|train_step|步数?|迭代(?:次数)?)(?:\b|(?=\d)))"
    r"[\"']?(?: {5,12}|\W{0,4})(?P<number>\d[\d,]*)"
    r"|(?P<bar>\d+)%\|[^|]*\| *(?P<done>\d+)/|[\[ ](?P<of>\d+) ?/ ?\d+\b",
    re.I,
)
LONG = 2000  # characters
SOON = 4096  # bytes
AT_ONCE = 0.5  # s, for a whole buffer
BLOCK = 8192  # bytes that Python collects before it writes them to a file
PART = "part of an epoch"  # name of a count
# `it 450 | 2.100`
ALONE = re.compile(r"[\[(]?(?:it|iter|step|epoch|ep)[ :=_]*\d+\b.{0,80}\d", re.I)
LOOKS_LIKE_TRAINING = re.compile(
    r"\b(?:loss|lr|ppl|acc\w*|tok\w*/s\w*|mfu|eta|wps|grad_?norm|samples?/s\w*|bpb|psnr|reward|it/s|s/it|tok/sec|elapsed|dt|time)\b|it/s|s/it|\d%[|\]]"
    r"|\d/\d|损失|学习率",
    re.I,
)
# Regular ends: those that only the training itself prints, those that a batch script prints after a
# failure, too, and others.
OF_PROGRAM = re.compile(
    r"^\d+ epochs completed in |\ball \d+ (?:steps|epochs) done|^[Dd]one[:.,]? \d+ epochs"
    r"|`?Trainer\.fit`? stopped: |max_(?:epochs|steps)=\d+`? reached|\{'train_runtime': "
    r"|^training_seconds: +\d|^Total training time: |^Minimum validation bpb: "
    r"|\[after training is done\]",
    re.I,
)
_DONE = r"\b[^.:]{0,40}\b(?:completed?|finished|done|succeeded|successful(?:ly)?|is over|ended)\b"
OF_SCRIPT = re.compile(
    rf"\b(?:run|job|experiment){_DONE}"
    r"|exit(?:ing|ed)? (?:with )?(?:code|status)[: ]+0\b|ExitCode[ =]0:0|\bState[ "
    r":=]+COMPLETED|exited with code 0\b",
    re.I,
)
OF_EITHER = re.compile(
    r"\b(?:training|train|fine-?tuning|trainer\.fit|optimi[sz]ation|all epochs|pretraining)"
    rf"{_DONE}|训练(?:完成|结束)",
    re.I,
)
NOT_FINISHED = re.compile(
    r"\b(?:not|never|before|until|fail\w*|error|after|unless|when|will be)\b", re.I
)
# after such an end: it was a failure
BADLY = re.compile(
    r"\b(?:exit|return|with)\W?(?:exit )?(?:code|status)\W{0,3}[1-9]"
    r"|\b(?:status|state|result)\W{0,3}fail(?:ed|ure)\b|[^\w\s] ?fail(?:ed|ure)\W*$"
    r"|\bwith (?:an? |some |[1-9]\d* )?errors?\W*$",
    re.I,
)


@dataclass(frozen=True)
class ProgressMark:
    offset: int
    name: str
    number: float
    time: float | None
    rank: int | None


def marks(text: str, offset: int, time: float | None, rank: int | None) -> list[ProgressMark]:
    """All counts in a line."""
    if len(text) > 2 * LONG:  # bars on one endless line
        return marks(text[:LONG], offset, time, rank) + marks(text[-LONG:], offset, time, rank)
    if not (LOOKS_LIKE_TRAINING.search(text) or ALONE.match(text)):
        return []
    found = []
    for one in COUNTED.finditer(text):
        if one["part"] is not None:
            found.append(ProgressMark(offset, PART, float(one["part"]), time, rank))
        elif one["bar"] is not None:
            found.append(ProgressMark(offset, "bar", int(one["done"]), time, rank))
        elif one["of"] is not None:
            found.append(ProgressMark(offset, "of", int(one["of"]), time, rank))
        else:
            found.append(
                ProgressMark(
                    offset, one["name"].lower(), int(one["number"].replace(",", "")), time, rank
                )
            )
    return found


def ends_well(text: str) -> bool | None:
    """Whether a line reports a regular end; False: one with a failure, None: no end."""
    found = _end(text, OF_PROGRAM, OF_EITHER, OF_SCRIPT)
    return None if found is None else BADLY.search(text, found.end()) is None


def ends_by_program(text: str) -> bool:
    """Whether a regular end is one that no batch script prints."""
    return _end(text, OF_PROGRAM) is not None


def ends_by_script(text: str) -> bool:
    """Whether a regular end is of the kind that batch scripts print."""
    return _end(text, OF_PROGRAM, OF_EITHER) is None and _end(text, OF_SCRIPT) is not None


def _end(text: str, *kinds: re.Pattern[str]) -> re.Match[str] | None:
    """The first regular end of these kinds in a line."""
    if len(text) >= 300:
        return None
    found = min((m for kind in kinds if (m := kind.search(text))), key=re.Match.end, default=None)
    return None if found is None or NOT_FINISHED.search(text[: found.end()]) else found


def rises_after(
    marks: Sequence[ProgressMark], offset: int, time: float | None, rank: int | None
) -> int:
    """How often a count grew after `offset`: for the same rank, if that rank has counts. Lines with
    an earlier timestamp are late output of a buffer and do not count."""
    if rank is not None and any(m.rank == rank for m in marks):
        marks = [m for m in marks if m.rank == rank]
    highest: dict[str, float] = {}
    grown: dict[str, int] = {}
    for m in marks:
        if m.offset < offset:
            continue
        if time is not None and m.time is not None and m.time < time:
            continue
        if m.name not in highest:
            highest[m.name] = m.number
            grown[m.name] = 1
        elif m.number > highest[m.name]:
            highest[m.name] = m.number
            grown[m.name] += 1
    return max(grown.values(), default=0)


def may_be_late(marks: Sequence[ProgressMark], offset: int, time: float | None, most: int) -> bool:
    """Whether all marks after `offset` may be late output of a buffer: no bars (unbuffered), no
    later timestamps, at most `most` bytes."""
    after = [m for m in marks if m.offset >= offset]
    return (
        all(
            m.name != "bar" and (m.time is None or (time is not None and m.time - time < AT_ONCE))
            for m in after
        )
        and bool(after)
        and after[-1].offset - offset < most
    )


def continues(marks: Sequence[ProgressMark], offset: int) -> bool:
    """Whether the counts after `offset` soon continue those before it: none of them starts at a
    lower number. A new start prints more before its first step."""
    last = {m.name: m.number for m in marks if m.offset < offset}
    first: dict[str, ProgressMark] = {}
    for m in marks:
        if m.offset > offset and m.name in last:
            first.setdefault(m.name, m)
    return any(m.offset - offset < SOON for m in first.values()) and all(
        m.number >= last[name] and m.number > 0 for name, m in first.items()
    )


def buffered(marks: Sequence[ProgressMark], offset: int) -> bool:
    """Whether the output may be written in blocks, as to a file: no count before `offset`, or at
    least a whole block."""
    return offset >= BLOCK or not any(m.name != "bar" and m.offset < offset for m in marks)

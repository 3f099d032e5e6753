"""Tracebacks in a log: interleaved ones of several ranks, framed ones (rich) and nested ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from training.core import libraries
from training.diagnose.log_line import LogLine

MOST_LINES = 600  # of one traceback; Python itself shortens a recursion
OTHERS = 60  # foreign lines inside one
HEAD = re.compile(r"Traceback \(most recent call last\)")
FRAME = re.compile(
    r"^\s*(?:[│|] *)?File \"(?P<file>[^\"]+)\", line (?P<line>\d+)|^\s*[│|]? ?[❱>]? "
    r"?(?P<rich>/?[\w./~-]+\.py):(?P<at>\d+) in "
)
EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z_]\w*(?:Error|Exception|Interrupt|Exit|Warning|Fault|Failure|Timeout|NotFound|NotFinite|Differ|Died|Abort\w*"
    r"|Invalid\w*|Missing\w*|Unsupported\w*|Fail\w*)s?|(?:[a-z_]\w*\.)+[A-Z]\w*|[A-Z]\w+Error)(?:: "
    r"?(?P<text>.*)|)$"
)
BARE = re.compile(
    r"^(?:KeyboardInterrupt|StopIteration|StopAsyncIteration|GeneratorExit|SystemExit)(?:: "
    r"?(?P<text>.*))?$"
)
HANDLED = "During handling of the above exception"
# A message with a time as `logging.exception` writes it, or absl.
LOGGED = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|^[EF]\d{4} [\d:.]{8,} ")
# The program continues, unless its message ENDS too: the exception below is a later one.
CONTINUES = re.compile(
    r"(?<!after )(?<!while )(?<!not )(?<!without )(?<!stopped )(?<!longer )"
    r"\b(?:[Rr]etrying|[Ss]kipp(?:ing|ed)|[Ii]gnor(?:ing|ed)|[Cc]ontinuing)\b"
    r"|\b(?:going on|will ?[Rr]etry|[Rr]etry (?:in|after))\b"  # language: quoted
)
ENDS = re.compile(
    r"^F\d{4} |\bFATAL\b|\bCRITICAL\b(?!.*[Rr]etry)"
    r"|\b(?i:aborting|exiting|too many(?! requests)|(?:giving|gave|given) up(?! on))\b"
)
LINKS = (HANDLED, "The above exception was the direct cause")
HARMLESS = (
    "Exception ignored in",
    "--- Logging error ---",
    "Task exception was never retrieved",
    "Error in atexit",
)
THREAD = ("Exception in thread",)
# Lines that cannot belong to the message of an exception.
NEW_MESSAGE = re.compile(
    r"^(?:\[|[WEIFD]\d{4} "
    r"|\d{4}-|(?:ERROR|WARNING|INFO|DEBUG|CRITICAL|Traceback|Killed|Aborted|terminate|Sending|wandb)\b"
    r"|(?:srun|slurmstepd)\S*: |[\w@.-]+\.(?:service|scope): |--|====)"
)
# Duet's check that raises in a user script, also from a copy of the project: the line that calls it
# counts.
INSPECTOR = "/training/inspector/"
NO_FILE = ("<frozen ", "<string>", "<stdin>")  # frames without a file
# An exception raised again in another process, with the original traceback in its message.
SPAWNED = re.compile(r"-- Process (?P<process>\d+) terminated with the following error:")
EMBEDDED = re.compile(r"^Original Traceback \(most")
CARRIED = re.compile(
    rf"^(?:Original |{SPAWNED.pattern}\n)Traceback \(most recent call last\):\n", re.MULTILINE
)


@dataclass
class Traceback:
    start: LogLine  # its head
    end: LogLine | None = None  # the line of its exception; None: the log ends before it
    type: str = ""
    text: str = ""
    frames: list[str] = field(default_factory=list)  # file:line, outermost first
    # the source line of each frame, '' if not shown
    quotes: list[str] = field(default_factory=list)
    code: set[int] = field(default_factory=set)  # offsets of lines that quote source code
    asserted: LogLine | None = None  # the source line of an assertion without a message
    before: Traceback | None = None  # the exception that led to this one
    handling: bool = False  # raised while `before` was handled, not because of it
    carries: bool = False  # raised in a waiting process; `before` is the original
    harmless: bool = False  # printed, but not fatal
    in_thread: bool = False  # fatal for its thread only
    native: bool = False  # a C++ exception
    last: int = 0  # the offset of the last line that belongs to it
    logged: LogLine | None = None  # the first line of the message with which it was logged

    @property
    def since(self) -> int:
        """The offset of the first line that belongs to its chain."""
        first = self.first()
        return (first.logged or first.start).offset

    @property
    def rank(self) -> int | None:
        return self.start.rank

    @property
    def where(self) -> str | None:
        return innermost(self.frames)

    @property
    def caller(self) -> str:
        """Source line and place of that frame."""
        own = [
            (q, f)
            for q, f in zip(self.quotes, self.frames, strict=True)
            if not libraries.contain(f) and INSPECTOR not in f
        ]
        return " in ".join(own[-1]) if own else ""

    def first(self) -> Traceback:
        return self.before.first() if self.before else self


def innermost(frames: Sequence[str]) -> str | None:
    """The innermost frame (file:line) outside libraries, else of any file but the inspector's."""
    files = [f for f in frames if not f.startswith(NO_FILE) and INSPECTOR not in f]
    own = [f for f in files if not libraries.contain(f)]
    return (own or files or [None])[-1]  # type: ignore[list-item]


def frames_of(text: str) -> list[str]:
    """file:line of the frames in the text of one traceback, outermost first."""
    found = (FRAME.search(line) for line in text.splitlines())
    return [f"{f['file'] or f['rich']}:{f['line'] or f['at']}" for f in found if f]


@dataclass(frozen=True)
class Carried:
    """An exception of another process."""

    type: str
    text: str
    where: str  # file:line of the innermost frame outside libraries; '': all are in libraries
    code: str | None  # that line
    process: int | None  # of mp.spawn


def carried(message: str) -> Carried | None:
    """The exception whose traceback ends the message of the one that was raised again; None: it has
    none."""
    head = CARRIED.search(message)
    lines = message[head.end() :].splitlines() if head else []
    frames = [(n, f) for n, line in enumerate(lines) if (f := FRAME.search(line)) and f["file"]]
    if head is None or not frames:
        return None
    end = next((n for n in range(frames[-1][0] + 1, len(lines)) if lines[n][:1].strip()), None)
    kind, _, first = lines[end].partition(": ") if end is not None else ("", "", "")
    name = kind.rpartition(".")[2]
    if end is None or not name.isidentifier():
        return None
    own = [(n, f) for n, f in frames if not libraries.contain(f["file"])]
    where, code = "", None
    if own:
        at, frame = own[-1]
        where = f"{frame['file']}:{frame['line']}"
        code = lines[at + 1].strip() if lines[at + 1].startswith("    ") else None
    text = "\n".join([first, *lines[end + 1 :]]).rstrip("\n")
    process = int(head["process"]) if head["process"] else None
    return Carried(name, text, where, code, process)


def read(lines: Sequence[LogLine]) -> list[Traceback]:
    found: list[Traceback] = []
    for index, line in enumerate(lines):
        if HEAD.search(line.text):
            one = _one(lines, index)
            one.logged = _logged(lines, index)
            outer = _carrier(lines, index, found)
            link = None if outer else _link(lines, index)
            one.handling = link == HANDLED
            one.before, one.harmless = (
                next((t for t in reversed(found) if link and t.rank == one.rank), None),
                _preceded_by(lines, index, HARMLESS),
            )
            one.in_thread = _preceded_by(lines, index, THREAD)
            one.harmless = one.harmless or bool(one.before and one.before.harmless)
            if outer:
                outer.before, outer.carries = one, True
            found.append(one)
    return found


def _logged(lines: Sequence[LogLine], index: int) -> LogLine | None:
    """The line right before a traceback, if it may be the message with which it was logged."""
    ranks = (None, lines[index].rank)
    near = reversed(lines[max(0, index - OTHERS) : index])
    line = next((line for line in near if line.rank in ranks), None)
    if line is None or not LOGGED.search(line.text):
        return None
    return line if ENDS.search(line.text) or not CONTINUES.search(line.text) else None


def _carrier(lines: Sequence[LogLine], index: int, found: Sequence[Traceback]) -> Traceback | None:
    """The exception whose message quotes this traceback."""
    rank = lines[index].rank
    near = [line.text for line in lines[max(0, index - 2) : index] if line.rank == rank]
    if not EMBEDDED.match(lines[index].text) and not any(SPAWNED.match(text) for text in near):
        return None
    return next((t for t in reversed(found) if t.rank == rank and t.end), None)


def place_before(lines: Sequence[LogLine], line: LogLine) -> str | None:
    """file:line of a frame printed without a traceback, as for a SyntaxError."""
    index = next((i for i, one in enumerate(lines) if one.offset == line.offset), 0)
    frames = (
        FRAME.search(one.text)
        for one in reversed(lines[max(0, index - 4) : index])
        if one.rank == line.rank
    )
    return next((f"{f['file'] or f['rich']}:{f['line'] or f['at']}" for f in frames if f), None)


def _one(lines: Sequence[LogLine], index: int) -> Traceback:
    one = Traceback(lines[index], last=lines[index].offset)
    lead = _lead(lines[index].text)
    last_quoted: LogLine | None = None
    expected, others = False, 0
    for line in lines[index + 1 : index + MOST_LINES]:
        if line.rank != one.rank:
            continue
        text = line.text
        if lead and (own := _without(lead, text)) is not None:
            text = own
        if frame := FRAME.search(text):
            one.frames.append(f"{frame['file'] or frame['rich']}:{frame['line'] or frame['at']}")
            one.quotes.append("")
            expected, one.last = True, line.offset
        elif HEAD.search(text):
            if others or one.frames:
                break
        elif not text.strip() or text[0] in " \t│|╭╰+~^" or text.startswith("..."):
            one.code.add(line.offset)
            if expected:
                last_quoted = line
                one.quotes[-1] = text.strip()
            expected, one.last = False, line.offset
        elif (known := EXCEPTION.match(text) or BARE.match(text)) and not text.startswith("raise "):
            one.end, one.type, one.text = (
                line,
                (known.groupdict().get("type") or text.partition(":")[0]),
                known["text"] or "",
            )
            one.asserted = (
                last_quoted if one.type == "AssertionError" and not one.text.strip() else None
            )
            one.last = line.offset
            break
        elif expected:  # a quoted line whose indent was lost
            one.code.add(line.offset)
            last_quoted, expected = line, False
        else:
            others += 1
            if others > OTHERS:
                break
    return one


def _lead(text: str) -> str:
    """Prefix that a logger puts before every line of a traceback; '' for a frame (rich)."""
    lead = text[: text.index("Traceback")]
    return "" if lead.strip(" ╭─┌|+") == "" and lead.strip() else re.sub(r"\d", "0", lead)


def _without(lead: str, text: str) -> str | None:
    return text[len(lead) :] if re.sub(r"\d", "0", text[: len(lead)]) == lead else None


def _link(lines: Sequence[LogLine], index: int) -> str | None:
    """What Python prints between two exceptions of a chain."""
    rank = lines[index].rank
    near = [line.text for line in lines[max(0, index - 6) : index + 1] if line.rank == rank]
    return next((link for text in reversed(near) for link in LINKS if link in text), None)


def _preceded_by(lines: Sequence[LogLine], index: int, marks: Sequence[str]) -> bool:
    rank = lines[index].rank
    near = [line.text for line in lines[max(0, index - 2) : index + 1] if line.rank == rank]
    return any(text.startswith(mark) or f" {mark}" in text[:80] for mark in marks for text in near)

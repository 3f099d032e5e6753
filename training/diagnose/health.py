"""Verdict on logs without a known failure. Healthy only with evidence: a known regular end, or step
counts with results up to the end. Everything else is unknown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from training.core.cause_ids import NONE, UNKNOWN
from training.diagnose.log_analysis import LogAnalysis
from training.diagnose.log_line import LogLine
from training.diagnose.progress_marks import ProgressMark

# Findings, in place of the role of a signature.
CUT = "cut"  # the log ends in the middle of an unnamed failure
BROKEN_OFF = "broken off"  # the log ends in the middle of a progress bar
NO_SIGN = "no sign"  # neither a known failure, nor evidence of a successful training

STEPS = 2  # increases of one count: three steps in a row
EPOCH = re.compile(r"ep(?:och)?s?$")  # two of them are enough
# Downloads have bars and counts too: a training also has results.
RESULT = re.compile(
    r"(?:\b(?:train|val(?:id(?:ation)?)?|test|wer|cer|bleu|dice|iou|f1)|loss|ppl|perplexity|acc(?:uracy)?|psnr|reward|bpb|mAP|mfu|error|err)"
    r"\b[\"']?(?: is| of)?[\s:=|]{0,12}[-+]?[\d.]*\d"
    r"|\bsav(?:ed|ing)\b.{0,40}(?:model|checkpoint|weights|state|\.pt|\.ckpt|\.safetensors)|损失",
    re.I,
)
SCORE = re.compile(
    r"loss|accuracy|perplexity|\b(?:acc|rmse|mae|mse|auc|reward|ep_rew_mean|psnr|cost)\b|损失|准确率|奖励",
    re.I,
)
END = re.compile(  # beside those of progress_marks
    r"^wandb: .*\(success\)|^Early stopping\b|torchelastic\.worker\.status\.SUCCEEDED"
    r"|[Ww]orker group successfully finished|[Ww]orker group finished \(SUCCEEDED\)|\bexited "
    r"(?:normally|successfully)\b",
    re.I,
)
GIVES_UP = re.compile(
    r"^(?:panic|(?:fatal )?error|fatal|critical): |^(?:exit|exited)(?: (?:status|code|with(?: "
    r"code)?))?:? [1-9]\d{0,2}$",
    re.I,
)
COUNTER = re.compile(r"\b(?:iterations?|total_timesteps|steps?|epochs?|episodes?)\b", re.I)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")
CLOCK = re.compile(r"\d+(?:[-:/]\d+)+(?:[.,]\d+)?")
TRANSFER = re.compile(r"download|fetch|upload|[KMG]i?B/s", re.I)
LONGEST = 400  # characters of a line that is one row of figures
BAR = re.compile(r"\d%\|")
TROUBLE = re.compile(
    r"\b(?:error|fatal|panic(?:ked)?|fail(?:ed|ure|s)?|exception|abort(?:ed)?|killed|denied|not "
    r"found|cannot|can't|unable)\b|错误|失败",
    re.I,
)


@dataclass(frozen=True)
class HealthSummary:
    """`line`: the most informative line; `sure`: the log shows the training's end."""

    cause: str
    found: str = ""
    line: LogLine | None = None
    analysis: LogAnalysis | None = None
    sure: bool = False


def summarize(analyses: Sequence[LogAnalysis]) -> HealthSummary:
    for analysis in analyses:
        if line := _gave_up(analysis):
            return HealthSummary(UNKNOWN, CUT, line, analysis)
    if any(_finished(analysis) for analysis in analyses):
        return HealthSummary(NONE, sure=True)
    for analysis in analyses:
        if line := _cut_bar(analysis):
            return HealthSummary(UNKNOWN, BROKEN_OFF, line, analysis)
    if any(_counted(analysis.marks) for analysis in analyses) and any(
        RESULT.search(line.text) for s in analyses for line in s.lines
    ):
        return HealthSummary(NONE)
    if any(
        _tabled(analysis.lines) >= 0 and any(SCORE.search(line.text) for line in analysis.lines)
        for analysis in analyses
    ):
        return HealthSummary(NONE)
    first = next((analysis for analysis in analyses if analysis.lines), None)
    return HealthSummary(UNKNOWN, NO_SIGN, _telling(first) if first else None, first)


def _gave_up(analysis: LogAnalysis) -> LogLine | None:
    """The first line of a failing program after the last step and after a regular end."""
    last = max([analysis.ends_well, _tabled(analysis.lines), *(m.offset for m in analysis.marks)])
    return next(
        (line for line in analysis.lines if line.offset > last and GIVES_UP.search(line.text)), None
    )


def _finished(analysis: LogAnalysis) -> bool:
    return analysis.ends_well >= 0 or any(END.search(line.text) for line in analysis.lines)


def _counted(marks: Sequence[ProgressMark]) -> bool:
    """Whether a count of one rank rose several times in a row."""
    last: dict[tuple[str, int | None], tuple[float, int]] = {}
    for mark in marks:
        number, row = last.get((mark.name, mark.rank), (mark.number, 0))
        row = row + 1 if mark.number > number else row if mark.number == number else 0
        last[mark.name, mark.rank] = mark.number, row
        if row >= (1 if EPOCH.match(mark.name) else STEPS):
            return True
    return False


def _tabled(lines: Sequence[LogLine]) -> int:
    """Offset of the last of similar rows with a result and a number that rises several times in a
    row: `[10]  train-rmse:0.89`. -1 without any."""
    end, rising = -1, set()
    last: dict[tuple[str, int | None], tuple[list[float], list[int]]] = {}
    for line in lines:
        if len(line.text) > LONGEST or TRANSFER.search(line.text):
            continue
        text = CLOCK.sub("", " ".join(line.text.split()))
        found = NUMBER.findall(text)
        if not found:
            continue
        numbers = [float(number) for number in found]
        form = NUMBER.sub("#", text), line.rank
        before, rows = last.get(form, (numbers, [0] * len(numbers)))
        rows = [
            row + 1 if new > old else 0 for row, new, old in zip(rows, numbers, before, strict=True)
        ]
        last[form] = numbers, rows
        if max(rows) >= STEPS and (
            any("." in number for number in found[1:]) or COUNTER.search(text)
        ):
            rising.add(form)
        if form in rising:
            end = line.offset
    return end


def _cut_bar(analysis: LogAnalysis) -> LogLine | None:
    """The last line if it is a truncated progress bar: earlier bars end in `]`, it does not."""
    if (
        len(analysis.lines) < 2
        or not BAR.search(analysis.lines[-1].raw)
        or analysis.lines[-1].raw.rstrip().endswith("]")
    ):
        return None
    whole = any(
        BAR.search(line.raw) and line.raw.rstrip().endswith("]") for line in analysis.lines[-20:-1]
    )
    return analysis.lines[-1] if whole else None


def _telling(analysis: LogAnalysis) -> LogLine | None:
    """The last line with an error word, else the last line that is more than a prefix."""
    lines = [line for line in analysis.lines if line.text.strip()] or analysis.lines
    return next(
        (line for line in reversed(lines) if TROUBLE.search(line.text)),
        lines[-1] if lines else None,
    )

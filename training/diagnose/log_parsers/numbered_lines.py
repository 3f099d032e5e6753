"""Whether the number before a loss is a rank or a step: `[100] loss: 0.5`, `100: loss 0.5`."""

from __future__ import annotations

from dataclasses import replace

from training.diagnose.log_parsers.log_record import LogRecord

# Steps are numbers in a row that grow this often. Ranks repeat theirs, and those of a larger job
# do not print in their order.
GROWING = 17


class NumberedLines:
    """Until that is known, the lines count as those of one rank, without steps."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._unknown: list[LogRecord] = []
        self._are_steps: bool | None = None

    def read(self, fact: LogRecord) -> list[LogRecord]:
        """The line as it is to be understood; several: all numbered lines so far, once it is
        known."""
        if fact.number is None:
            return [fact]
        if self._are_steps is not None:
            return [self._known(fact)]
        grows = not self._unknown or fact.number > (self._unknown[-1].number or 0)
        self._unknown.append(fact)
        if grows and len(self._unknown) < GROWING:
            return [replace(fact, rank=None)]
        self._are_steps, known, self._unknown = grows, self._unknown, []
        return [self._known(one) for one in known]

    def _known(self, fact: LogRecord) -> LogRecord:
        return replace(fact, step=fact.number, rank=None) if self._are_steps else fact

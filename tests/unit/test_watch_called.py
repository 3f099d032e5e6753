"""What the collectives of a user script add to a finding from its stacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from training.watchdog import called
from training.watchdog.hang_report import DESYNC, HANG, UNEVEN, HangFinding
from training.watchdog.probes import flight_recorder
from training.watchdog.probes.flight_recorder import SCHEDULED, STARTED, Call


def call(number: int, state: str = STARTED, operation: str = "all_reduce") -> Call:
    return Call("0", number, operation, "float [2]", open=state != "completed", state=state)


DONE = call(7, "completed")


@pytest.mark.parametrize("kind", [HANG, UNEVEN])
@pytest.mark.parametrize(
    ("others", "own", "blamed"),
    [
        ([DONE, call(8)], [DONE, call(8, SCHEDULED)], (HANG, 1)),
        ([DONE, call(8)], [call(7)], (HANG, 1)),
        ([DONE, call(8)], [DONE, call(8)], None),
        ([DONE, call(8)], [DONE, call(8, operation="barrier")], (DESYNC, None)),
    ],
)
def test_ranks_that_all_wait(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    others: Sequence[Call],
    own: Sequence[Call],
    blamed: tuple[str, int | None] | None,
) -> None:
    monkeypatch.setattr(flight_recorder, "read", lambda folder, rank: own if rank else others)
    waiting = {0: "waits in all_reduce", 1: "waits in the GPU"}
    found = HangFinding(kind, None, None, "all wait", waiting, {}, 5.0)  # type: ignore[arg-type]
    refined = called.refine(found, Path(), waiting, elsewhere=False, trains=lambda: True)
    if kind == UNEVEN and blamed == (DESYNC, None):
        blamed = UNEVEN, None  # its text has the difference
    assert (refined.kind, refined.rank) == (blamed or (kind, None))
    assert (refined.how == found.how) == (blamed is None)
    assert set(refined.waiting) == {0, 1} - {refined.rank}
    of_many = called.refine(found, Path(), waiting, elsewhere=True, trains=lambda: True)
    assert (of_many == refined) == (list(own) != [call(7)]), "ranks of other machines are unknown"

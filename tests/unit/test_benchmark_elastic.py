"""The judge of the losses of machines must find everything that must not happen."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.elastic import cases, table
from benchmarks.elastic.drill import LIMIT_S
from benchmarks.elastic.judge import growths, judge, pause, problems, repeated, returns
from benchmarks.elastic.machine import CUT, LOSSES, PAIR, POWER, RANK
from benchmarks.elastic.programs import DUET, OWN, PROGRAMS, STEPS, TORCHRUN, TRAINING
from training.core.jsonl import Record

LOSS_AT, CHANGED = 29.5, 20  # seconds, one a step; the step at which a rank is lost
FINE = {"finished": True, "exits": [0, -9], "left": [], "gave_up": False, "ended_s": 99.0}
MACHINE = {"load": 1.5, "cores": 2}


def record(step: int, time: float, **changes: Any) -> dict[str, Any]:
    made = {"step": step, "time": time, "loss": 1 / step, "samples": step, "ranks": 2, "writer": 1}
    return made | changes


WHOLE = {step: record(step, step) for step in range(1, STEPS + 1)}


def recovered() -> list[dict[str, Any]]:
    """29 steps; from 20 on again, 10 s after the loss, with one rank."""
    after = range(CHANGED + 1, STEPS + 1)
    rounded = {"ranks": 1, "writer": 2}
    return [record(step, step) for step in range(1, 30)] + [
        record(step, LOSS_AT + 10 + n, loss=(1 + 1e-6) / step, **rounded)
        for n, step in enumerate(after)
    ]


def found(records: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {**FINE, **judge(records, WHOLE, [LOSS_AT], back=0), **changes}


def test_a_recovered_run_has_no_problems() -> None:
    line = found(recovered())
    assert problems(line) == []
    assert (line["pauses_s"], line["repeated"], line["world_sizes"]) == ([10.0], 9, [2, 1])
    assert 0 < line["differs"] < 2e-6


@pytest.mark.parametrize(
    ("step", "change"),
    [
        (10, {"loss": 0.1 + 1e-12}),  # one bit, with as many ranks
        (100, {"loss": 0.01 * (1 + 1e-3)}),  # more than rounding
        (100, {"samples": 99}),
        (100, {"step": 101}),  # one is missing
        (100, {"writer": 1}),  # the lost one still trains
    ],
)
def test_every_difference_is_found(step: int, change: dict[str, Any]) -> None:
    records = recovered()
    (place,) = [n for n, one in enumerate(records) if one["step"] == step]
    records[place] |= change
    assert problems(found(records))


@pytest.mark.parametrize("change", [{"left": ["sleep 600"]}, {"finished": False}])
def test_processes_and_ends_are_found(change: dict[str, Any]) -> None:
    assert problems(found(recovered(), **change))


def test_a_pause_ends_with_the_first_new_step() -> None:
    records = [record(n, at) for n, at in enumerate([1, 2, 3, 3.2, 9.2, 9.5, 20], 1)]
    assert pause(records, 3.1, 15) == 6.0, "a step that was under way is not a new one"
    assert pause(records, 9.3, float("inf")) == 10.5
    assert pause(records, 20.5, float("inf")) is None
    records[-1]["ranks"] = 3
    assert pause(records, 9.3, float("inf")) == 0.2, "the last gap is due to a machine that is back"
    assert growths(records) == [10.5]


def test_two_runs_in_one_file_are_found() -> None:
    records = [one | {"writer": 1} for one in recovered()]
    others = [record(step, 40.05 + step, ranks=1) for step in range(30, 40)]
    both = sorted(records + others, key=lambda one: one["time"])
    assert not found(records)["two_runs"] and found(both)["two_runs"]


def test_repeated_steps_and_writers_are_counted() -> None:
    assert repeated([record(n, 0) for n in (1, 2, 3, 2, 3, 4, 3)]) == 3
    assert returns([record(1, 0, writer=w) for w in (1, 1, 2, 2, 1, 3, 1)]) == 2


def test_every_loss_of_every_program_is_a_case() -> None:
    made = list(cases.single())
    assert len({case.name for case in made}) == len(made)
    each = [c for c in made if c.machines == 4 and c.program == TRAINING]
    assert sorted((c.losses[0].kind, c.losses[0].machine) for c in each) == sorted(
        (kind, machine) for kind in LOSSES for machine in (0, 2) if (kind, machine) != (PAIR, 0)
    )
    (torchrun,) = [c for c in made if c.name == f"{TORCHRUN}-2x1-{CUT}-first"]
    assert torchrun.reference.program == DUET, "the same script"


def test_random_cases_depend_on_seed_and_number_only() -> None:
    made = [cases.drawn(1, number) for number in range(200)]
    assert made == [cases.drawn(1, number) for number in range(200)]
    assert made[0].losses != cases.drawn(2, 0).losses
    assert {loss.kind for case in made for loss in case.losses} == set(LOSSES) - {PAIR}
    assert {loss.machine for case in made for loss in case.losses} == set(range(4))
    for case in made:
        alone = case.program == OWN and case.machines == 2
        assert all(alone < loss.machine + 1 <= case.machines for loss in case.losses)
        assert all(loss.back_s is not None for loss in case.losses)


def test_only_the_second_of_two_machines_without_a_common_disk_may_end() -> None:
    assert [c.name for c in cases.single() if c.may_end] == [f"{OWN}-2x1-{POWER}-first"]
    ended = found(recovered()[:29], finished=False)
    assert problems(ended) and not problems(ended, may_end=True)


def line(program: str, **changes: Any) -> Record:
    (case,) = [c for c in cases.single() if c.name == f"{program}-2x1-{POWER}-middle"]
    made = case.facts() | found(recovered()) | MACHINE | {"losses": [{"kind": POWER}]}
    made |= changes
    return made | {"problems": problems(made)}


def last_row(lines: list[Record]) -> str:
    return [text for text in table.single(lines) if text.startswith("|")][-2]  # before the load


def test_the_table_has_a_cell_for_each_program() -> None:
    ends = {"finished": False, "exits": [1, -9], "ended_s": 31.4, "pauses_s": [None], "steps": 29}
    lines = [line(TRAINING), line(DUET, left=["sleep 600"]), line(TORCHRUN, **ends)]
    row = last_row(lines)
    cells = [cell.strip() for cell in row.strip("|").split("|")][-len(PROGRAMS) :]
    assert cells[0] == "10.0 s, 9 steps repeated"
    assert cells[1].endswith("; 1 process left")
    assert cells[2].startswith("ends after 31 s, exit 1")
    assert f"> {LIMIT_S:.0f} s" in last_row([line(TORCHRUN, **ends, gave_up=True)])


def test_random_cases_are_counted_by_loss() -> None:
    random = {**line(TRAINING), "name": "random-1-0", "place": ""}
    random |= {"losses": [{"kind": RANK}, {"kind": CUT}], "pauses_s": [2.0, None]}
    text = "\n".join(table.drawn([random, random | {"problems": ["planted"]}]))
    assert "Runs: 2, with 4 losses; without problems: 1." in text
    assert "planted" in text

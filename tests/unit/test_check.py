"""`--check`: the verdict, what it says when this torch can not measure, and the measurement itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from training import check
from training.engine import measure
from training.errors import Exit
from training.host.memory import GIB, Load, estimate
from training.host.preflight import ERROR, OK, Check

LOAD = Load(4, 2, 64, 320, bf16=True, compiled=False, cuda=False)


@pytest.mark.parametrize(
    ("room_gib", "said", "good"),
    [
        (14.0, "verdict: fits, 12.0 GiB needed, 14.0 GiB free", True),
        (13.0, "verdict: tight, 12.0 GiB to 13.5 GiB needed, 13.0 GiB free", True),
        (11.0, "verdict: does not fit, 12.0 GiB needed, 11.0 GiB free", False),
        (None, "verdict: unknown, 12.0 GiB needed, the free memory is not known", True),
    ],
)
def test_the_verdict(room_gib: float | None, said: str, good: bool) -> None:
    room = None if room_gib is None else int(room_gib * GIB)
    assert (check.verdict(10 * GIB, room), check.fits(10 * GIB, room)) == (said, good)


def test_both_figures_stand_side_by_side() -> None:
    text, code = check.run(LOAD, 8 * GIB, [Check("a", OK, "b")])
    assert code == Exit.DONE
    assert "formula (eager, bf16" in text and "fake tensors (the same step)" in text and "× the formula" in text
    assert text.endswith("8.0 GiB free")


def test_a_failing_check_or_memory_is_exit_3() -> None:
    assert check.run(LOAD, 8 * GIB, [Check("a", ERROR, "b")])[1] == Exit.RESOURCES
    assert check.run(LOAD, GIB, [])[1] == Exit.RESOURCES


def test_a_formula_that_is_low_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    total = estimate(LOAD).total
    room = estimate(LOAD).needed + 1
    for factor, good in ((0.9, True), (1.0, True), (1.5, False)):
        monkeypatch.setattr(measure, "peak", lambda load, factor=factor: int(factor * total))
        assert check.memory(LOAD, room)[1] is good


def test_a_torch_without_the_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.distributed._tools.mem_tracker", None)
    with pytest.raises(measure.Unavailable):
        measure.peak(LOAD)
    text, code = check.run(LOAD, 8 * GIB, [])
    assert code == Exit.DONE
    assert "fake tensors: not measured. torch " in text
    assert "verdict: fits" in text


@pytest.mark.parametrize(("blocks", "chunks"), [(0, 1), (2, 1), (5, 1), (6, 4)])
def test_the_extrapolation_is_the_whole_model_s_peak(blocks: int, chunks: int) -> None:
    load = replace(LOAD, depth=6, sequences=4, seq_len=256, blocks=blocks, chunks=chunks)
    assert measure.peak(load) == pytest.approx(measure.step_peak(load, 6 - blocks, blocks), rel=0.005)


def test_it_sees_what_the_settings_save() -> None:
    load = replace(LOAD, depth=8, sequences=4, seq_len=512, vocab=8192)
    plain, parts = measure.peak(load), measure.peak(replace(load, chunks=8))
    again = measure.peak(replace(load, chunks=8, blocks=6))
    assert again < parts < plain

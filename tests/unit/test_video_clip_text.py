"""Plan lines and notes about the clips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.cases import each
from tests.unit.video_data import pairs
from training.tasks import BUILT_IN
from training.tasks.sample_spec import SampleSpec
from training.tasks.video_restoration.clip_text import gaps, lines_and_notes


@each(
    "names, found",
    [
        ("000 001 002 007 008 009", [("002", "007")]),
        ("a_1 a_2 a_4 a_5 a_9 a_10", [("a_2", "a_4"), ("a_5", "a_9")]),
        ("000 002 004 008 010", [("004", "008")]),
        ("000 002 004 006", []),
        ("1403636579 1403645123 1403651007 1403662222", []),  # times
        ("scene1_0004 scene1_0005 scene1_0006 scene2_0010 scene2_0011", []),
        ("0l 1l 2l 5l 6l", [("2l", "5l")]),
        ("left right up", []),
        ("000", []),
    ],
)
def test_gaps_in_the_numbers(names: str, found: list[tuple[str, str]]) -> None:
    assert gaps(names.split()) == found


@each(("per_second", "unit"), [(30, 1e3), (30, 1e9), (24, 1e3), (60, 1e3), (59.94, 1e6)])
def test_gaps_in_times_of_a_constant_rate(per_second: float, unit: float) -> None:
    """Their distances differ by the last digit."""
    names = [f"{int(frame / per_second * unit):012d}" for frame in range(40)]
    assert gaps(names) == []
    assert gaps(names[:20] + names[21:]) == [(names[19], names[21])]


def test_gaps_in_seconds() -> None:
    names = [f"{frame / 30:.3f}" for frame in range(40)]
    assert gaps(names) == []
    assert gaps(names[:20] + names[21:]) == [(names[19], names[21])]


def test_missing_frames_are_noted_before_the_start(tmp_path: Path) -> None:
    options = pairs(tmp_path)
    lines, notes = lines_and_notes(options)
    assert len(lines) == 1 and "2 clips" in lines[0] and "12" in lines[0] and not notes
    for root in ("gt", "lq"):
        for frame in (2, 3):
            (tmp_path / root / "c1" / f"{frame:06d}.png").unlink()
    held = replace(options, test_dataroot_gt=f"{tmp_path}/lq", test_dataroot_lq=f"{tmp_path}/gt")
    spec = BUILT_IN["video_restoration"]
    assert isinstance(spec, SampleSpec)
    lines, notes = spec.of_data(vars(held))
    assert [note.partition(":")[0] for note in notes] == [f"{tmp_path}/gt", f"{tmp_path}/lq"]
    for note in notes:
        assert "c1" in note and "c0" not in note and "000001" in note and "000004" in note


def test_validation_clips_that_are_trained_on_are_noted(tmp_path: Path) -> None:
    options = pairs(tmp_path, (5, 7, 5))
    (tmp_path / "held").symlink_to("gt")
    (tmp_path / "list.txt").write_text("c1\nc2\n")
    same = {"test_dataroot_gt": f"{tmp_path}/held", "test_dataroot_lq": f"{tmp_path}/lq"}
    notes = lines_and_notes(replace(options, **same))[1]
    assert len(notes) == 1 and "3 clips" in notes[0] and "c0, c1, c2" in notes[0]
    listed = replace(options, **same, meta_info_file=f"{tmp_path}/list.txt")
    notes = lines_and_notes(listed)[1]
    assert len(notes) == 1 and "2 clips" in notes[0] and "c1, c2" in notes[0]
    apart = pairs(tmp_path / "other", (5,))
    held = {"test_dataroot_gt": apart.dataroot_gt, "test_dataroot_lq": apart.dataroot_lq}
    assert lines_and_notes(replace(options, **held))[1] == []

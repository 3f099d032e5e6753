"""Checks of the options and folders of video restoration before anything starts. Imports neither
torch nor numpy."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from training.core import heartbeat
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.data.frames import lmdb_folder, pictures
from training.host import packages
from training.tasks.video_restoration import headers, lists
from training.tasks.video_restoration.listing import PARTS, Clip, Scan, shown, some
from training.tasks.video_restoration.roots import expanded

OVERLAP = 20  # overlap of two squares of size_patch_testing in pixels, as in KAIR


def check(options: Any, origins: Mapping[str, str], *, headers_too: bool = True) -> list[Problem]:
    """All problems of all options. `origins`: name → origin of its value; `headers_too`: read their
    headers, which needs Pillow, and databases, which needs lmdb."""
    problems = _numbers(options, origins) + _both(options, origins)
    for part in PARTS:
        scan = Scan(options, part, origins)
        problems += scan.problems
        damaged = damage(options, part, origins) if headers_too and scan.clips else []
        problems += damaged
        if scan.clips and headers_too and not damaged:
            problems += headers.check(options, part, scan, origins)
        if scan.clips:
            problems += _lengths(options, scan, origins) if part == "train" else []
    return problems


def packed(options: Any, part: str) -> dict[str, Path]:
    """The LMDB databases of a part: option → path."""
    names = [PARTS[part] + name for name in ("dataroot_gt", "dataroot_lq")]
    paths = {name: expanded(getattr(options, name)) for name in names}
    return {name: path for name, path in paths.items() if lmdb_folder.is_packed(path)}


def damage(options: Any, part: str, origins: Mapping[str, str]) -> list[Problem]:
    """Problems inside the databases of a part, which needs lmdb."""
    return [
        Problem("video.lmdb", f"{shown(options, name, origins)}: {wrong}", allowed)
        for name, path in packed(options, part).items()
        for allowed in [msg("tasks.video.clips.lmdb_wanted")]
        if (wrong := lmdb_folder.damage(path))
    ]


def needs_lmdb(options: Any, parts: Iterable[str] = PARTS) -> list[Problem]:
    """The missing package, if a root of these parts is a database."""
    roots = [str(path) for part in parts for path in packed(options, part).values()]
    if not roots or packages.found("lmdb"):
        return []
    what = msg("data.frames.needs_package", path=roots[0], package="lmdb")
    return [Problem("package.missing", what, "", packages.add(["lmdb"]))]


def clips(options: Any, part: str) -> list[Clip]:
    """The clips of "train" or "val". Raises UserError if the folders do not (or no longer) pass
    check()."""
    scan = Scan(options, part)
    if scan.problems:
        raise UserError(scan.problems)
    return scan.clips


def content(options: Any, *parts: str) -> str:
    """A digest of the names and sizes of all clip files of these parts, independent of their
    location; it differs for other data.

    Raises UserError, OSError.
    """
    digest = hashlib.sha256()
    for part in parts or PARTS:
        for clip in clips(options, part):
            heartbeat.current.again()  # a network file system may take minutes for all
            for kind in (clip.gt, clip.lq, clip.spike):
                for file in kind:
                    name = os.path.basename(file)
                    row = f"{part}\0{clip.name}\0{name}\0{pictures.length(file)}\n"
                    digest.update(row.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def intervals(options: Any) -> list[int]:
    return lists.whole(options.interval_list)


def _numbers(options: Any, origins: Mapping[str, str]) -> list[Problem]:
    """Problems of lists and of numbers that depend on each other."""
    problems: list[Problem] = []

    def given(name: str) -> str:
        return shown(options, name, origins)

    def wrong(name: str, what: str, allowed: str, *fixes: str) -> None:
        problems.append(Problem("field.value", what, allowed, [f"--{name}={fix}" for fix in fixes]))

    def listed(
        name: str,
        read: Callable[[str], list[Any]],
        good: Callable[[list[Any]], bool],
        allowed: str,
        *fixes: str,
    ) -> list[Any]:
        try:
            found = read(getattr(options, name))
        except ValueError:
            found = None
        if found is None or not good(found):
            wrong(name, given(name), allowed, *fixes)
        return found or []

    listed(
        "interval_list",
        lists.whole,
        lambda x: bool(x) and min(x) >= 1,
        msg("tasks.video.check.integers"),
        "1",
        "1,2",
    )
    listed(
        "G_optimizer_betas",
        lists.numbers,
        lambda x: len(x) == 2 and all(0 <= b < 1 for b in x),
        msg("tasks.video.check.two_numbers"),
        "0.9,0.99",
    )
    periods = listed(
        "G_scheduler_periods",
        lists.whole,
        lambda x: all(p >= 1 for p in x),
        msg("tasks.video.check.integers_or_empty"),
        "",
    )
    weights = listed(
        "G_scheduler_restart_weights",
        lists.numbers,
        lambda x: bool(x) and min(x) >= 0,
        msg("tasks.video.check.numbers"),
        "1",
    )
    ascending = msg("tasks.video.check.ascending")
    listed(
        "G_scheduler_milestones",
        lists.whole,
        lambda x: x == sorted(set(x)) and all(m >= 1 for m in x),
        ascending,
        "",
    )
    if weights and len(weights) not in (1, max(1, len(periods))):
        name = "G_scheduler_restart_weights"
        wrong(
            name,
            msg(
                "tasks.video.check.weights",
                given=given(name),
                weights=len(weights),
                periods=max(1, len(periods)),
            ),
            msg("tasks.video.check.weights_wanted"),
            "1",
        )
    scale = int(options.scale)
    if options.gt_size % scale:
        near = max(scale, options.gt_size // scale * scale)
        wrong(
            "gt_size",
            msg("tasks.video.check.not_divisible", given=given("gt_size"), scale=scale),
            msg("tasks.video.check.multiple", scale=scale),
            str(near),
        )
    if options.embed_dim % 2:
        wrong(
            "embed_dim",
            given("embed_dim"),
            msg("tasks.video.check.even"),
            str(options.embed_dim + 1),
        )
    if options.test_num_frame == 0:
        allowed = msg("tasks.video.check.frames_wanted")
        wrong("test_num_frame", given("test_num_frame"), allowed, "-1")
    if options.num_frame_testing and options.num_frame_overlapping >= options.num_frame_testing:
        wrong(
            "num_frame_overlapping",
            msg(
                "tasks.video.check.overlap",
                given=given("num_frame_overlapping"),
                testing=options.num_frame_testing,
            ),
            msg("tasks.video.check.overlap_wanted"),
            str(options.num_frame_testing // 4),
        )
    if options.size_patch_testing and options.size_patch_testing < 2 * OVERLAP:
        allowed = msg("tasks.video.check.patch_wanted", pixels=2 * OVERLAP)
        wrong("size_patch_testing", given("size_patch_testing"), allowed, "0", "192")
    return problems


def _both(options: Any, origins: Mapping[str, str]) -> list[Problem]:
    """The network's input has the same channels in training and validation."""
    if not options.test_dataroot_gt or bool(options.dataroot_spike) == bool(
        options.test_dataroot_spike
    ):
        return []
    there, absent = (
        ("dataroot_spike", "test_dataroot_spike")
        if options.dataroot_spike
        else ("test_dataroot_spike", "dataroot_spike")
    )
    what = msg("tasks.video.check.one_empty", given=shown(options, there, origins), absent=absent)
    return [
        Problem(
            "video.frames_differ",
            what,
            msg("tasks.video.check.both_or_neither"),
            [f"--{absent}=FOLDER", f"--{there}="],
        )
    ]


def _lengths(options: Any, scan: Scan, origins: Mapping[str, str]) -> list[Problem]:
    """Clips too short for a sample."""
    try:
        steps = max(intervals(options))
    except ValueError:  # reported by _numbers
        return []
    needed = (options.num_frame - 1) * steps + 1
    short = [clip for clip in scan.clips if len(clip.gt) < needed]
    if not short:
        return []
    least = min(len(clip.gt) for clip in short)
    fits = (least - 1) // steps + 1
    fixes = [f"--num_frame={fits}"] if fits >= 2 else []
    given, names = (
        shown(options, "num_frame", origins),
        some([f"{clip.name} ({len(clip.gt)})" for clip in short]),
    )
    what = (
        msg(
            "tasks.video.check.too_short_apart",
            given=given,
            steps=steps,
            needed=needed,
            short=len(short),
            clips=len(scan.clips),
            names=names,
        )
        if steps > 1
        else msg(
            "tasks.video.check.too_short",
            given=given,
            needed=needed,
            short=len(short),
            clips=len(scan.clips),
            names=names,
        )
    )
    return [Problem("video.clip_lengths", what, msg("tasks.video.check.longer"), fixes)]

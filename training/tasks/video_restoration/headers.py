"""Checks that the frames match the options, by the sizes in meta_info.txt of a database, and by the
headers of at most FRAMES frames in folders. Other sizes, and damage beyond the header, are reported
when the frame is read.

Imports neither torch nor numpy.
"""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from training.core.errors import Problem
from training.core.messages import msg
from training.data.frames import lmdb_folder, pictures
from training.tasks.video_restoration.listing import PARTS, Clip, Scan, shown, some

LOOKED_AT = 6  # clips per part whose spike files are read
FRAMES = 500  # per part whose headers are read, evenly spread over all clips
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
WINDOW = 11  # SSIM's
CAMERA = "--spike_h=250 --spike_w=400"  # of the spike camera in most public recordings
Size = tuple[int, int]  # width, height


def check(options: Any, part: str, scan: Scan, origins: Mapping[str, str]) -> list[Problem]:
    problems: list[Problem] = []
    known: dict[str, Size] = {}
    for clip in scan.clips[:: max(1, len(scan.clips) // LOOKED_AT)][:LOOKED_AT]:
        for file in (clip.gt[0], clip.lq[0]):
            if size := _size(file, problems):
                known[file] = size
        if clip.spike:
            problems += _spikes(options, PARTS[part], clip.spike, origins)
        if problems:
            return problems  # the other clips probably have the same problem
    listed = _listed(scan.clips)

    def size_of(file: str) -> Size | None:
        if file not in known and (
            size := listed.get(file) or _png_size(file) or _size(file, problems)
        ):
            known[file] = size
        return known.get(file)

    sizes: dict[str, tuple[Size, Size]] = {}  # clip → sizes (sharp, blurred) of its first frame
    unlike: dict[str, list[str]] = {"gt": [], "lq": []}
    for clip, number in _spread(scan.clips, listed):
        firsts = size_of(clip.gt[0]), size_of(clip.lq[0])
        for kind, files, first in zip(unlike, (clip.gt, clip.lq), firsts, strict=True):
            size = size_of(files[number])
            if problems or size is None or first is None:
                return problems
            if size != first:
                unlike[kind].append(
                    msg(
                        "tasks.video.header.unlike",
                        file=f"{clip.name}/{os.path.basename(files[number])}",
                        size=_pixels(size),
                        first=_pixels(first),
                    )
                )
        gt, lq = firsts
        if gt and lq:
            sizes[clip.name] = gt, lq
    return _fit(options, part, sizes, origins) + _one_size(options, part, unlike, origins)


def _png_size(file: str) -> Size | None:
    """(width, height) of a PNG file with at most 8 bits per colour, ten times as fast as with
    Pillow; None: another file."""
    try:
        with open(file, "rb", buffering=0) as data:
            begun = data.read(25)
    except OSError:
        return None
    if len(begun) < 25 or not begun.startswith(PNG) or begun[24] > 8:
        return None
    return int.from_bytes(begun[16:20], "big"), int.from_bytes(begun[20:24], "big")


def _listed(clips: list[Clip]) -> dict[str, Size]:
    """Address → size, of the frames in databases."""
    roots = {
        file.partition(lmdb_folder.MARK)[0] + lmdb_folder.SUFFIX
        for clip in clips
        for file in (clip.gt[0], clip.lq[0])
        if lmdb_folder.MARK in file
    }
    return {address: s for root in roots for address, s in lmdb_folder.sizes(Path(root)).items()}


def _spread(clips: list[Clip], listed: Mapping[str, Size]) -> Iterator[tuple[Clip, int]]:
    """The frames to check: all of them if their sizes are listed, else at most FRAMES."""
    free = all(clip.gt[0] in listed and clip.lq[0] in listed for clip in clips)
    total = sum(len(clip.gt) for clip in clips)
    every, before = 1 if free else -(-total // FRAMES), 0
    for clip in clips:
        for number in range(-before % every, len(clip.gt), every):
            yield clip, number
        before += len(clip.gt)


def _one_size(
    options: Any, part: str, unlike: dict[str, list[str]], origins: Mapping[str, str]
) -> list[Problem]:
    """Problems of clips with frames of several sizes."""
    lq = PARTS[part] + "dataroot_lq"
    roots = {"gt": PARTS[part] + "dataroot_gt"}
    roots["lq"] = lq if getattr(options, lq) else roots["gt"]
    return [
        Problem(
            "video.frame_sizes",
            msg(
                "tasks.video.header.several_sizes",
                given=shown(options, roots[kind], origins),
                named=some(named),
            ),
            msg("tasks.video.header.one_size"),
        )
        for kind, named in unlike.items()
        if named
    ]


def _fit(
    options: Any, part: str, sizes: dict[str, tuple[Size, Size]], origins: Mapping[str, str]
) -> list[Problem]:
    problems, scale = [], int(options.scale)
    unequal = {name: pair for name, pair in sizes.items() if _scaled(pair[1], scale) != pair[0]}
    if unequal:
        gt, lq = next(iter(unequal.values()))
        named = some(
            [
                msg("tasks.video.header.pair", name=name, gt=_pixels(gt), lq=_pixels(lq))
                for name, (gt, lq) in unequal.items()
            ]
        )
        what = msg(
            "tasks.video.header.unequal", given=shown(options, "scale", origins), named=named
        )
        fixes = [f"--scale={other}" for other in (1, 2, 4) if _scaled(lq, other) == gt]
        problems.append(
            Problem(
                "video.frame_sizes",
                what,
                msg("tasks.video.header.ratio"),
                fixes,
            )
        )
    least = min(min(gt) for gt, _ in sizes.values())
    small = some(
        [f"{name} ({_pixels(gt)})" for name, (gt, _) in sizes.items() if min(gt) < options.gt_size]
    )
    crop = [f"--gt_size={least // scale * scale}"]
    if part == "val":
        if least < WINDOW:
            what = msg(
                "tasks.video.header.below_window",
                given=shown(options, "test_dataroot_gt", origins),
                least=least,
            )
            problems.append(
                Problem("video.crop_size", what, msg("tasks.video.header.side", pixels=WINDOW))
            )
    elif least < options.gt_size:
        problems.append(
            Problem(
                "video.crop_size",
                msg(
                    "tasks.video.header.frames_smaller",
                    given=shown(options, "gt_size", origins),
                    small=small,
                ),
                msg("tasks.video.header.crop_wanted"),
                crop,
            )
        )
    elif options.gt_size == 0 and len({gt for gt, _ in sizes.values()}) > 1:
        named = some([f"{name} {_pixels(gt)}" for name, (gt, _) in sizes.items()])
        what = msg(
            "tasks.video.header.sizes_differ", given=shown(options, "gt_size", origins), named=named
        )
        problems.append(
            Problem("video.frame_sizes", what, msg("tasks.video.header.crop_fits"), crop)
        )
    return problems


def _scaled(size: Size, scale: int) -> Size:
    return size[0] * scale, size[1] * scale


def _pixels(size: Size) -> str:
    return f"{size[0]} × {size[1]}"


def _size(file: str, problems: list[Problem]) -> Size | None:
    """(width, height) from a picture's header."""

    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about very large pictures
            with Image.open(pictures.stream(file)) as picture:
                size, mode = picture.size, pictures.deep_mode(picture) or picture.mode
    except pictures.Unreadable as error:
        problems.append(Problem("video.frame_unreadable", str(error)))
        return None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        why = getattr(error, "strerror", None) or msg("tasks.video.header.no_picture")
        problems.append(
            Problem("video.frame_unreadable", f"{file}: {why}", msg("tasks.video.header.formats"))
        )
        return None
    if mode not in pictures.MODES:
        problems.append(
            Problem(
                "video.pixel_format",
                msg("tasks.video.header.pixel_mode", file=file, mode=mode),
                msg("tasks.video.header.eight_bits"),
            )
        )
        return None
    return size


def _spikes(
    options: Any, prefix: str, files: tuple[str, ...], origins: Mapping[str, str]
) -> list[Problem]:
    """Problems of a clip's spike files against the options, from sizes and headers only."""
    file, suffix = files[0], Path(files[0]).suffix.lower()
    if suffix == ".dat":
        height, width = options.spike_h, options.spike_w
        if not height or not width:
            name = "spike_w" if height else "spike_h"
            what = msg(
                "tasks.video.header.raw",
                given=shown(options, name, origins),
                root=shown(options, prefix + "dataroot_spike", origins),
                file=file,
            )
            return [
                Problem(
                    "video.spikes",
                    what,
                    msg("tasks.video.header.camera_wanted"),
                    [CAMERA],
                )
            ]
        if height * width % 8:
            what = msg("tasks.video.header.no_whole_bytes", height=height, width=width)
            return [Problem("video.spikes", what, msg("tasks.video.header.camera_size"), [CAMERA])]
        for one in (files[0], files[-1]):
            size, plane = Path(one).stat().st_size, height * width // 8
            if size == 0 or size % plane:
                what = msg(
                    "tasks.video.header.no_whole_planes",
                    file=one,
                    size=size,
                    plane=plane,
                    height=height,
                    width=width,
                )
                return [
                    Problem(
                        "video.spikes",
                        what,
                        msg("tasks.video.header.camera_recorded"),
                        [CAMERA],
                    )
                ]
            if size // plane < options.spike_channels:
                what = msg(
                    "tasks.video.header.few_planes",
                    given=shown(options, "spike_channels", origins),
                    file=one,
                    planes=size // plane,
                )
                return [
                    Problem(
                        "video.spikes",
                        what,
                        msg("tasks.video.header.planes_wanted"),
                        [f"--spike_channels={size // plane}"],
                    )
                ]
        return []
    if suffix == ".npy":
        planes = npy_planes(file)
        if planes is None:
            return [
                Problem(
                    "video.spikes",
                    msg("tasks.video.header.no_array", file=file),
                    msg("tasks.video.header.array_wanted"),
                )
            ]
    else:
        problems: list[Problem] = []
        if _size(file, problems) is None:
            return problems
        planes = 1
    if planes < options.spike_channels:
        what = msg(
            "tasks.video.header.few_planes",
            given=shown(options, "spike_channels", origins),
            file=file,
            planes=planes,
        )
        return [
            Problem(
                "video.spikes",
                what,
                msg("tasks.video.header.planes_wanted"),
                [f"--spike_channels={planes}"],
            )
        ]
    return []


def npy_planes(file: str) -> int | None:
    """Planes of an array (planes, height, width) or (height, width) on disk, from its header; None:
    something else.

    numpy's own reader would load numpy into the planning process.
    """
    try:
        with open(file, "rb") as data:
            magic = data.read(8)
            size = int.from_bytes(data.read(2 if magic[6:7] == b"\x01" else 4), "little")
            header = ast.literal_eval(data.read(min(size, 10_000)).decode("latin-1").strip())
        shape, kind = header["shape"], str(header["descr"])
    except (OSError, ValueError, SyntaxError, KeyError, TypeError):
        return None
    if (
        magic[:6] != b"\x93NUMPY"
        or kind[1:2] not in ("b", "i", "u", "f")
        or not all(isinstance(n, int) and n > 0 for n in shape)
    ):
        return None
    return {2: 1, 3: shape[0]}.get(len(shape))

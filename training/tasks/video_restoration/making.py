"""Implementation of make_blur_video: its command line, and clips rendered into folders. The output
appears complete or not at all: a temporary folder is renamed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from training.core import args
from training.core.errors import Problem, UserError
from training.core.project import ROOT, WORK
from training.host import packages

COMMAND = "python -m training.tasks.make_blur_video"
NEXT = "./launch_train.sh 2 configs/video/quickstart.py"
LAYOUTS = ("gopro", "kair")
SIDE = (32, 2048)  # pixels; a multiple of 8, so that the raw spikes of a frame fill whole bytes
VALIDATION = 4  # one validation clip per this many training clips
PLANES = 32  # spike camera samples per frame
# channels that the next command makes of them: the motion of light while the shutter was open
SPIKE_CHANNELS = 4
PNG_LEVEL = 1  # zlib level: three times as fast as the default, 10 % larger


def _size(text: str) -> tuple[int, int]:
    sides = text.lower().replace("×", "x").split("x")
    low, high = SIDE
    if len(sides) > 2 or not all(
        args.is_whole(s) and low <= int(s) <= high and int(s) % 8 == 0 for s in sides
    ):
        raise ValueError(text)
    return int(sides[0]), int(sides[-1])


FLAGS = {
    "clips": args.whole(1, 1000, 16),
    "frames": args.whole(2, 1000, 20),
    "size": args.Flag(
        _size,
        f"a multiple of 8 from {SIDE[0]} to {SIDE[1]}, or WIDTHxHEIGHT",
        lambda text: ["128", "160x96"],
    ),
    "seed": args.whole(0, (1 << 63) - 1, 1),
    "layout": args.one_of(*LAYOUTS),
    "spikes": args.SWITCH,
    "force": args.SWITCH,
    "help": args.SWITCH,
}


@dataclass
class Chosen:
    folder: Path = WORK / "data" / "blur_video"
    clips: int = 16
    frames: int = 20
    size: tuple[int, int] = (128, 128)  # width, height
    seed: int = 1
    layout: str = "gopro"
    spikes: bool = False
    force: bool = False
    help: bool = False


def parse(argv: list[str]) -> Chosen:
    """Parse and check the command line. Raises UserError with all problems."""
    line = args.parse(argv, FLAGS, COMMAND)
    chosen = Chosen(**{name: value for name, value in line.values.items() if value is not None})
    folders, problems = line.words, line.problems
    for word in folders[1:]:
        problems.append(
            Problem(
                "flag.positional", f"{word!r} is a second folder after {folders[0]!r}", "one folder"
            )
        )
    if folders:
        chosen.folder = Path(os.path.expanduser(folders[0])).absolute()  # noqa: PTH111 – Path.expanduser raises for an unknown user
    if chosen.help:
        return chosen
    problems = problems or _room(chosen)
    if problems:
        raise UserError(problems)
    return chosen


def _room(chosen: Chosen) -> list[Problem]:
    """Problems of the output folder: it must be new, empty, or replaceable."""
    folder, shown = chosen.folder, shlex.quote(str(chosen.folder))
    if not os.path.lexists(folder):
        return []
    if not folder.is_dir() or folder.is_symlink():
        return [
            Problem(
                "output.no_folder",
                f"{folder} exists and is not a folder",
                "a new or empty folder",
                [f"{COMMAND} {shown}_2"],
            )
        ]
    try:
        inside = sorted(os.listdir(folder))
    except OSError as error:
        return [
            Problem(
                "output.unwritable",
                f"{folder} cannot be read: {error.strerror}",
                "a new or empty folder",
            )
        ]
    if not inside or (chosen.force and all(_made_here(folder, name) for name in inside)):
        return []
    fixes = [f"{COMMAND} {shown}_2"]
    if not chosen.force:
        return [
            Problem(
                "output.not_empty",
                f"{folder} is not empty",
                "an empty folder; --force replaces it",
                [f"{COMMAND} {shown} --force", *fixes],
            )
        ]
    foreign = next(name for name in inside if not _made_here(folder, name))
    return [
        Problem(
            "output.not_empty",
            f"{folder} contains {foreign!r}, which make_blur_video did not create, and "
            "is not replaced",
            "an empty folder",
            fixes,
        )
    ]


def _made_here(folder: Path, name: str) -> bool:
    """Whether make() created this entry: --force deletes nothing else."""
    return ((folder / name).is_dir() and name in ("train", "test")) or name.startswith(
        ("train_", "test_", "meta_info_")
    )


def need_packages(argv: list[str]) -> None:
    """Continue in the project's Python if this one lacks Pillow or numpy. Raises UserError if there
    is none."""
    lacks = packages.lacking(["numpy", "pillow"])
    own = ROOT / ".venv/bin/python"
    if not lacks:
        return
    if own.is_file() and not own.parent.parent.samefile(sys.prefix):
        os.execv(
            own,
            [str(own), str(ROOT / "lib/run_module.py"), "training.tasks.make_blur_video", *argv],
        )
    what = f"{sys.executable} has no {' and no '.join(lacks)}"
    raise UserError(
        Problem(
            "package.missing",
            what,
            "an environment with both",
            [packages.install(lacks), "make extras   # creates .venv with both"],
        )
    )


def make(chosen: Chosen) -> str:
    """Render everything. Returns what was made and the next command. Raises OSError."""
    begin = time.monotonic()
    chosen.folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{chosen.folder.name}.", dir=chosen.folder.parent))
    try:
        beside.chmod(0o755)  # mkdtemp's mode is private to the user
        validation = max(1, chosen.clips // VALIDATION)
        for number in range(chosen.clips + validation):
            part = "train" if number < chosen.clips else "test"
            _clip(chosen, beside, part, number if part == "train" else number - chosen.clips)
            _progress(
                number + 1, chosen.clips + validation, chosen.frames, time.monotonic() - begin
            )
        if chosen.layout == "kair":
            lines = [
                f"{_name(n)} {chosen.frames} ({chosen.size[1]},{chosen.size[0]},3) 0\n"
                for n in range(chosen.clips)
            ]
            (beside / "meta_info_train_GT.txt").write_text("".join(lines))
        _replace(beside, chosen.folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # renamed already, or useless
    took = time.monotonic() - begin
    width, height = chosen.size
    spikes = f", with {PLANES} planes of spikes each" if chosen.spikes else ""
    for_training = (
        f"{chosen.clips} clip{'' if chosen.clips == 1 else 's'} for training and "
        f"{validation} for validation"
    )
    return (
        f"{for_training}, {chosen.frames} frames of {width} × {height} each{spikes}, "
        f"in {chosen.folder} ({took:.0f} s)\nnext: {_next(chosen)}"
    )


def _name(number: int) -> str:
    return f"clip_{number:03d}"


def _clip(chosen: Chosen, top: Path, part: str, number: int) -> None:
    import numpy as np
    from PIL import Image

    from training.tasks.video_restoration import scenes

    width, height = chosen.size
    random = np.random.default_rng([chosen.seed, 0 if part == "train" else 1, number])
    scene = scenes.Scene(random, height, width)
    camera = scenes.SpikeCamera(random, height, width)
    folders = _folders(chosen, top, part, _name(number))
    for folder in folders.values():
        folder.mkdir(parents=True)
    for frame in range(chosen.frames):
        blurred, sharp, lights = scene.frame(frame)
        Image.fromarray(scenes.encoded(blurred)).save(
            folders["blur"] / f"{frame:06d}.png", compress_level=PNG_LEVEL
        )
        Image.fromarray(scenes.encoded(sharp)).save(
            folders["sharp"] / f"{frame:06d}.png", compress_level=PNG_LEVEL
        )
        # a spike camera's picture is upside down, the first pixel is the lowest bit
        if chosen.spikes:
            planes = camera.planes(lights, PLANES)[:, ::-1]
            np.packbits(planes.reshape(-1), bitorder="little").tofile(
                folders["spike"] / f"{frame:06d}.dat"
            )


def _folders(chosen: Chosen, top: Path, part: str, name: str) -> dict[str, Path]:
    if chosen.layout == "gopro":
        found = {kind: top / part / name / kind for kind in ("blur", "sharp", "spike")}
    else:
        found = {
            "blur": top / f"{part}_GT_blurred" / name,
            "sharp": top / f"{part}_GT" / name,
            "spike": top / f"{part}_spike" / name / "spike",
        }
    return (
        found
        if chosen.spikes
        else {kind: folder for kind, folder in found.items() if kind != "spike"}
    )


def _replace(made: Path, folder: Path) -> None:
    """Put the new folder in place; an old one (see _room) is deleted last."""
    old = None
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        folder.rename(old / folder.name)
    made.rename(folder)
    if old is not None:
        shutil.rmtree(old)


def _progress(done: int, clips: int, frames: int, seconds: float) -> None:
    """A line that is redrawn on a terminal; elsewhere one line per quarter."""
    text = f"clip {done} of {clips}, {done * frames / max(seconds, 1e-9):.0f} frames/s"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if done == clips else ""))
        sys.stderr.flush()
    elif done == clips or (done * 4) // clips > ((done - 1) * 4) // clips:
        print(text, file=sys.stderr)


def _next(chosen: Chosen) -> str:
    """The command that trains on the new clips."""
    if (chosen.folder, chosen.layout, chosen.spikes) == (Chosen.folder, "gopro", False):
        return NEXT  # the configuration's own values
    width, height = chosen.size
    flags: dict[str, object] = {}
    for part, prefix in (("train", ""), ("test", "test_")):
        found = _folders(chosen, chosen.folder, part, "CLIP")
        # In the GoPro layout blurred and sharp frames have the same root.
        roots = {
            kind: folder.parents[0 if folder.name == "CLIP" else 1]
            for kind, folder in found.items()
        }
        names = {"sharp": "dataroot_gt", "spike": "dataroot_spike"} | (
            {"blur": "dataroot_lq"} if roots["blur"] != roots["sharp"] else {}
        )
        flags |= {prefix + names[kind]: folder for kind, folder in roots.items() if kind in names}
    if chosen.spikes:
        flags |= {"spike_h": height, "spike_w": width, "spike_channels": SPIKE_CHANNELS}
    return NEXT + "".join(f" --{name}={shlex.quote(str(value))}" for name, value in flags.items())

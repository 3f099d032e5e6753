"""Restore a video, a folder of frames or a picture with a trained network.

Usage: ./duet restore [RUN] INPUT --out=PATH [--tile=SIDE] [--frames=A:B]

  RUN              a run directory, the name of a run, latest (default), a
                   checkpoint folder, or a folder of ./duet export; RUN/best:
                   its checkpoint with the best evaluation
  INPUT            a video file, a folder of pictures, or a picture
  --out=PATH       .mp4, .mov, .m4v, .mkv or .webm: a video of the same frame
                   rate with the sound of INPUT; .png: a picture; otherwise a
                   folder of PNG files
  --overwrite      replace the file, or the PNG files, that --out names
  --frames=A:B     frames A to B - 1, counted from 0, without the sound
  --fps=25         frame rate of a video made of pictures
  --window=N       frames restored together; default: as in the validation of
                   the run, else 24
  --tile=SIDE      restore large frames in squares of SIDE pixels; default:
                   whole, or as large as the free memory allows
  --weights=ema    the moving average of --ema, the default where there is one;
                   raw: the weights as trained
  --device=auto    cuda if a GPU is free; cpu
  --json           print one JSON object

The output appears complete or not at all. The memory needed does not depend on
the length of the video.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from training import tasks
from training.cli import spare_gpu, weights_argument
from training.core import args, json_text, log
from training.core.errors import Exit, Problem, UserError
from training.core.find_run import path_of
from training.core.messages import msg
from training.core.metric_units import memory_word
from training.core.project import typed
from training.core.units import amount, plural
from training.data.frames import output, source
from training.data.frames.output import Target
from training.data.frames.pictures import Unreadable
from training.data.frames.source import Frame, Source
from training.host import process, program
from training.tasks.weights import Weights

if TYPE_CHECKING:
    from training.tasks.trained import FrameModel, Pieces

COMMAND = "./duet restore"
NEW = "restored.mp4"  # suggested output
FLAGS = {
    "out": args.TEXT,
    "overwrite": args.SWITCH,
    "frames": args.TEXT,
    "fps": args.number(0.01, 1000, 25),
    "window": args.whole(2, 10_000, 24),
    "tile": args.whole(32, 100_000, 512),
    "device": args.one_of(*weights_argument.DEVICES),
    "weights": weights_argument.KIND,
    "json": args.SWITCH,
    "help": args.SWITCH,
}


@dataclass
class RestoreOptions:
    """A checked command line."""

    weights: Weights
    source: Source
    target: Target
    window: int | None = None
    tile: int | None = None
    device: str = "auto"
    json: bool = False


def parse(argv: list[str]) -> RestoreOptions | None:
    """None for --help. Raises UserError with all problems at once."""
    line = args.parse(argv, FLAGS, COMMAND)
    values, problems = line.values, line.problems
    if "help" in values:
        return None
    *run, given = line.words or [""]  # the only word is the input
    before = shlex.quote(given) if given else "INPUT"
    found = weights_argument.one(run, line, problems, {"out": NEW}, before)
    if found:
        problems += tasks.spec_of(found.plan).restores(found)
    rest = line.flags(**({} if "out" in line.written else {"out": NEW}))
    if run or (given and os.path.exists(path_of(given))):
        named = shlex.join([*COMMAND.split(), *run])
        chosen = source.find(path_of(given), named, rest, problems)
    else:
        chosen = None
        path, allowed = path_of(given), msg("data.frames.source_wanted")
        what = msg("data.frames.missing", path=path) if given else msg("cli.restore.no_input")
        # A single word is either the run or a missing input.
        named = " ".join([COMMAND, shlex.quote(given)] if given else [COMMAND])
        problems.append(Problem("input.missing", what, allowed, [f"{named} INPUT {rest}"]))
    if chosen and values.get("frames"):
        chosen = source.chosen(chosen, values["frames"], problems)
    if chosen:
        problems += source.uneven(chosen)
    target = _target(line, chosen, problems)
    if problems:
        raise UserError(problems)
    assert found and chosen and target
    names = ("window", "tile", "device")
    return RestoreOptions(
        found, chosen, target, json="json" in values, **{n: values[n] for n in names if n in values}
    )


def _target(line: args.Args, chosen: Source | None, problems: list[Problem]) -> Target | None:
    values = line.values
    if "out" not in values:
        again = line.again(out=NEW)
        what = msg("cli.export.no_out")
        problems.append(
            Problem("flag.no_value", what, msg("data.frames.target_wanted"), [again], "out")
        )
    if not values.get("out"):
        return None
    path = path_of(values["out"]).absolute()
    return output.find(path, chosen, "overwrite" in values, values.get("fps"), problems)


def main(argv: list[str]) -> int:
    chosen = parse(argv)
    if chosen is None:
        print(typed((__doc__ or "").strip()))
        return int(Exit.DONE)
    program.require(("torch", "numpy", "tqdm"))
    from training.tasks import trained

    process.exit_on_stop()
    device = spare_gpu.choose(chosen.device)
    model = trained.load(tasks.spec_of(chosen.weights.plan), chosen.weights, device)
    assert isinstance(model, trained.FrameModel), "checked with the command line"
    given = chosen.source
    pieces = model.pieces(given.size, given.total, chosen.window, chosen.tile)
    if given.facts and given.facts.deep:
        log.warning(msg("cli.restore.deep", path=given.path, form=given.facts.pixel_format))
    begun = time.perf_counter()
    try:
        frames = _restore(model, chosen, pieces)
    except UserError as error:
        log.report(error, closing=msg("cli.restore.not_written", out=chosen.target.path))
        return int(error.code)
    _report(model, chosen, pieces, frames, time.perf_counter() - begun)
    return int(Exit.DONE)


def _restore(model: FrameModel, chosen: RestoreOptions, pieces: Pieces) -> int:
    """Number of frames written. Raises UserError."""
    given = chosen.source
    try:
        return _written(model, chosen, pieces)
    except Unreadable as error:
        raise UserError(Problem("input.unreadable", str(error))) from None
    except OSError as error:
        why = error.strerror or error
        what = msg("cli.report.unwritable", out=chosen.target.path, error=why)
        problem = Problem("output.unwritable", what, msg("data.frames.target_wanted"))
        raise UserError(problem, Exit.RESOURCES) from None
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
        smaller = (pieces.tile or max(given.size)) // 2
        word = memory_word(model.device.type == "cuda")
        size = _pixels(given.size)
        what = msg("cli.restore.memory", size=size, memory=word, device=model.device)
        fixes = [f"--tile={max(32, smaller)}", f"--window={max(2, pieces.window // 2)}"]
        raise UserError(Problem("restore.memory", what, "", fixes), Exit.RESOURCES) from None


def _written(model: FrameModel, chosen: RestoreOptions, pieces: Pieces) -> int:
    """Number of frames written. Raises Unreadable, OSError."""
    from tqdm import tqdm

    waiting: deque[Frame] = deque()  # read and not yet restored
    sound: deque[Any] = deque()
    width, height = chosen.source.size
    size = width * model.scale, height * model.scale
    with output.Writer(chosen.target, chosen.source, size) as writer:

        def taken() -> Iterator[Any]:
            for frame, pixels in chosen.source.frames(sound.append if writer.sound else None):
                waiting.append(frame)
                yield pixels

        bar = tqdm(
            total=chosen.source.total,
            disable=None,  # no bar unless standard error is a terminal
            file=sys.stderr,
            unit="frame",
            leave=False,
            dynamic_ncols=True,
        )
        with bar:
            for pixels in model.restore(taken(), pieces):
                while sound:
                    writer.packet(sound.popleft())
                writer.frame(waiting.popleft(), pixels)
                bar.update()
        while sound:
            writer.packet(sound.popleft())
        return writer.written


def _out_of_memory(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text


def _report(
    model: FrameModel, chosen: RestoreOptions, pieces: Pieces, frames: int, seconds: float
) -> None:
    width, height = (side * model.scale for side in chosen.source.size)
    speed = frames / max(seconds, 1e-9)
    if chosen.json:
        record = {
            "run": model.weights.name,
            "step": model.weights.step,
            "device": str(model.device),
            "input": str(chosen.source.path),
            "out": str(chosen.target.path),
            "frames": frames,
            "width": width,
            "height": height,
            "seconds": round(seconds, 3),
            "frames_per_s": round(speed, 3),
            **asdict(pieces),
        }
        print(json_text.answer(record))
        return
    print(
        msg(
            "cli.restore.done",
            out=chosen.target.path,
            frames=plural(frames, "frame"),
            size=_pixels((width, height)),
            speed=amount(speed),
        )
    )


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]}"


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, pipe=False))

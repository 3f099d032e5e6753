"""Generate moving scenes, sharp and with motion blur: training data for video restoration without
a download.

python examples/make_blur_video.py [FOLDER] [--clips=16] [--frames=20] [--size=128] [--seed=1]
[--layout=gopro|kair] [--spikes] [--force]

A camera collects light while its shutter is open. A blurred frame is therefore the mean, in linear
light, of sharp pictures at many moments; the sharp frame is the picture at the middle one. The same
seed gives the same files.
"""

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path

try:
    import numpy as np
    from PIL import Image
except ImportError as error:
    pip = shlex.join([sys.executable, "-m", "pip", "install", "numpy", "pillow"])
    print(f"make_blur_video: {error}; install both packages: {pip}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

GAMMA = 2.2  # light = pixel value ** GAMMA
SHUTTER = 0.9  # share of a frame's time during which the shutter is open
MOMENTS = 11  # sharp pictures in a blurred frame, less than a pixel apart at these speeds
CAMERA_SPEED, SHAPE_SPEED = 3.0, 5.0  # root mean square, pixels per frame
EDGE = 1.2  # width of an anti-aliased edge, pixels
PLANES = 32  # samples of the spike camera per frame
VALIDATION = 4  # one validation clip per this many training clips
MARK = ".made_by_make_blur_video"  # file in FOLDER; --force replaces only a folder that has it
# Kind of frames, as in --dataroot_KIND → folder of a clip's frames, for (part, clip).
LAYOUTS = {
    "gopro": {"gt": "%s/%s/sharp", "lq": "%s/%s/blur", "spike": "%s/%s/spike"},
    "kair": {"gt": "%s_GT/%s", "lq": "%s_GT_blurred/%s", "spike": "%s_spike/%s/spike"},
}
FOLDER, CONFIG = "data/blur_video", "configs/video/quickstart.py"  # trains on FOLDER by default
INSTALLED = Path(__file__).parents[1].name == "duet_home"


def noise(random, height, width, cells):
    """Smooth periodic noise with `cells` cells on each side, 0 … 1."""

    def stretched(grid, length):
        place = np.arange(length, dtype=np.float32) * cells / length
        row = place.astype(int)
        share = (place - row)[:, None]
        share = share * share * (3 - 2 * share)
        return grid[row] * (1 - share) + grid[(row + 1) % cells] * share

    grid = random.uniform(0, 1, (cells, cells)).astype(np.float32)
    return stretched(stretched(grid, height).T, width).T


def texture(random, height, width):
    """Soft colours under sharp patches and stripes: periodic light, (height, width, 3), 0 … 1."""
    side = min(height, width)
    picture = 0.45 + 0.2 * np.stack([noise(random, height, width, 4) for _ in range(3)], axis=-1)
    y, x = np.ogrid[:height, :width]
    for layer in range(9):
        cells = int(random.integers(3, 7)) * max(1, side // 48)
        field = noise(random, height, width, cells) - random.uniform(0.1, 0.9)
        cover = np.clip(0.5 + field * side / cells / EDGE, 0, 1)
        if layer % 3 == 2:
            down, right = random.integers(-8, 9, 2) * max(1, side // 64)
            stripes = np.sin(2 * np.pi * (down * y / height + right * x / width))
            cover = cover * np.clip(0.5 + 2.5 * stripes, 0, 1)
        picture += cover[..., None] * (random.uniform(0.02, 0.98, 3) - picture)
    return (np.clip(picture, 0, 1) ** GAMMA).astype(np.float32)


def shifted(canvas, place, length):
    """`length` rows of a periodic canvas from the fractional row `place`."""
    first = int(np.floor(place))
    rows = canvas[np.arange(first, first + length + 1) % len(canvas)]
    share = np.float32(place - first)
    return rows[:-1] * (1 - share) + rows[1:] * share


def sampled(canvas, y, x):
    """A periodic canvas at fractional positions: bilinear interpolation."""
    height, width = canvas.shape[:2]
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    down, right = (y - top)[..., None], (x - left)[..., None]
    rows, columns = (top % height, (top + 1) % height), (left % width, (left + 1) % width)
    upper, lower = (
        canvas[row, columns[0]] * (1 - right) + canvas[row, columns[1]] * right for row in rows
    )
    return upper * (1 - down) + lower * down


def motion(random, speed):
    """A steady motion plus two oscillations, so that the speed (root mean square, pixels per frame)
    varies: a function from time in frames to (down, right) in pixels."""
    angle = random.uniform(0, 2 * np.pi)
    steady = 0.5 * speed * np.array([np.sin(angle), np.cos(angle)])
    rates = random.uniform(0.25, 0.9, (2, 2))  # radians per frame
    phases = random.uniform(0, 2 * np.pi, (2, 2))
    swing = speed * np.sqrt(0.75) * random.dirichlet(np.ones(4)).reshape(2, 2) ** 0.5
    reach = np.sqrt(2) * swing / rates
    return lambda time: steady * time + (reach * np.sin(rates * time + phases)).sum(axis=0)


def moving_shape(random, height, width):
    """A textured disc, box or star that moves and rotates: a function that paints it at a time."""
    radius = random.uniform(0.1, 0.2) * min(height, width)
    kind = int(random.integers(3))
    canvas = texture(random, int(2 * radius) + 2, int(2 * radius) + 2)
    path = motion(random, SHAPE_SPEED)
    start = random.uniform(0, 1, 2) * (height, width)
    angle, rotation = random.uniform(0, 2 * np.pi), random.normal(0, 0.06)
    reach = radius * 1.5 + 2

    def paint(picture, time):
        centre = (start + path(time) + reach) % (np.array([height, width]) + 2 * reach) - reach
        top, left = np.maximum(0, (centre - reach).astype(int))
        box = picture[top : max(0, int(centre[0] + reach) + 1)]
        box = box[:, left : max(0, int(centre[1] + reach) + 1)]
        y, x = np.ogrid[: box.shape[0], : box.shape[1]]
        y, x = (y + (top - centre[0])).astype("f4"), (x + (left - centre[1])).astype("f4")
        sine, cosine = np.sin(angle + rotation * time), np.cos(angle + rotation * time)
        y, x = cosine * y - sine * x, sine * y + cosine * x
        if kind == 1:
            inside = 0.85 * radius - np.maximum(np.abs(y), np.abs(x))
        else:
            star = 1 + 0.25 * np.cos(5 * np.arctan2(y, x)) if kind == 2 else 1
            inside = radius * star - np.hypot(y, x)
        cover = np.clip(0.5 + inside / EDGE, 0, 1)[..., None]
        box += cover * (sampled(canvas, y + radius, x + radius) - box)

    return paint


def scene(random, height, width):
    """A moving background and 3 to 5 shapes: a function from time to light, (height, width, 3)."""
    background = texture(random, height + height // 2, width + width // 2)
    camera = motion(random, CAMERA_SPEED)
    shapes = [moving_shape(random, height, width) for _ in range(random.integers(3, 6))]

    def light(time):
        down, right = camera(time)
        rows = shifted(background, down, height).swapaxes(0, 1)
        picture = shifted(rows, right, width).swapaxes(0, 1)
        for paint in shapes:
            paint(picture, time)
        return picture

    return light


def exposure(light, frame):
    """Light at the moments while a frame's shutter is open, (MOMENTS, height, width, 3)."""
    return np.stack([light(frame + SHUTTER * s) for s in np.linspace(-0.5, 0.5, MOMENTS)])


def spikes(charge, lights):
    """Samples of pixels that accumulate light in `charge`, fire at 1 and keep the remainder."""
    grey = lights.mean(axis=-1)
    planes = np.empty((PLANES, *charge.shape), bool)
    for number, fired in enumerate(planes):
        charge += grey[number * MOMENTS // PLANES]
        np.greater_equal(charge, 1, out=fired)
        charge -= fired
    return planes


def save(light, file):
    pixels = np.rint(np.clip(light, 0, 1) ** (1 / GAMMA) * 255).astype(np.uint8)
    Image.fromarray(pixels).save(file, compress_level=1)  # three times as fast, 10 % larger


def make_clip(args, top, part, number):
    width, height = args.size
    random = np.random.default_rng([args.seed, ("train", "test").index(part), number])
    light = scene(random, height, width)
    charge = random.uniform(0, 1, (height, width)).astype(np.float32)
    clip = f"clip_{number:03d}"
    to = {kind: top / (place % (part, clip)) for kind, place in args.kinds.items()}
    for folder in to.values():
        folder.mkdir(parents=True)
    for frame in range(args.frames):
        lights = exposure(light, frame)
        save(lights.mean(axis=0), to["lq"] / f"{frame:06d}.png")
        save(lights[MOMENTS // 2], to["gt"] / f"{frame:06d}.png")
        if args.spikes:  # raw: planes are upside down, the first pixel is the lowest bit
            planes = spikes(charge, lights)[:, ::-1]
            np.packbits(planes, bitorder="little").tofile(to["spike"] / f"{frame:06d}.dat")


def make(args):
    """Render beside FOLDER, then rename: FOLDER is complete or unchanged. Raises OSError."""
    folder, (width, height) = args.folder, args.size
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
        new = Path(beside, "new")
        counts = {"train": args.clips, "test": max(1, args.clips // VALIDATION)}
        clips = [(part, number) for part, count in counts.items() for number in range(count)]
        for done, (part, number) in enumerate(clips, 1):
            make_clip(args, new, part, number)
            if sys.stderr.isatty():
                end = "\n" if done == len(clips) else ""
                print(f"\rclip {done} of {len(clips)}", end=end, file=sys.stderr, flush=True)
        if args.layout == "kair":
            line = f"{args.frames} ({height},{width},3) 0\n"
            listed = "".join(f"clip_{number:03d} {line}" for number in range(args.clips))
            (new / "meta_info_train_GT.txt").write_text(listed)
        (new / MARK).write_text("\n".join(sorted(os.listdir(new))))
        if folder.exists():
            folder.rename(Path(beside, "old"))  # deleted with `beside`
        new.rename(folder)
    return counts


def training_command(args):
    command = ["duet", "launch"] if INSTALLED else ["./launch_train.sh"]
    command += ["2", CONFIG]
    if (args.folder, args.layout, args.spikes) != (Path(FOLDER).resolve(), "gopro", False):
        for part, prefix in (("train", ""), ("test", "test_")):
            for kind, place in args.kinds.items():
                root = args.folder / place.partition("/")[0].replace("%s", part)
                command.append(f"--{prefix}dataroot_{kind}={root}")
    if args.spikes:
        width, height = args.size
        command += [f"--spike_w={width}", f"--spike_h={height}", "--spike_channels=4"]
    return shlex.join(command)


def whole(low, high, step=1):
    def read(text):
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
        if number % step or not low <= number <= high:
            kind = f"a multiple of {step}" if step > 1 else "a whole number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind} from {low} to {high}")
        return number

    return read


def size(text):
    width, times, height = text.partition("x")
    return tuple(whole(32, 2048, step=8)(side) for side in (width, height if times else width))


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, without the usage."""
        self.exit(2, f"make_blur_video: {message}\n")


def arguments(argv):
    plain = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        usage=argparse.SUPPRESS, description=__doc__, formatter_class=plain, allow_abbrev=False
    )
    add = parser.add_argument
    add("folder", nargs="?", default=FOLDER, help=f"new or empty; {FOLDER} by default")
    add(
        "--clips",
        type=whole(1, 1000),
        default=16,
        help="for training; a quarter as many for validation",
    )
    add("--frames", type=whole(2, 1000), default=20, help="per clip")
    add("--size", type=size, default="128", help="pixels: side of a frame, or WIDTHxHEIGHT")
    add("--seed", type=whole(0, 2**63 - 1), default=1, help="the same seed gives the same files")
    add("--layout", choices=LAYOUTS, default="gopro", help="of the folders in FOLDER")
    add("--spikes", action="store_true", help="also write a spike camera's raw .dat per frame")
    add("--force", action="store_true", help="replace a FOLDER that this program made")
    args = parser.parse_args(argv)
    args.folder = Path(os.path.realpath(args.folder))
    if args.folder.exists() and not args.folder.is_dir():
        parser.error(f"{args.folder} is not a folder; give a new or empty one")
    kinds = LAYOUTS[args.layout].items()
    args.kinds = {kind: place for kind, place in kinds if args.spikes or kind != "spike"}
    there = set(os.listdir(args.folder)) if args.folder.exists() else set()
    made = {MARK, *(args.folder / MARK).read_text().split()} if MARK in there else set()
    if there - made:
        other = min(there - made)
        parser.error(f"{args.folder} has {other!r}, not made here; give a new or empty folder")
    if there and not args.force:
        parser.error(f"{args.folder} is not empty; --force replaces it")
    return args


def main(argv=None):
    try:
        args = arguments(argv)
        counts = make(args)
    except OSError as error:
        print(f"make_blur_video: nothing was made: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{counts['train']} clips for training, {counts['test']} for validation: {args.folder}")
    print(f"next: {training_command(args)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

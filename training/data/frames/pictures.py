"""Pictures on disk: names of frames in order, and their pixels. Importing this loads neither numpy
nor Pillow."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from training.core.messages import msg
from training.data.frames import lmdb_folder

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image, ImageFile

    Planes = npt.NDArray[Any]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA"}  # Pillow's with 8 bits per colour

DEEP = ("I", "F")  # with 16 or 32 bits
# Of colours with 16 bits, which Pillow reads with 8. The 16 bits of BMP's BGR;16 are of a pixel.
DEEP_COLOURS = re.compile(r"\w+;16[A-Z]")
ORIENTATION, ASIDE = 0x0112, (5, 6, 7, 8)  # of Exif

T = TypeVar("T")


class Unreadable(RuntimeError):
    """A frame that cannot be read or has the wrong size. One text argument, so that it can be
    passed unchanged from a loader worker."""

    of_code = False  # the line that raised it explains nothing


def in_folder(folder: str | Path, suffixes: tuple[str, ...] = SUFFIXES) -> dict[str, str]:
    """The frames of a folder in order: name without suffix → file. Raises OSError, and Unreadable
    for two files of one name, such as a picture and its preview."""
    found: dict[str, str] = {}
    for stem, file in _in_folder(folder, suffixes):
        if stem in found:
            first, second = sorted(map(os.path.basename, (found[stem], file)))
            what = msg("data.frames.one_name", folder=folder, first=first, second=second)
            raise Unreadable(what)
        found[stem] = file
    return {stem: found[stem] for stem in in_order(found)}


def any_in_folder(folder: str | Path, suffixes: tuple[str, ...] = SUFFIXES) -> bool:
    """Raises OSError."""
    return any(_in_folder(folder, suffixes))


def _in_folder(folder: str | Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(name without suffix, file)."""
    with os.scandir(folder) as entries:
        for entry in entries:
            stem, _, suffix = entry.name.rpartition(".")
            named = stem and stem[0] != "." and f".{suffix.lower()}" in suffixes
            if named and not _is_folder(entry):
                yield stem, f"{folder}/{entry.name}"


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """False also for a link that cannot be followed."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def in_order(stems: Iterable[str]) -> list[str]:
    """Sort by name; by number if names are numbers of different lengths."""
    plain = sorted(stems)
    return plain if len({len(stem) for stem in plain}) == 1 else sorted(plain, key=natural)


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key: numbers in a name by their value."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def stream(file: str) -> str | BytesIO:
    """What Pillow reads for a file or an address in an LMDB database. Raises Unreadable."""
    return BytesIO(_packed(lmdb_folder.picture, file)) if lmdb_folder.MARK in file else file


def length(file: str) -> int:
    """Bytes of a file or of a picture in a database. Raises OSError, Unreadable."""
    if lmdb_folder.MARK in file:
        return _packed(lmdb_folder.length, file)
    return Path(file).stat().st_size


def _packed(read: Callable[[str], T | None], address: str) -> T:
    """Raises Unreadable."""
    try:
        found = read(address)
    except OSError as error:
        raise Unreadable(msg("data.frames.unreadable", file=address, error=error)) from None
    if found is None:
        raise Unreadable(msg("data.frames.no_key", file=address))
    return found


@contextmanager
def opened(file: str) -> Iterator[Image.Image]:
    """The picture of a file. Raises Unreadable, also for what Pillow raises while it is used."""
    from PIL import Image

    try:
        with Image.open(stream(file)) as picture:
            if mode := deep_mode(picture):  # Pillow would cut the values
                raise Unreadable(msg("data.frames.pixel_mode", file=file, mode=mode))
            yield picture
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise Unreadable(msg("data.frames.unreadable", file=file, error=error)) from None


def deep_mode(picture: ImageFile.ImageFile) -> str:
    """Pillow's name of more than 8 bits per colour; "" for others. `picture`: not yet loaded."""
    if picture.mode.startswith(DEEP):
        return picture.mode
    # The arguments of the decoder: a text, or a tuple that begins with it. They have no name before
    # Pillow 11.
    found = DEEP_COLOURS.search(str(picture.tile[0][3])) if picture.tile else None
    return found[0] if found else ""


def pixels(
    file: str,
    box: tuple[int, ...] | None = None,
    *,
    size: tuple[int, int] | None = None,
    upright: bool = False,
) -> Planes:
    """(h, w, 3) uint8. Cropped first, since conversion time depends on the pixels left. `size`:
    (width, height) that the whole picture must have. `upright`: with the rotation that a camera has
    stored. Raises Unreadable."""
    import numpy as np
    from PIL import ImageOps

    with opened(file) as picture:
        if size is not None and picture.size != size:
            found, wanted = (f"{width} × {height}" for width, height in (picture.size, size))
            what = msg("data.frames.not_as_first", file=file, found=found, wanted=wanted)
            raise Unreadable(what)
        part = picture if box is None else picture.crop(box)  # type: ignore[arg-type]
        if upright and "exif" in picture.info:
            part = ImageOps.exif_transpose(part)
        return np.asarray(part if part.mode == "RGB" else part.convert("RGB"))


def size(file: str, *, upright: bool = False) -> tuple[int, int]:
    """(width, height), from the header. `upright`: as of pixels(). Raises Unreadable."""
    with opened(file) as picture:
        width, height = picture.size
        # Pillow turns TIFF files itself
        turned = upright and "exif" in picture.info and picture.getexif().get(ORIENTATION) in ASIDE
        return (height, width) if turned else (width, height)

"""Video files by PyAV: facts, decoded frames, and a file being encoded. Importing this loads
neither PyAV nor numpy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.core import log
from training.core.messages import msg
from training.data.frames.pictures import Unreadable

if TYPE_CHECKING:
    from training.data.frames.pictures import Planes

RATE = Fraction(25)  # of a video that states none, and of pictures
UNSPECIFIED, BT709 = 2, 1  # colour matrices of ITU-T H.273
LIMITED = 1  # range of colours: 16 … 235
SCALERS = {1: 1, 4: 4, 5: 5, 6: 5, 7: 7, 9: 9}  # such a matrix → the constant of FFmpeg's scaler
# Quality that a viewer does not distinguish from the frames: about 10 Mbit/s at 1080p.
X264 = {"crf": "14", "preset": "medium"}
VP9 = {"crf": "18", "b": "0", "row-mt": "1"}
CODECS = {
    ".mp4": ("libx264", X264),
    ".mov": ("libx264", X264),
    ".m4v": ("libx264", X264),
    ".mkv": ("libx264", X264),
    ".webm": ("libvpx-vp9", VP9),
}
CHANNELS = {"1 channels": "mono", "2 channels": "stereo", "6 channels": "5.1"}
# FFmpeg's scaler: bicubic, full chroma interpolation both ways, accurate rounding. A third of the
# error of its defaults.
ACCURATE = 4 | 0x2000 | 0x4000 | 0x40000
MATROSKA = "matroska"  # part of the name of the format of .mkv and .webm
SHORTER_S = Fraction(1, 2)
SUBSAMPLED = ("yuv420p", "yuv422p", "yuv444p")


@dataclass(frozen=True)
class Facts:
    """`size`: width, height as displayed, with the rotation of a phone; `count`: None if the file
    does not state it; `pixel_format`: FFmpeg's name; `matrix`, `primaries`, `transfer`: of its
    colours, in the numbers of ITU-T H.273; `aspect`: of a pixel; `audio`: whether there is
    sound."""

    size: tuple[int, int]
    count: int | None
    rate: Fraction
    pixel_format: str
    matrix: int
    primaries: int
    transfer: int
    aspect: Fraction | None
    audio: bool
    deep: bool  # more than 8 bits per colour


def facts(path: Path) -> Facts:
    """Facts of the first video stream and its first frame. Raises Unreadable."""
    import av

    try:
        with _opened(path) as container:
            stream: Any = container.streams.best("video")
            frame: Any = next(container.decode(stream), None) if stream else None
            if frame is None or container.format.name == "tty":  # any text: animated characters
                raise Unreadable(msg("data.frames.no_video", path=path))
            rate = stream.average_rate or stream.guessed_rate or RATE
            count = stream.frames or None
            if count is None and container.duration:
                count = max(1, round(container.duration / av.time_base * rate))
            turned, aspect = frame.rotation % 180 != 0, stream.sample_aspect_ratio
            size = (frame.height, frame.width) if turned else (frame.width, frame.height)
            return Facts(
                size,
                count,
                Fraction(rate),
                frame.format.name,
                frame.colorspace,
                frame.color_primaries,
                frame.color_trc,
                1 / aspect if turned and aspect else aspect,
                bool(container.streams.audio),
                max(part.bits for part in frame.format.components) > 8,
            )
    except (av.FFmpegError, ValueError, OSError) as error:
        raise Unreadable(_not_a_video(path, error)) from None


def _opened(path: Path) -> Any:
    """The container. Raises av.FFmpegError."""
    import av

    return av.open(str(path.absolute()))  # FFmpeg reads 12:30.mp4 as an address with a protocol


def _not_a_video(path: Path, error: Exception) -> str:
    return msg("data.frames.unreadable", file=path, error=getattr(error, "strerror", "") or error)


def decoded(
    path: Path, audio: Callable[[Any], None] | None = None
) -> Iterator[tuple[Planes, Fraction]]:
    """(uint8 (h, w, 3), time in s) of each frame. `audio`: called with each packet of the first
    audio stream. Times begin with 0, whatever the file's. Raises Unreadable, which names the
    frame."""
    import av
    import numpy as np

    number, time, stated = 0, Fraction(0), 0
    length = last = Fraction(0)  # seconds: stated, and read of all streams
    try:
        with _opened(path) as container:
            begin = Fraction(container.start_time or 0, av.time_base)
            stream: Any = container.streams.best("video")
            stream.codec_context.options = {"err_detect": "explode"}
            stated, rate = stream.frames, stream.average_rate or RATE
            sound: Any = container.streams.audio[0] if audio else None
            if MATROSKA in container.format.name:  # states no number of frames
                length = Fraction(container.duration or 0, av.time_base)
            wanted = container.streams if length else filter(None, [stream, sound])
            for packet in container.demux(*wanted):
                if length and packet.pts is not None:
                    last = max(last, (packet.pts + (packet.duration or 0)) * packet.time_base)
                if packet.stream is not stream:
                    if audio and packet.stream is sound and packet.dts is not None:  # not the end
                        late = round(begin / packet.stream.time_base)
                        packet.dts -= late
                        packet.pts = packet.dts if packet.pts is None else packet.pts - late
                        audio(packet)
                    continue
                for frame in packet.decode():
                    if frame.is_corrupt:
                        raise ValueError(msg("data.frames.corrupt"))
                    stamp = frame.pts
                    known = stamp is not None and frame.time_base is not None
                    time = stamp * frame.time_base - begin if known else number / rate
                    # "rgb24" by the matrix that the frame states
                    pixels = frame.to_ndarray(format="rgb24", interpolation=ACCURATE)
                    if frame.rotation:
                        pixels = np.rot90(pixels, frame.rotation // 90)
                    yield np.ascontiguousarray(pixels), time
                    number += 1
    except (av.FFmpegError, ValueError, OSError) as error:
        why = getattr(error, "strerror", "") or error
        what = msg("data.frames.damaged", path=path, number=number, time=float(time), error=why)
        raise Unreadable(what) from None
    if number < stated:
        log.warning(msg("data.frames.fewer", path=path, stated=stated, number=number))
    elif last < length - max(SHORTER_S, 2 / rate):
        log.warning(msg("data.frames.shorter", path=path, stated=float(length), read=float(last)))


class Encoder:
    """A video file that is being written. `path`: its suffix is one of CODECS; `like`: the input,
    whose colours, pixel format and sound are kept."""

    def __init__(
        self,
        path: Path,
        suffix: str,
        size: tuple[int, int],
        rate: Fraction,
        like: Facts | None,
        sound: Path | None,
    ) -> None:
        import av

        self.path, self.suffix, self.size, self.rate = path, suffix, size, rate
        # pictures, and RGB in a video, have none
        self.matrix = like.matrix if like and like.matrix else BT709
        self.written, self.last = 0, -1
        try:
            self._open(like, sound)
        except (av.FFmpegError, ValueError):
            if not sound:
                raise
            with _opened(sound) as other:
                codec = other.streams.audio[0].codec_context.name
            log.warning(msg("data.frames.no_sound", suffix=suffix, codec=codec))
            self._open(like, None)

    def _open(self, like: Facts | None, sound: Path | None) -> None:
        """Write the header. Raises av.FFmpegError, ValueError."""
        import av

        codec, options = CODECS[self.suffix]
        form = {".m4v": "mp4", ".mkv": "matroska"}.get(self.suffix, self.suffix[1:])
        self.container = av.open(str(self.path), "w", format=form)
        self.stream: Any = self.container.add_stream(codec, rate=self.rate, options=dict(options))
        context: Any = self.stream.codec_context
        context.width, context.height = self.size
        context.pix_fmt = pixel_format(self.size, like)
        # finer than the rate, for videos of varying frame rate
        self.base = Fraction(1, 90000)
        context.time_base = self.base
        context.colorspace = self.matrix if self.matrix in SCALERS else UNSPECIFIED
        context.color_range = LIMITED
        context.color_primaries = like.primaries if like else BT709
        context.color_trc = like.transfer if like else BT709
        if like and like.aspect and like.aspect != 1:
            context.sample_aspect_ratio = like.aspect
        self.audio: Any = None
        if sound:
            with _opened(sound) as other:
                self.audio = self.container.add_stream_from_template(other.streams.audio[0])
            context = self.audio.codec_context
            # .mkv may state only their number, "2 channels"; with it .mp4 fails when it is closed
            if context.layout.name in CHANNELS:
                context.layout = CHANNELS[context.layout.name]
        self.container.start_encoding()

    def frame(self, pixels: Planes, time: Fraction | None) -> None:
        """Add a frame, uint8 (h, w, 3). `time`: in s; None: by the frame rate."""
        import av

        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame = frame.reformat(
            format=self.stream.codec_context.pix_fmt,
            dst_colorspace=SCALERS.get(self.matrix),
            dst_color_range=LIMITED,
            interpolation=ACCURATE,
        )
        if time is None:
            time = self.written / self.rate
        # strictly increasing, as every container demands
        self.last = max(self.last + 1, round(time / self.base))
        frame.pts, frame.time_base = self.last, self.base
        self.written += 1
        with self._errors():
            self.container.mux(self.stream.encode(frame))

    def sound(self, packet: Any) -> None:
        """Copy a packet of the sound."""
        if self.audio is not None:
            packet.stream = self.audio
            with self._errors():
                self.container.mux(packet)

    def finish(self) -> None:
        with self._errors():
            self.container.mux(self.stream.encode(None))
            self.container.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises OSError, whatever FFmpeg reports."""
        import av

        try:
            yield
        except av.FFmpegError as error:
            raise OSError(error.errno, error.strerror) from None

    def abandon(self) -> None:
        """Close the incomplete file."""
        import av

        with suppress(av.FFmpegError, OSError):  # the first error is the one to report
            self.container.close()


def pixel_format(size: tuple[int, int], like: Facts | None) -> str:
    """As subsampled as the input's; colours of odd sizes are not subsampled."""
    plain = re.sub("^yuv[aj]", "yuv", like.pixel_format if like else "yuv420p")
    found = next((one for one in SUBSAMPLED if plain.startswith(one)), "yuv420p")
    odd = (size[0] % 2 and found != "yuv444p") or (size[1] % 2 and found == "yuv420p")
    return "yuv444p" if odd else found

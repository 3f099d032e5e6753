"""Video files by PyAV: facts, decoded frames, and a file being encoded. Importing this loads
neither PyAV nor numpy."""

from __future__ import annotations

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
# FFmpeg's scaler: bicubic, full chroma interpolation both ways, accurate rounding. A third of the
# error of its defaults.
ACCURATE = 4 | 0x2000 | 0x4000 | 0x40000
SUBSAMPLED = ("yuv420p", "yuv422p", "yuv444p")


@dataclass(frozen=True)
class Facts:
    """`size`: width, height as displayed, with the rotation of a phone; `count`: None if the file
    does not state it; `pixel_format`: FFmpeg's name; `matrix`: of its colours;
    `aspect`: of a pixel; `audio`: whether there is sound."""

    size: tuple[int, int]
    count: int | None
    rate: Fraction
    pixel_format: str
    matrix: int
    aspect: Fraction | None
    audio: bool
    deep: bool  # more than 8 bits per colour


def facts(path: Path) -> Facts:
    """Facts of the first video stream and its first frame. Raises Unreadable."""
    import av

    try:
        with av.open(str(path)) as container:
            stream: Any = container.streams.best("video")
            frame: Any = next(container.decode(stream), None) if stream else None
            if frame is None:
                raise Unreadable(msg("data.frames.no_video", path=path))
            rate = stream.average_rate or stream.guessed_rate or RATE
            count = stream.frames or None
            if count is None and container.duration:
                count = max(1, round(container.duration / av.time_base * rate))
            turned = frame.rotation % 180 != 0
            size = (frame.height, frame.width) if turned else (frame.width, frame.height)
            return Facts(
                size,
                count,
                Fraction(rate),
                frame.format.name,
                frame.colorspace,
                stream.sample_aspect_ratio if not turned else None,
                bool(container.streams.audio),
                max(part.bits for part in frame.format.components) > 8,
            )
    except (av.FFmpegError, ValueError, OSError) as error:
        raise Unreadable(_not_a_video(path, error)) from None


def _not_a_video(path: Path, error: Exception) -> str:
    return msg("data.frames.unreadable", file=path, error=getattr(error, "strerror", "") or error)


def decoded(
    path: Path, audio: Callable[[Any], None] | None = None
) -> Iterator[tuple[Planes, Fraction]]:
    """(uint8 (h, w, 3), time in s) of each frame. `audio`: called with each packet of the first
    audio stream. Raises Unreadable, which names the frame."""
    import av
    import numpy as np

    number, time, stated = 0, Fraction(0), 0
    try:
        with av.open(str(path)) as container:
            stream: Any = container.streams.best("video")
            stream.codec_context.options = {"err_detect": "explode"}
            stated, rate = stream.frames, stream.average_rate or RATE
            wanted = [stream, *(container.streams.audio[:1] if audio else [])]
            for packet in container.demux(wanted):
                if audio and packet.stream is not stream:
                    audio(packet)
                    continue
                for frame in packet.decode():
                    if frame.is_corrupt:
                        raise ValueError(msg("data.frames.corrupt"))
                    stamp = frame.pts
                    known = stamp is not None and frame.time_base is not None
                    time = Fraction(stamp) * frame.time_base if known else Fraction(number) / rate
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

        codec, options = CODECS[suffix]
        self.rate, self.size = rate, size
        form = {".m4v": "mp4", ".mkv": "matroska"}.get(suffix, suffix[1:])
        self.container = av.open(str(path), "w", format=form)
        self.stream: Any = self.container.add_stream(codec, rate=rate, options=dict(options))
        context: Any = self.stream.codec_context
        context.width, context.height = size
        context.pix_fmt = pixel_format(size, like)
        # finer than the rate, for videos of varying frame rate
        self.base = Fraction(1, 90000)
        context.time_base = self.base
        # pictures, and RGB in a video, have none
        self.matrix = like.matrix if like and like.matrix else BT709
        context.colorspace = self.matrix if self.matrix in SCALERS else UNSPECIFIED
        context.color_range = LIMITED
        if like is None:
            context.color_primaries = context.color_trc = BT709
        if like and like.aspect and like.aspect != 1:
            context.sample_aspect_ratio = like.aspect
        self.audio: Any = None
        if sound:
            with av.open(str(sound)) as other:
                try:
                    self.audio = self.container.add_stream_from_template(other.streams.audio[0])
                except (av.FFmpegError, ValueError) as error:
                    log.warning(msg("data.frames.no_sound", suffix=suffix, error=error))
        self.written, self.last = 0, -1

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
        if self.audio is not None and packet.dts is not None:
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
    plain = (like.pixel_format if like else "yuv420p").replace("yuvj", "yuv")
    found = next((one for one in SUBSAMPLED if plain.startswith(one)), "yuv420p")
    odd = (size[0] % 2 and found != "yuv444p") or (size[1] % 2 and found == "yuv420p")
    return "yuv444p" if odd else found

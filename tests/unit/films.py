"""Small videos and folders of pictures, and a run whose network changes them."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image

from tests.unit.trained_runs import checkpoint, gpt, made
from training.core import rundir
from training.data.frames import pyav
from training.tasks.video_restoration.network import Recurrent
from training.tasks.video_restoration.options import VideoOptions

RATE = Fraction(30000, 1001)
WIDTH, HEIGHT = 64, 48


def moving(number: int, width: int = WIDTH, height: int = HEIGHT) -> Any:
    """A smooth picture that moves; its colours survive a video codec."""
    y, x = np.mgrid[0:height, 0:width]
    wave = 40 * np.sin((x + 2 * number) / 9) + 30 * np.cos(y / 7)
    return np.stack([110 + wave, 120 + wave / 2, 90 + y], -1).astype(np.uint8)


def film(file: Path, frames: int = 12, *, sound: str = "", begin: int = 0, **facts: Any) -> Path:
    """`sound`: its codec; `begin`: of its time stamps, s; `facts`: size, and attributes of the codec's context."""
    width, height = facts.pop("size", (WIDTH, HEIGHT))
    with av.open(str(file.absolute()), "w") as container:
        stream: Any = container.add_stream("libx264", rate=RATE, options={"crf": "4"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for name, value in facts.items():
            setattr(stream.codec_context, name, value)
        voice: Any = container.add_stream(sound, rate=44100) if sound else None
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(moving(number, width, height), format="rgb24")
            frame.pts, frame.time_base = round(begin * RATE) + number, 1 / RATE
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if voice:
            tone = np.zeros((1, 44100 * frames // 30), np.int16)
            noise = av.AudioFrame.from_ndarray(tone, format="s16", layout="mono")
            noise.sample_rate, noise.pts = 44100, 44100 * begin
            container.mux(voice.encode(noise))
            container.mux(voice.encode(None))
    return file


def pictures(folder: Path, frames: int, width: int = WIDTH, height: int = HEIGHT) -> Path:
    folder.mkdir()
    for number in range(frames):
        Image.fromarray(moving(number, width, height)).save(folder / f"im{number}.png")
    return folder


def content(file: Path) -> Any:
    with av.open(str(file)) as container:
        return np.stack(
            [
                f.to_ndarray(format="rgb24", interpolation=pyav.ACCURATE)
                for f in container.decode(video=0)
            ]
        )


def apart(a: Any, b: Any) -> float:
    """Mean difference, in values of 8 bits."""
    return float(np.abs(a.astype(float) - b).mean())


def network(scale: int = 1, blocks: int = 1) -> Recurrent:
    """With weights that change the picture."""
    torch.manual_seed(3)
    model = Recurrent(3, 4, blocks, scale)
    torch.nn.init.normal_(model.out.weight, std=0.02)
    return model.eval()


def trained(folder: Path, **changed: Any) -> rundir.RunDir:
    run = made(folder, gpt(1))
    plan = json.loads(run.plan.read_text())
    options = vars(VideoOptions(**{"embed_dim": 4, "num_blocks": 1} | changed))
    plan["task"] = {
        "name": "video_restoration",
        "unit": "samples",
        "file": None,
        "options": options,
    }
    rundir.write_json(run.plan, plan)
    checkpoint(run, network(int(options["scale"])).state_dict(), {}, 9)
    return run

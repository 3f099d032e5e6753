"""Pictures of the README: commands run in a pseudo-terminal, whose screen is drawn as SVG.

    LD_LIBRARY_PATH=DIR FAKE_NVML_…=… python docs/picture.py --until='step 2' \\
        docs/monitor.svg 110 36 ./monitor_training.sh
    python docs/picture.py docs/hang.svg 150 62 \\
        ./train_dual_gpu_enhanced.sh configs/dual_gpu/quickstart.py --num_workers=1 \\
        --hang_timeout=5 --save_every=20 --num_iterations=60 --eval_every=0 \\
        --sample_tokens=0 --inject=worker_stuck@rank=0,call=34

Requires the test tools (pexpect, pyte). Only the last ROWS lines of the output are drawn.
--until=TEXT stops a program that does not end by itself as soon as its screen contains TEXT. The
monitor's GPUs are those of tests/fake_nvml, with the pids of the run's ranks.
"""

from __future__ import annotations

import contextlib
import re
import sys
from html import escape
from pathlib import Path

import pexpect
import pyte

COLOURS = {
    "default": "#d6d9de",
    "blue": "#6cb2ff",
    "green": "#7ddc8a",
    "brown": "#f0c674",
    "yellow": "#f0c674",
    "red": "#ff7b72",
}
COLOURS |= {"cyan": "#76d7e0", "magenta": "#d2a8ff", "white": "#ffffff", "black": "#7a828e"}
CELL_W, CELL_H, PAD = 7.8, 17, 14
QUIET_S = 0.3


def capture(columns: int, rows: int, argv: list[str], until: str = "") -> pyte.Screen:
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {' '.join(argv)}\r\n".encode())
    child = pexpect.spawn(argv[0], argv[1:], dimensions=(rows, columns), timeout=600)
    while not until or not all(
        any(part in line for line in screen.display) for part in until.split("|")
    ):
        try:
            stream.feed(child.read_nonblocking(65536, timeout=600))
        except pexpect.EOF:
            return screen
    with contextlib.suppress(pexpect.TIMEOUT, pexpect.EOF):  # the rest of this frame
        while True:
            stream.feed(child.read_nonblocking(65536, timeout=QUIET_S))
    child.close(force=True)
    return screen


def svg(screen: pyte.Screen) -> str:
    used = max((y for y in range(screen.lines) if screen.display[y].strip()), default=0) + 1
    width, height = screen.columns * CELL_W + 2 * PAD, used * CELL_H + 2 * PAD
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">'
    ]
    out.append(f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#14181f"/>')
    out.append('<g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="13">')
    for y in range(used):
        start = 0
        while start < screen.columns:
            first, end = screen.buffer[y][start], start
            while end < screen.columns and (
                screen.buffer[y][end].fg,
                screen.buffer[y][end].bold,
            ) == (first.fg, first.bold):
                end += 1
            text = "".join(screen.buffer[y][x].data for x in range(start, end))
            weight = ' font-weight="bold"' if first.bold else ""
            fill = COLOURS.get(
                first.fg, f"#{first.fg}" if len(first.fg) == 6 else COLOURS["default"]
            )
            # Renderers collapse blanks: each piece without two of them has its own place.
            for piece in re.finditer(r"\S+(?: \S+)*", text):
                place = (
                    f'x="{PAD + (start + piece.start()) * CELL_W:.1f}" '
                    f'y="{PAD + (y + 0.78) * CELL_H:.1f}" '
                    f'textLength="{len(piece[0]) * CELL_W:.1f}"'
                )
                out.append(f'<text {place} fill="{fill}"{weight}>{escape(piece[0])}</text>')
            start = end
    return "\n".join([*out, "</g>", "</svg>", ""])


if __name__ == "__main__":
    until = sys.argv.pop(1).removeprefix("--until=") if sys.argv[1].startswith("--until=") else ""
    target, columns, rows, *argv = sys.argv[1:]
    Path(target).write_text(svg(capture(int(columns), int(rows), argv, until)), encoding="utf-8")

"""`python -m training.tasks.make_blur_video [FOLDER] [--clips=16] [--frames=20] [--size=128]
[--seed=1] [--layout=gopro] [--spikes] [--force]`: generate moving scenes, sharp and with motion
blur, as training data for video restoration without a download.

FOLDER: default data/blur_video. --clips: for training; a quarter as many are added for validation.
--frames: per clip. --size: side of a frame, or WIDTHxHEIGHT, in pixels. --layout: gopro
(train/CLIP/blur and sharp), or kair (train_GT/CLIP and train_GT_blurred/CLIP).
--spikes: write a spike camera's raw .dat beside each frame. --force: replace an existing folder.
The same seed gives the same pictures.
"""

from __future__ import annotations

import sys

from training.core.errors import Exit, Problem, UserError
from training.host import program


def main(argv: list[str]) -> int:
    try:
        return _main(argv)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)


def _main(argv: list[str]) -> int:
    # Imported here, so that Ctrl-C during the imports does not print a traceback.
    from training.core import log
    from training.tasks.video_restoration import making

    try:
        chosen = making.parse(argv)
        if chosen.help:
            print(__doc__)
            return int(Exit.DONE)
        making.need_packages(argv)
        try:
            text = making.make(chosen)
        except OSError as error:
            raise UserError(
                Problem(
                    "output.unwritable",
                    f"{chosen.folder} cannot be written: {error.strerror}",
                    "a writable folder",
                )
            ) from None
    except UserError as error:
        log.report(error, closing="nothing was written")
        return int(error.code)
    print(text)
    return int(Exit.DONE)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__))

"""`python -m training.tasks.make_blur_video [FOLDER] [--clips=16] [--frames=20] [--size=128]
[--seed=1] [--layout=gopro] [--spikes] [--force]`: moving scenes, sharp and blurred by their motion,
to train video restoration on without a download.

FOLDER is data/blur_video. --clips: for training; a quarter as many are for validation. --frames: of
each clip. --size: side of a frame, or WIDTHxHEIGHT, pixels. --layout: gopro (train/CLIP/blur and
sharp), or kair (train_GT/CLIP and train_GT_blurred/CLIP).
--spikes: a spike camera's raw .dat beside each frame. --force: a folder that is there is replaced.
The same seed makes the same pictures.
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
    # Imported here, where Ctrl-C is no traceback.
    from training.core import log
    from training.tasks.video_restoration import making

    try:
        chosen = making.parse(argv)
        if chosen.help:
            print(__doc__)
            return int(Exit.DONE)
        making.need_packages(argv)
        try:
            said = making.make(chosen)
        except OSError as error:
            raise UserError(
                Problem(
                    "output.unwritable",
                    f"{chosen.folder} can not be written: {error.strerror}",
                    "a folder that can be written",
                )
            ) from None
    except UserError as error:
        log.report(error, closing="nothing was made")
        return int(error.code)
    print(said)
    return int(Exit.DONE)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__))

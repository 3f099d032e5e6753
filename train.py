"""Training entrypoint of one rank. Works under the launch scripts, and without them:

python train.py CONFIG [--key=value …]                          one process, no process group
torchrun --nproc_per_node=4 train.py --config=CONFIG […]        torchrun starts the ranks
"""

from __future__ import annotations

import gc
import os
import sys

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out the folder of this file
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from training.host import process

if __name__ == "__main__":
    # what importing torch makes stays: looking through it again and again is a quarter of the start
    gc.disable()
    # silently, as long as there is nothing to save: importing takes a moment too
    process.die_of_stop_signals()

    from training.cli import language

    args = language.choose(sys.argv[1:], os.environ)

    from training.cli.train import main

    sys.exit(main(args, os.environ))

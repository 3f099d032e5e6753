"""Training entrypoint of one rank. Works under the launch scripts, and without them:

python train.py CONFIG [--key=value …]                          one process, no process group
torchrun --nproc_per_node=4 train.py --config=CONFIG […]        torchrun starts the ranks
"""

from __future__ import annotations

import os
import sys

from training.rank import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))

"""nanochat with its default windows, short in three of four layers: a contender of
benchmarks.target.

python -m benchmarks.contenders.nanochat_windows RUN        RUN: the fields of Run in JSON
"""

from __future__ import annotations

import functools
import json
import sys

from benchmarks.contenders import nanochat
from benchmarks.contenders.loop import Run, train

if __name__ == "__main__":
    make = functools.partial(nanochat.make, windows=nanochat.DEFAULT)
    train(Run(**json.loads(sys.argv[1])), make)

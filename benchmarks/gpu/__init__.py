"""`make gpu`: everything that Duet claims about GPUs, measured on the GPUs of this machine.

    make gpu                                     # what is not measured yet
    make gpu GPU_FLAGS='--stages=oom --again'    # one stage, also if it was measured before
    make gpu GPU_FLAGS='--nanochat=DIR'          # also nanochat's loop, from a checkout
    python3 -m benchmarks.gpu --help

Results: experiments/gpu/gpu.html, and gpu.json beside it; a copy of that in benchmarks/results/ is
in the tables of docs/gpus.md after `make docs`.

Each stage ends within ten minutes and writes its figures when it has ended, so a run that is killed
continues with the stage that it was in, also on another machine if gpu.json is copied to it.

Nothing is installed or downloaded. The process that starts the stages needs only the standard
library; it runs trainings with the first Python that has a torch with a GPU. What a machine cannot
measure is reported as not measured, with the reason.

With one GPU, two ranks share it for the correctness stage (trainings.py); what needs two GPUs is
skipped.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 – older ones start it
    from benchmarks.gpu import newer_python

    newer_python.use()

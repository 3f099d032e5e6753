"""One rank of the communication test.

    RANK=… WORLD_SIZE=… python lib/run_module.py \\
        training.launcher.communication.worker FOLDER cpu|cuda TIMEOUT_S

Publishes each stage in its heartbeat file before it begins, and writes a record to FOLDER.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from typing import NoReturn

from training.core import heartbeat, rundir
from training.host import program
from training.launcher.communication import stages


def main(argv: list[str]) -> NoReturn:
    """Does not return: process teardown could hang or abort."""
    rank, files = int(os.environ["RANK"]), stages.Files(argv[0])
    try:
        heartbeat.start(files.heartbeat(rank), rank)
        # Unbuffered and kept open: the signal handler writes to the descriptor while the main
        # thread is blocked.
        faulthandler.register(signal.SIGUSR2, file=files.stack(rank).open("w"), all_threads=False)
        rundir.write_json(files.record(rank), _test(argv[1], float(argv[2])))
        status = 0
    except BaseException as error:
        # The record first: its time shows which rank failed first; the others fail as a
        # consequence.
        rundir.write_json(
            files.record(rank),
            {"error": f"{type(error).__name__}: {error}".strip(), "time": time.monotonic()},
        )
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _test(device: str, timeout_s: float) -> dict[str, object]:
    """Record of a rank that completed all stages, with whatever data it received."""
    beat = heartbeat.current.beat
    beat(stages.IMPORT)
    from training.inspector import distributed
    from training.launcher.communication import collectives

    if device == "cuda":
        beat(stages.GPU)
        collectives.start_gpu()
    beat(stages.RENDEZVOUS)
    world = distributed.setup(device, timeout_s)  # as a rank of a real run does
    beat(stages.WARM_UP)
    collectives.warm_up(world)
    wrong = []
    for count in (stages.SMALL_BYTES, stages.LARGE_BYTES[device]):
        for name, check in collectives.CHECKS.items():
            beat(stages.collective(name, count))
            wrong += check(world, count)
    beat(stages.MEASUREMENT)
    figures = collectives.measure(world, stages.LARGE_BYTES[device])
    distributed.barrier(stages.END, timeout_s)
    distributed.cleanup()
    return {"wrong": wrong, **figures, **collectives.versions(device)}


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, internal=True, pipe=False))

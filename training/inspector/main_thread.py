"""What the main thread does, as another thread sees it."""

from __future__ import annotations

import faulthandler
import re
import tempfile
import threading

# Frames of torch.distributed, without those that run a whole script, save or compute within.
_COLLECTIVE = re.compile(
    r"/torch/distributed/"
    r"(?!run\.py|(elastic|launcher|checkpoint|rpc|algorithms/_checkpoint)/)"
)


def in_collective() -> bool:
    """Whether the main thread is in a call of torch.distributed.

    faulthandler reads the frames without creating objects for them. A frame object of a running
    thread can outlive its frame, and reading it then ends the process with SIGSEGV (CPython 3.11).
    False where that is unknown: no place for a file, or more than 100 threads.
    """
    try:
        # os.memfd_create is missing in Pythons that were built for an old glibc (uv, conda)
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read().decode(errors="replace")
    except OSError:
        return False
    main = f"Thread 0x{threading.main_thread().ident:016x} "
    return any(s.startswith(main) and _COLLECTIVE.search(s) for s in stacks.split("\n\n"))

"""Faults that block or end ranks and data-loader workers. The function names appear in a stuck
rank's stack."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import threading

from training.trainer.faults.context import FaultContext


def _stuck_in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


# ---- the rank does not move


def sleep(here: FaultContext) -> None:
    _stuck_in_a_lock()


def lock_tqdm(here: FaultContext) -> None:
    from tqdm import tqdm

    taken = threading.Event()

    def hold_the_lock_of_tqdm() -> None:
        with tqdm.get_lock():  # type: ignore[no-untyped-call]
            taken.set()
            _stuck_in_a_lock()

    threading.Thread(target=hold_the_lock_of_tqdm, daemon=True).start()
    taken.wait()


def gil(here: FaultContext) -> None:
    # all zero: an unlocked mutex
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def loop(here: FaultContext) -> None:
    count = 0
    while True:
        count += 1


def stop(here: FaultContext) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def io(here: FaultContext) -> None:
    pipe = here.run_folder / f"rank{here.rank}.nobody_writes"
    os.mkfifo(pipe)
    # The kernel blocks a parent uninterruptibly until its child has started. This child never does,
    # since no process opens the other end of the pipe. If only the rank is killed, the guard reads
    # the end of its input and releases the child.
    guard = subprocess.Popen(
        ["/bin/sh", "-c", 'read _; exec 3<>"$0"; rm "$0"', str(pipe)], stdin=subprocess.PIPE
    )
    assert guard.stdin
    actions = [
        (os.POSIX_SPAWN_CLOSE, guard.stdin.fileno()),
        (os.POSIX_SPAWN_OPEN, 0, str(pipe), os.O_RDONLY, 0),
    ]
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions)


def desync(here: FaultContext) -> None:
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(7, 11, device=here.device), src=0)


def desync_shape(here: FaultContext) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(7, 11, device=here.device))


# ---- the rank ends


def kill(here: FaultContext) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segv(here: FaultContext) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file
    ctypes.string_at(0)


def abort(here: FaultContext) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def exit_(here: FaultContext) -> None:
    os._exit(here.code)


def raise_(here: FaultContext) -> None:
    raise ValueError("injected on purpose")


def ecc(here: FaultContext) -> None:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def oom(here: FaultContext) -> None:
    import torch

    if here.device == "cuda":
        taken, size = [], 1 << 34
        while True:  # down to small pieces, so that no memory is left for this process
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                if size <= 1 << 21:
                    raise
                size //= 2
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 31.36 GiB "
        "of which 1.21 GiB is free. Including "
        "non-PyTorch memory, this process has 30.14 GiB memory in use. Of "
        "the allocated memory 29.30 GiB is allocated by PyTorch, and "
        "331.22 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
        "large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
        "for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


# ---- data-loader workers


def worker_stuck(here: FaultContext) -> None:
    _stuck_in_a_lock()


def worker_kill(here: FaultContext) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def worker_raise(here: FaultContext) -> None:
    raise ValueError("injected on purpose")


def worker_bus(here: FaultContext) -> None:
    os.kill(os.getpid(), signal.SIGBUS)

"""Ranks and data-loader workers that do not move, or end. Names are honest: they are what a stack shows of a rank that is stuck here."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import threading

from training.config.fault_table import MAIN, Here, fault


def _stuck_in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


# ---- the rank does not move


@fault()
def sleep(here: Here) -> None:
    """waits for ever for a lock that it holds itself"""
    _stuck_in_a_lock()


@fault(ranks=MAIN)
def lock_tqdm(here: Here) -> None:
    """another thread takes tqdm's lock for ever: the progress bar and its lines block"""
    from tqdm import tqdm

    taken = threading.Event()

    def hold_the_lock_of_tqdm() -> None:
        with tqdm.get_lock():  # type: ignore[no-untyped-call]
            taken.set()
            _stuck_in_a_lock()

    threading.Thread(target=hold_the_lock_of_tqdm, daemon=True).start()
    taken.wait()


@fault()
def gil(here: Here) -> None:
    """blocks in C and keeps Python's global lock: none of the rank's threads runs any more"""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)  # all zero: a fresh mutex
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


@fault()
def loop(here: Here) -> None:
    """endless loop in Python"""
    count = 0
    while True:
        count += 1


@fault()
def stop(here: Here) -> None:
    """SIGSTOP to itself"""
    os.kill(os.getpid(), signal.SIGSTOP)


@fault()
def io(here: Here) -> None:
    """blocks in the kernel without being interruptible (state D), as on a dead network disk"""
    pipe = here.run_folder / f"rank{here.rank}.nobody_writes"
    os.mkfifo(pipe)
    # A process that begins has the kernel's promise that its parent waits uninterruptibly; this one never gets so far, since nobody
    # opens the other end. When the rank alone is killed, the guard sees the end of its input and lets the child go.
    guard = subprocess.Popen(["/bin/sh", "-c", 'read _; exec 3<>"$0"; rm "$0"', str(pipe)], stdin=subprocess.PIPE)
    assert guard.stdin
    actions = [(os.POSIX_SPAWN_CLOSE, guard.stdin.fileno()), (os.POSIX_SPAWN_OPEN, 0, str(pipe), os.O_RDONLY, 0)]
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions)


@fault()
def desync(here: Here) -> None:
    """asks for a collective that no other rank asks for (a broadcast)"""
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(7, 11, device=here.device), src=0)


@fault()
def desync_shape(here: Here) -> None:
    """asks for one all_reduce more than the others, of a shape of its own"""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(7, 11, device=here.device))


# ---- the rank ends


@fault()
def kill(here: Here) -> None:
    """SIGKILL to itself"""
    os.kill(os.getpid(), signal.SIGKILL)


@fault()
def segv(here: Here) -> None:
    """reads at address 0 (SIGSEGV)"""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file
    ctypes.string_at(0)


@fault()
def abort(here: Here) -> None:
    """aborts (SIGABRT), as a failed assertion in C does"""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


@fault(code=0)
def exit_(here: Here) -> None:
    """leaves with status `code` in the middle of the training"""
    os._exit(here.code)


@fault()
def raise_(here: Here) -> None:
    """raises ValueError"""
    raise ValueError("injected on purpose")


@fault(above=0)
def oom(here: Here) -> None:
    """GPU out of memory, as long as device_batch_size is over `above`; on a CPU the same exception with CUDA's text"""
    import torch

    if here.device == "cuda":
        taken, size = [], 1 << 34
        while True:  # down to small pieces, so that nothing is left for others of this process
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                if size <= 1 << 21:
                    raise
                size //= 2
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 31.36 GiB of which 1.21 GiB is free. Including "
        "non-PyTorch memory, this process has 30.14 GiB memory in use. Of the allocated memory 29.30 GiB is allocated by PyTorch, and "
        "331.22 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


# ---- data-loader workers


@fault(worker=True)
def worker_stuck(here: Here) -> None:
    """a data-loader worker waits for ever for a lock that it holds itself"""
    _stuck_in_a_lock()


@fault(worker=True)
def worker_kill(here: Here) -> None:
    """SIGKILL to a data-loader worker"""
    os.kill(os.getpid(), signal.SIGKILL)


@fault(worker=True)
def worker_raise(here: Here) -> None:
    """a data-loader worker raises ValueError"""
    raise ValueError("injected on purpose")


@fault(worker=True)
def worker_bus(here: Here) -> None:
    """SIGBUS to a data-loader worker, as when /dev/shm is full"""
    os.kill(os.getpid(), signal.SIGBUS)

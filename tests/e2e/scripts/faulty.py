"""A plain DDP script without Duet, with one fault: faulty.py FAULT [SECONDS]. Runs under torchrun
too.

200 steps of about 10 ms, one line each; the fault is at step 20. SECONDS: duration of slow_eval,
upload, quiet, slow_data and prepare.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else "ok"
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
STEPS, AT, BATCH = 200, 20, 4
WORKERS = 1 if FAULT.startswith("worker") else 0


class Samples(Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        if rank == 0 and index == AT * BATCH and WORKERS:
            hurt_worker()
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def hurt_worker():
    if FAULT == "worker":
        stuck_in_a_lock()
    say_fault()
    os.kill(os.getpid(), signal.SIGKILL)


def stuck_in_a_lock():
    lock = threading.Lock()
    lock.acquire()
    say_fault()
    lock.acquire()  # the deadlock


def endless_loop():
    say_fault()
    turns = 0
    while True:
        turns += 1


def prepare():
    """Pure Python work without output, before the first step."""
    say_fault()
    words, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        words += 1


def evaluate():
    """Long work on rank 0 alone: the others wait at the barrier below."""
    say_fault()
    end = time.monotonic() + SECONDS
    weights = torch.randn(400, 400)
    while time.monotonic() < end:
        weights = torch.tanh(weights @ weights)


def upload():
    """Rank 0 alone sends to a slow server: no CPU time, always in the same call."""
    import socket

    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    server.bind(("127.0.0.1", 0))
    server.listen()

    def receive():
        connection, _ = server.accept()
        while connection.recv(20000):
            time.sleep(0.05)

    threading.Thread(target=receive, daemon=True).start()
    say_fault()
    with socket.create_connection(server.getsockname()) as client:
        client.sendall(bytes(int(SECONDS * 400_000)))


def say_fault():
    print(f"FAULT {time.time():.3f} pid {os.getpid()}", flush=True)


def at_fault():
    """Fault of rank 0, before it takes part in step 20."""
    if FAULT == "sleep":
        stuck_in_a_lock()
    elif FAULT == "spin":
        endless_loop()
    elif FAULT == "gil":
        say_fault()
        ctypes.PyDLL(None).sleep(100_000)
    elif FAULT == "stop":
        say_fault()
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "exit0":
        say_fault()
        os._exit(0)
    elif FAULT == "kill":
        say_fault()
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "segv":
        say_fault()
        ctypes.string_at(0)
    elif FAULT == "raise":
        say_fault()
        raise ValueError("something is wrong with sample 80")


def ask_the_store():
    """As the heartbeat monitor of NCCL does in each rank, every second."""
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):  # the store's rank may have ended
        while not ended.wait(0.5):
            store.check(["exception_dump"])


dist.init_process_group(
    "gloo", timeout=timedelta(seconds=float(os.environ.get("GROUP_TIMEOUT_S", "1800")))
)
rank, ended = dist.get_rank(), threading.Event()
asks = threading.Thread(target=ask_the_store, daemon=True)
asks.start()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if FAULT == "prepare":
    if rank == 0:
        prepare()
    dist.barrier()
for step, batch in enumerate(DataLoader(Samples(), batch_size=BATCH, num_workers=WORKERS)):
    if step == AT and rank == 0:
        at_fault()
    if step == AT and FAULT == "desync":
        if rank == 1:
            say_fault()
        dist.all_reduce(torch.ones(4 if rank == 0 else 4000))
    if step == AT and FAULT in ("slow_eval", "upload"):
        if rank == 0:
            evaluate() if FAULT == "slow_eval" else upload()
        dist.barrier()
    if step == AT and FAULT == "uneven" and rank == 0:
        say_fault()
        break
    optimizer.zero_grad()
    loss = (model(batch) - 1).square().mean()
    loss.backward()
    optimizer.step()
    if FAULT == "slow_data":  # rank 0 waits for something in each step, and the others for rank 0
        time.sleep(SECONDS / STEPS if rank == 0 else 0)
    else:
        time.sleep(SECONDS / STEPS if FAULT == "quiet" else 0.01)
    if FAULT not in ("quiet", "slow_data") and (rank == 0 or FAULT == "uneven"):
        print(f"step {step} loss {loss.item():.4f}", flush=True)
dist.barrier()
print(f"rank {rank} done", flush=True)
ended.set()
asks.join()
dist.destroy_process_group()

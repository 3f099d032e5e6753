"""IDs of causes that code decides on; the catalogue (training/diagnose/signatures/causes.json) has
all, with their advice."""

from __future__ import annotations

from training.core.errors import Exit

NONE, UNKNOWN = "none", "unknown"
# known only: an exception, an exit status or a signal
RAISED, EXIT_STATUS, SEGFAULT, KILLED = "exception", "exit_status", "segfault", "killed"
HANG, PEER_DIED, COLLECTIVE_TIMEOUT = "hang", "peer_died", "collective_timeout"
NCCL_INIT, NCCL_NETWORK = "nccl_init", "nccl_network"
RENDEZVOUS_TIMEOUT, PORT_IN_USE = "rendezvous_timeout", "port_in_use"
GPU_OOM, GPU_HARDWARE, CUDA_DEVICE_ASSERT = "gpu_oom", "gpu_hardware", "cuda_device_assert"
NO_GPU, CUDA_DRIVER_TOO_OLD = "no_gpu", "cuda_driver_too_old"
HOST_OOM_KILLED, DISK_FULL = "host_oom_killed", "disk_full"
DATALOADER_WORKER_DIED, SHM_TOO_SMALL = "dataloader_worker_died", "shm_too_small"
TOO_MANY_PROCESSES = "too_many_processes"
NAN_LOSS, DDP_PARAMS_MISMATCH = "nan_loss", "ddp_params_mismatch"
CHECKPOINT_CORRUPT, CONFIG_ERROR = "checkpoint_corrupt", "config_error"
INTERRUPTED, PREEMPTED = "interrupted", "preempted"

# of a run that was stopped from outside, by its exit code
STOPPED: dict[int, str] = {Exit.INTERRUPTED: INTERRUPTED, Exit.PREEMPTED: PREEMPTED}

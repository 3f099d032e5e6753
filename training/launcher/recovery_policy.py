"""Remedy for a failure: the same plan again, a smaller batch, fewer workers, or none. Machine
failures may pass; code errors recur.

`retries` bounds the consecutive restarts that neither make progress nor change the plan: a long run
with one network failure a week continues for ever, one that fails twice at the same step ends,
unless by the network.
Batch and number of workers only decrease, so those restarts end by themselves.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from training import tasks
from training.config import batch
from training.core import cause_ids, phases
from training.core.messages import msg
from training.core.rundir import ASKED
from training.core.units import plural
from training.launcher import fewer_ranks
from training.launcher.restart import Failure, GiveUp, Restart, killed
from training.watchdog.hang_report import BLOCKED, DESYNC, HANG, STOPPED, UNEVEN
from training.watchdog.rank_exit import DIED, ERROR

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

NETWORK = {
    *(cause_ids.NCCL_NETWORK, cause_ids.PEER_DIED, cause_ids.PORT_IN_USE),
    *(cause_ids.RENDEZVOUS_TIMEOUT, cause_ids.COLLECTIVE_TIMEOUT),
}
# These may pass without progress: only the pauses and `retries` bound their restarts.
PASSING = {cause_ids.NCCL_NETWORK, cause_ids.PORT_IN_USE, cause_ids.RENDEZVOUS_TIMEOUT}
PAUSES_S = (1.0, 5.0, 15.0)  # before consecutive restarts after network failures
OCCUPIED_PAUSES_S = (15.0, 60.0, 300.0)  # and while other processes occupy a GPU
# fields that a remedy may change
CURES = (
    "device_batch_size",
    "num_workers",
    "persistent_workers",
)
# Causes that a restart cannot remove, and why.
NEVER = {
    cause_ids.NAN_LOSS: msg("launcher.retry.never.nan"),
    cause_ids.DDP_PARAMS_MISMATCH: msg("launcher.retry.never.ddp_params"),
    cause_ids.CUDA_DEVICE_ASSERT: msg("launcher.retry.never.code_error"),
    cause_ids.GPU_HARDWARE: msg("launcher.retry.never.gpu_hardware"),
    cause_ids.DISK_FULL: msg("launcher.retry.never.disk_full"),
    cause_ids.CONFIG_ERROR: msg("launcher.retry.never.config"),
    cause_ids.HOST_OOM_KILLED: msg("launcher.retry.never.host_oom"),
}


def remedy(failure: Failure, plan: Plan, before: Sequence[Failure]) -> Restart | GiveUp:
    """`before`: earlier failures of this start, oldest first."""
    retries = plan["retries"]["value"]
    if not retries:
        return GiveUp("")
    if failure.kind == ASKED:
        return GiveUp("")
    if smaller := fewer_ranks.remedy(failure, plan, before):
        return smaller
    # a code error would have shown at the first step
    suspect = fewer_ranks.may_be_gpu(failure, plan) and failure.step > 1
    if lasts(failure) and not suspect:
        return GiveUp(NEVER[failure.cause])
    row = _row([*before, failure])[:-1]
    cured = _smaller_batch(failure, plan) or _fewer_workers(failure, plan, row)
    if cured:
        return cured
    if failure.kind == DIED and failure.status >= 0 and not killed(failure):
        return GiveUp(msg("launcher.retry.exits_by_itself", summary=failure.summary))
    passing = killed(failure) or may_pass(failure) or suspect or failure.occupied
    if not (passing or _of_loader(failure)):
        return GiveUp(_recurs(failure))
    same_plan = row[max((i + 1 for i, f in enumerate(row) if f.changed), default=0) :]
    passes = failure.occupied or failure.cause in PASSING
    if not passes and any(failure.same(earlier) for earlier in same_plan):
        return GiveUp(msg("launcher.retry.same_step", step=failure.step))
    number = 1 + sum(not f.changed for f in row)
    if number > retries:
        return GiveUp(
            msg(
                "launcher.retry.no_progress",
                restarts=plural(retries, "consecutive restart"),
                retries=retries,
                reason=plan["retries"]["reason"],
            )
        )
    return Restart(number, pause_s=pause_before(failure, row))


def _recurs(failure: Failure) -> str:
    """Why a restart of Duet's training would fail as well."""
    if failure.cause == cause_ids.SHM_TOO_SMALL:
        return msg("launcher.retry.never.shm")
    if failure.cause in (cause_ids.CUDA_DRIVER_TOO_OLD, cause_ids.NO_GPU):
        return msg("launcher.retry.never.no_gpu")
    # not every exception is an error of the code: a disk may fail
    if failure.kind == ERROR:
        return msg("launcher.retry.never.raised")
    return msg("launcher.retry.never.code_error")


def lasts(failure: Failure) -> bool:
    """Has it a cause that a restart cannot remove? Not if the kernel has killed the rank or a
    process below it, which may find more memory at the next attempt."""
    by_kernel = failure.worker or failure.oom_kill or -failure.status == signal.SIGKILL
    killed_for_memory = failure.cause == cause_ids.HOST_OOM_KILLED and by_kernel
    return failure.cause in NEVER and not killed_for_memory


def may_pass(failure: Failure) -> bool:
    """A hang or a failure of the network, unless the ranks called different collectives."""
    waits = failure.cause == cause_ids.HANG or failure.cause in NETWORK
    return waits and failure.kind not in (DESYNC, UNEVEN)


def pause_before(failure: Failure, before: Sequence[Failure]) -> float:
    """Seconds before the restart."""
    if failure.occupied:
        earlier = sum(f.occupied for f in before)
        return OCCUPIED_PAUSES_S[min(earlier, len(OCCUPIED_PAUSES_S) - 1)]
    if failure.cause not in NETWORK:
        return 0.0
    earlier = sum(f.cause in NETWORK for f in before)
    return PAUSES_S[min(earlier, len(PAUSES_S) - 1)]


def _row(failures: Sequence[Failure]) -> Sequence[Failure]:
    """The last failures without progress between them: none has left a checkpoint at or after the
    step where the one before had failed."""
    first = 0
    for i, (one, then) in enumerate(itertools.pairwise(failures)):
        if then.saved > one.saved and then.saved >= one.step:
            first = i + 1
    return failures[first:]


def _smaller_batch(failure: Failure, plan: Plan) -> Restart | GiveUp | None:
    if failure.cause != cause_ids.GPU_OOM or failure.occupied:
        return None
    spec = tasks.spec_of(plan)
    if lighter := spec.lighter_in(failure.phase):
        return GiveUp(msg("launcher.retry.batch_not_used", phase=failure.phase, lighter=lighter))
    now, total = plan["config"]["device_batch_size"], plan["config"]["total_batch_size"]
    size = batch.smaller(now, plan["batch"]["seq_len"], plan["batch"]["world_size"], total)
    if size is None:
        lighter = spec.lighter_than(plan)
        return GiveUp(msg("launcher.retry.batch_too_small", now=now, lighter=lighter))
    unit = tasks.task_of(plan)["unit"]
    label = msg(
        "launcher.retry.smaller_batch",
        now=now,
        size=size,
        total=total,
        unit=unit,
        factor=now / size,
    )
    return Restart(
        0,
        {"device_batch_size": size},
        msg("launcher.retry.out_of_memory", who=_who(failure), now=now),
        label,
    )


def _who(failure: Failure) -> str:
    return (
        msg("launcher.retry.a_rank")
        if failure.rank is None
        else msg("launcher.retry.rank", rank=failure.rank)
    )


def _fewer_workers(failure: Failure, plan: Plan, row: Sequence[Failure]) -> Restart | None:
    """After the second failure of the data loader: a worker that was killed or delivers nothing."""
    workers = plan["config"]["num_workers"]
    if not workers or not _of_loader(failure) or not any(_of_loader(f) for f in row):
        return None
    fewer = workers // 2 if workers > 2 else 0
    changes = {"num_workers": fewer} | ({} if fewer else {"persistent_workers": False})
    why = msg("launcher.retry.data_loader", who=_who(failure), workers=plural(workers, "worker"))
    label = msg("launcher.retry.fewer_workers", workers=workers, fewer=fewer)
    return Restart(
        0, changes, why, label if fewer else msg("launcher.retry.no_workers", label=label)
    )


def _of_loader(failure: Failure) -> bool:
    if failure.worker or failure.cause == cause_ids.DATALOADER_WORKER_DIED:
        return True
    stuck = failure.kind in (HANG, STOPPED, BLOCKED) and failure.rank is not None
    # NCCL needs /dev/shm too
    full = failure.cause == cause_ids.SHM_TOO_SMALL
    return (stuck or full) and phases.needs_data(failure.phase)

"""torch's errors of collectives in the output of a rank: the log has them, the console does not."""

from __future__ import annotations

import os
import selectors
import subprocess
from pathlib import Path

import pytest

from training.core.rundir import RunDir
from training.launcher import rank_log
from training.launcher.backlog import Backlog
from training.launcher.child import Child
from training.launcher.outcome import Outcome
from training.launcher.output import RankOutput
from training.launcher.outputs import Outputs
from training.launcher.symptoms import Symptoms

# as on an innocent rank 0
NCCL = (
    b"[rank0]:[E1128 19:42:14.052472738 ProcessGroupNCCL.cpp:1899] [PG ID 0 PG GUID 0 Rank 0] "
    b"Observed flight recorder dump signal from another rank via TCPStore.\n",
    b"[rank0]:[E1128 19:42:14.064321845 ProcessGroupNCCL.cpp:682] [Rank 0] Process group watchdog "
    b"thread terminated with exception: [Rank 0] Watchdog caught collective operation timeout\n",
    b"Exception raised from checkTimeout at ../torch/csrc/ProcessGroupNCCL.cpp:690 (most recent "
    b"call first):\n",
    b"frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f in libc10.so)\n\n",
    b"terminate called after throwing an instance of 'c10::DistBackendError'\n",
    b"  what():  [PG ID 0 PG GUID 0 Rank 0] Process group watchdog thread terminated\n",
)
FAILED = (
    b"[rank0]:[E1128 19:42:15.367846311 ProcessGroupNCCL.cpp:774] Stack trace of the failed "
    b"collective: \n",
    b"#0 all_reduce from /env/torch/distributed/distributed_c10d.py:3245\n",
    b"#1 <module> from train.py:13\n\n",
    b"[rank0]:[E1128 19:42:15.57 ProcessGroupNCCL.cpp:2174] [Rank 0] Process group watchdog thread "
    b"terminated with exception: CUDA error: an illegal memory access was encountered\n",
    b"Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com for more information.\n",
    b"CUDA kernel errors might be asynchronously reported at some other API call.\n",
    b"For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n",
    b"Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n",
    *NCCL[2:4],
    b"[rank0]:[E1128 19:42:15.58 ProcessGroupNCCL.cpp:730] [Rank 0] found async exception\n",
    b"ncclRemoteError: A call failed possibly due to a network error.\n",
    b"Last error:\n",
    b"NET/IB: Got completion from peer 10.0.0.2<47100> with status=12\n",
)
# about the program
WARNING = b"[rank0]:[W1128 19:42:14.05 ProcessGroupNCCL.cpp:4561] using GPU 0 to perform barrier\n"


@pytest.mark.parametrize("size", [7, 100, 10_000])
def test_errors_of_collectives_are_in_the_ranks_log_alone(
    log: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], size: int
) -> None:
    printed = b"".join([WARNING, *NCCL, b"Epoch 1\n", *FAILED, b"[Epoch 2] 5%"])
    symptoms, (read, write) = Symptoms(), os.pipe()
    made = RankOutput(read, tmp_path / "rank0.log", 2, backlog=Backlog(), symptoms=symptoms)
    for at in range(0, len(printed), size):
        os.write(write, printed[at : at + size])
        made.drain()
    os.close(write)
    made.close()
    assert (tmp_path / "rank0.log").read_bytes() == printed
    assert capfdbinary.readouterr().err == WARNING + b"Epoch 1\n[Epoch 2] 5%"
    assert log.read_bytes() == WARNING + b"Epoch 1\n[Epoch 2] 5%\n"
    assert symptoms.lines.dropped == 5


def test_the_evidence_has_the_errors_of_collectives_without_their_stacks(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_bytes(b"".join([b"Epoch 1\n", *NCCL, *FAILED, *NCCL[2:], *[NCCL[3]] * 300]))
    assert rank_log.last_lines(log, 0) == []
    log.write_bytes(b"".join([NCCL[3], b"frame #1 of 9\n", *NCCL, *FAILED, *NCCL[2:]]))
    kept = [*NCCL[:2], *NCCL[4:], FAILED[0], FAILED[3], *FAILED[-4:], *NCCL[4:]]
    assert rank_log.last_lines(log, 0) == [one.decode().rstrip("\n") for one in kept][-10:]


def test_a_prompt_and_a_bar_are_shown_before_their_end() -> None:
    symptoms = Symptoms()
    assert symptoms.without(b"[rank 0] password: ") == b"[rank 0] password: "
    assert symptoms.without(b"\r[Epoch 1] 5%") == b"\r[Epoch 1] 5%"
    assert symptoms.without(NCCL[0]) == b""
    assert symptoms.without(b"\r[Epoch 1] 6%" + NCCL[0]) == b"\r[Epoch 1] 6%"


@pytest.mark.parametrize(("failed_at", "warned"), [(None, True), (1.0, False)])
def test_errors_of_collectives_without_a_failure_are_one_warning(
    run: RunDir, log: Path, failed_at: float | None, warned: bool
) -> None:
    selector, (read, write) = selectors.DefaultSelector(), os.pipe()
    outputs = Outputs(run, selector, lambda: None, [0], 0, None)
    process = subprocess.Popen(["true"])
    outputs.add(Child(0, process, {2: read}, -1))
    os.write(write, NCCL[0])
    os.close(write)
    outputs.drain_rest()
    outputs.show_last_of_others(Outcome(failed_at=failed_at))
    process.wait()
    assert b"ProcessGroupNCCL" not in log.read_bytes()
    assert (str(run.rank_log(0)) in log.read_text()) == warned

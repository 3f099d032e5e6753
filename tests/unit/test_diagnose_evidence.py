"""Evidence in a log: tracebacks, kills, pipes, and healthy logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.diagnosed import LOGS, OOM, ROOT
from training.diagnose import card, exception_cause, result, scan, traceback


@each(
    ("text", "cause", "confidence", "summary"),
    [
        (b"", "unknown", "low", "the log is empty"),
        (b"\n \n", "unknown", "low", "the log is empty"),
        (
            b"\x7fELF\2\1\1" + bytes(500) + b"MemoryError: CUDA out of memory",
            "unknown",
            "low",
            "the file is binary",
        ),
        (
            b"panic: flux capacitor exploded\nexit 1\n",
            "unknown",
            "low",
            "panic: flux capacitor exploded",
        ),
        (b"loading 7 files\nready\n", "unknown", "low", "nothing recognised"),
        (
            b"".join(b"data:  %d%%|#| %d/9 [00:01<00:02, 2it/s]\r" % (i * 11, i) for i in range(9)),
            "unknown",
            "low",
            "nothing recognised",
        ),
        (
            b"".join(b"step %d/9 loss 2.%d\n" % (i, i) for i in range(5)),
            "none",
            "medium",
            "step counts up to the end",
        ),
        (
            "".join(f"损失: 2.{i} 步数: {i}\n" for i in range(5)).encode(),
            "none",
            "medium",
            "step counts up to the end",
        ),
        (
            b"Error: no icon\n"
            + b"".join(b"[%d]\ttrain-rmse:0.%d\n" % (i, 90 - i) for i in range(5)),
            "none",
            "medium",
            "step counts",
        ),
        (b"step 1 loss 2.0\nTraining finished\n", "none", "high", "no failure found"),
        (
            b"".join(b"[%d] lost 0.%d\n" % (i, 90 - i) for i in range(5)) + b"Error: device lost\n",
            "unknown",
            "low",
            "Error: device lost",
        ),
        (
            b"".join(b"step %d/9 loss 2.%d\n" % (i, i) for i in range(5)) + b"fatal: quota\n",
            "unknown",
            "low",
            "fatal: quota",
        ),
        *(
            (b"step 10 loss 3.2\nstep 20 loss 3.1\n%s\n" % end, "unknown", "low", end.decode())
            for end in (
                b"Job completed with exit code 1",
                b"Training finished with errors",
                b"job 12 finished with status FAILED",
                b"Job 12 finished: failed",
            )
        ),
        (b"step 1 loss 2.0\nJob done: no errors, 0 failed\n", "none", "high", "no failure found"),
    ],
)
def test_healthy_needs_evidence(
    tmp_path: Path, text: bytes, cause: str, confidence: str, summary: str
) -> None:
    (tmp_path / "log").write_bytes(text)
    record = result.diagnose([tmp_path / "log"])
    assert (record["cause"], record["confidence"]) == (cause, confidence) and record[
        "summary"
    ].startswith(summary)
    assert json.loads(json.dumps(record)) == record and card.draw(record)


MISSING = "FileNotFoundError: [Errno 2] No such file or directory: 'last.pt'"
FULL = "OSError: [Errno 28] No space left on device"


@each(
    ("first", "then", "cause", "line"),
    [
        (MISSING, OOM, "gpu_oom", 9),
        (OOM, FULL, "gpu_oom", 3),  # the clean-up
        (OOM, "KeyboardInterrupt", "gpu_oom", 3),
        (MISSING, "KeyError: 0", "file_not_found", 3),  # may be a wrapper
        ("KeyError: 0", "ValueError: no", "exception", 9),
        ("KeyError: 0", "RuntimeError: Connection closed by peer [::1]:9.", "exception", 3),
    ],
)
def test_an_exception_in_a_handler_is_the_fatal_one(
    first: str, then: str, cause: str, line: int, tmp_path: Path
) -> None:
    frame = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n'
    for link, place in (
        ("During handling of the above exception, another exception occurred:", line),
        ("The above exception was the direct cause of the following exception:", 3),
    ):
        text = f"{frame}{first.strip()}\n\n{link}\n\n{frame}{then.strip()}\n"
        (tmp_path / "log").write_text(text)
        record = result.diagnose([tmp_path / "log"])
        assert record["line"] == place
        assert record["cause"] == cause or place != line


def test_a_log_truncated_while_written_is_text(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(
        bytes(5000) + b"step 1 loss 2.0\nRuntimeError: CUDA error: out of memory\n"
    )
    assert result.diagnose([tmp_path / "log"])["cause"] == "gpu_oom"


RAISED = (
    "Traceback (most recent call last):\n"
    '  File "<frozen runpy>", line 198, in _run_module_as_main\n'
    '  File "/home/u/bin/train", line 30, in <module>\n    for x in loader:\n'
    '  File "/opt/lib/python3.11/site-packages/torch/_utils.py", line 733, in reraise\n    raise '
    "exception\n"
    "ValueError: Caught ValueError in DataLoader worker process 0.\n"
    "Original Traceback (most recent call last):\n"
    '  File "/home/u/data", line 12, in __getitem__\n    raise ValueError("bad sample 7")\n'
    '  File "<frozen importlib._bootstrap>", line 1027, in _find_and_load\n'
    "ValueError: bad sample 7\n"
)


def test_an_exception_in_a_worker_has_the_line_that_raised_it(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(RAISED)
    record = result.diagnose([tmp_path / "log"])
    assert (record["cause"], record["where"], record["line"]) == (
        "exception",
        "/home/u/data:12",
        12,
    )
    assert record["summary"] == "ValueError: bad sample 7 (/home/u/data:12)"


def test_a_traceback_behind_the_unfinished_line_of_another_rank(tmp_path: Path) -> None:
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1731"
    (tmp_path / "log").write_text(
        "step 4 loss 0.4850[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/a/m.py", line 12, in <module>\n[rank1]:     raise KeyError("x")\n'
        "[rank1]: KeyError: 'x'\n[rank0]: Traceback (most recent call last):\n"
        f'[rank0]:   File "/a/m.py", line 16, in <module>\n[rank0]: {lost}\n'
    )
    record = result.diagnose([tmp_path / "log"])
    assert (record["cause"], record["rank"], record["where"]) == ("exception", 1, "/a/m.py:12")


def test_a_syntax_error_has_its_place(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        '  File "train.py", line 3\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
    )
    record = result.diagnose([tmp_path / "log"])
    assert (record["cause"], record["where"]) == ("exception", "train.py:3")


def test_frames_without_a_file_are_not_a_place(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        'Traceback (most recent call last):\n  File "<frozen runpy>", line 1, in x\nRuntimeError: '
        "no\n"
    )
    record = result.diagnose([tmp_path / "log"])
    assert (record["cause"], record["where"], record["summary"]) == (
        "exception",
        None,
        "RuntimeError: no",
    )


def test_an_assertion_without_a_message_is_named_by_its_source(tmp_path: Path) -> None:
    frame = '  File "a.py", line 3, in f\n    assert boxes.min() >= 0\n'
    (tmp_path / "log").write_text(f"Traceback (most recent call last):\n{frame}AssertionError\n")
    assert (
        result.diagnose([tmp_path / "log"])["summary"]
        == "AssertionError: assert boxes.min() >= 0 (a.py:3)"
    )


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        ("", "killed"),
        ("CPU Virtual Memory:  used = 241.93 GB, percent = 96.1%\n", "host_oom_killed"),
        ("slurmstepd: error: Exceeded job memory limit at some point.\n", "host_oom_killed"),
    ],
)
def test_a_kill_is_out_of_memory_only_if_the_log_shows_it(
    tmp_path: Path, before: str, cause: str
) -> None:
    (tmp_path / "log").write_text(
        f"{before}run.sh: line 12: 48213 Killed                  python train.py\n"
    )
    record = result.diagnose([tmp_path / "log"])
    assert (record["cause"], record["confidence"]) == (cause, "medium") and record["advice"]


def test_a_pipe_is_a_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = subprocess.Popen(
        [sys.executable, "-c", f"open({str(tmp_path / 'pipe')!r}, 'w').write({OOM!r})"]
    )
    assert result.diagnose([tmp_path / "pipe"])["cause"] == "gpu_oom"
    assert writer.wait(timeout=30) == 0


def test_a_full_disk_causes_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        line = [
            sys.executable,
            str(ROOT / "lib" / "run_module.py"),
            "training.cli.diagnose",
            str(LOGS / "gpu_oom" / "01.log"),
        ]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (
        done.returncode == 3
        and "No space left on device" in done.stderr
        and "(exit 3)" in done.stderr
        and "Traceback" not in done.stderr
    )


@each(
    ("line", "signature"),
    [
        ("train.py: error: unrecognized arguments: --local-rank=0", "distributed.local_rank_flag"),
        (
            "train.py: error: the following arguments are required: --data, --local_rank, --out",
            "distributed.local_rank_required",
        ),
        (
            "ImportError: libtorch_cpu.so: failed to map segment from shared object",
            "machine.limit.address_space",
        ),
        (
            "Loss.cu:186: nll_loss_forward_no_reduce_cuda_kernel: block: [0,0,0], thread: [32,0,0] "
            "Assertion `cur_target >= 0 && cur_target < n_classes` failed.",
            "gpu.assert.label",
        ),
        (
            "[ERROR] [launch.py:324:sigkill_handler] ['python', 'train.py'] exits with return code "
            "= -11",
            "distributed.launcher.sigsegv",
        ),
    ],
)
def test_the_specific_entry_precedes_the_general_one(
    line: str, signature: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.log"
    path.write_text(f"{line}\n")
    assert result.diagnose([path])["signature"] == signature


@each(
    ("kind", "message", "cause"),
    [
        ("ValueError", "Invalid value for the mask: 3", "exception"),
        ("ValueError", "Missing argument x", "exception"),
        ("RuntimeError", "child was Killed", "exception"),
        ("RuntimeError", "decoder: Bus error", "exception"),
        ("RuntimeError", "service State: TIMEOUT", "exception"),
        ("RuntimeError", "a.sh: line 3: foo: command not found", "exception"),
        ("RuntimeError", "the script printed\nbash: foo: command not found", "file_not_found"),
        ("MemoryError", "", "host_oom_killed"),
    ],
)
def test_a_pattern_of_a_whole_line_is_not_found_within_an_exception(
    kind: str, message: str, cause: str
) -> None:
    assert exception_cause.of_error({"type": kind, "message": message}) == cause


def test_a_line_of_a_message_is_named_with_its_values() -> None:
    text = "DistBackendError: NCCL error\nLast error:\nFailed to CUDA calloc async 608 bytes"
    signature, values = scan.named(text, ("gpu_oom",))
    assert signature and signature.id == "nccl.cuda.alloc_last" and values == {"bytes": "608"}


INSPECTED = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 17, in <module>
[rank1]:     inspector.step(loss, batch)
[rank1]:   File "/home/me/duet/training/inspector/inspector.py", line 142, in step
[rank1]:     self._settle(wait=False)
[rank1]:   File "/home/me/duet/training/inspector/inspector.py", line 248, in _raise
[rank1]:     raise InspectionError(found)
[rank1]: training.inspector.reporting.InspectionError: {}
"""


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("rank 1 had an empty batch at step 6", "collate_fn"),
        ("rank 1 在第 6 步得到空 batch", "collate_fn"),
        ("rank 1 ran out of data: its loop ended after step 5, and rank 0 waits", "all_reduce"),
        ("rank 1 的数据已用完：第 5 步之后其训练循环已结束，rank 0 在第 6 步等待它", "all_reduce"),
    ],
)
def test_a_finding_of_the_inspector_has_its_own_advice_and_the_users_line(
    tmp_path: Path, text: str, advice: str
) -> None:
    (tmp_path / "train.log").write_text(INSPECTED.format(text))
    found = result.diagnose([tmp_path / "train.log"])
    assert (found["cause"], found["rank"]) == ("exception", 1)
    assert found["where"] == "/home/me/train.py:17"
    assert any(advice in one for one in found["advice"])


def test_the_inspector_is_never_the_place() -> None:
    own = "/home/me/duet/training/inspector/inspector.py:248"
    assert traceback.innermost([own]) is None
    assert traceback.innermost(["/venv/lib/python3.11/site-packages/x.py:3", own]) == (
        "/venv/lib/python3.11/site-packages/x.py:3"
    )

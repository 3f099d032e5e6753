"""A lost connection in a log: to another rank, or the program's own."""

from __future__ import annotations

from pathlib import Path

from tests.cases import each
from training.diagnose import result

RESET = "ConnectionResetError: [Errno 104] Connection reset by peer"


@each(
    ("frame", "end", "cause"),
    [
        ("lib/python3.11/http/client.py", RESET, "exception"),
        ("site-packages/torch/distributed/rendezvous.py", RESET, "peer_died"),
        ("lib/python3.11/multiprocessing/connection.py", RESET, "peer_died"),
        ("encode.py", "BrokenPipeError: [Errno 32] Broken pipe", "exception"),
        ("train.py", "FileNotFoundError: [Errno 2] No such file or directory", "exception"),
        ("train.py", "RuntimeError: Connection reset by peer", "peer_died"),  # of C++
    ],
)
def test_a_connection_of_the_program_itself_is_not_a_lost_peer(
    frame: str, end: str, cause: str, tmp_path: Path
) -> None:
    """An upload, the standard input of ffmpeg; the folder of os.getcwd() is deleted."""
    head, frame = "Traceback (most recent call last):\n", f'  File "/u/{frame}", line 3, in f\n'
    (tmp_path / "log").write_text(f"step 1 loss 2.0\n{head}{frame}{end}\n")
    assert result.diagnose([tmp_path / "log"])["cause"] == cause
    (tmp_path / "log").write_text(f"step 1 loss 2.0\n{end}\n")
    assert result.diagnose([tmp_path / "log"])["cause"] == "peer_died", "of an unknown place"


HEAD, FRAME = "Traceback (most recent call last):\n", '  File "/u/train.py", line 3, in f\n'
BROKEN_PIPE = f"{HEAD}{FRAME}    print(loss)\nBrokenPipeError: [Errno 32] Broken pipe\n"
UPLOAD = f'{HEAD}{FRAME}  File "/u/site-packages/requests/adapters.py", line 9, in send\n{RESET}\n'
OF_RANK_0 = "".join(f"[rank0]: {line}\n" for line in BROKEN_PIPE.splitlines())
EXITED = "srun: error: n1: task 0: Exited with exit code 1\n"
ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
KILLED = "srun: error: n1: task 1: Killed\n"
CRASHED = "srun: error: n1: task 1: Segmentation fault (core dumped)\n"


@each(
    ("text", "found"),
    [
        (KILLED + BROKEN_PIPE, ("killed", 1)),
        (BROKEN_PIPE + KILLED, ("killed", 1)),
        (OF_RANK_0 + KILLED + EXITED, ("killed", 1)),
        (EXITED + BROKEN_PIPE + CRASHED, ("segfault", 1)),  # of an earlier step
        (OF_RANK_0 + KILLED.replace("task 1", "task 0"), ("exception", 0)),
        (BROKEN_PIPE + EXITED, ("exception", None)),
        (
            BROKEN_PIPE + "RuntimeError: Connection closed by peer [::1]:9.\n",
            ("exception", None),
        ),
    ],
)
def test_a_connection_of_the_program_itself_may_be_lost_with_a_rank(
    text: str, found: tuple[str, int | None], tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(f"step 1 loss 2.0\n{text}")
    record = result.diagnose([tmp_path / "log"])
    assert (record["cause"], record["rank"]) == found


@each(
    ("text", "rank"),
    [
        (
            f"{OF_RANK_0}[rank1]: {HEAD}[rank1]: {FRAME}[rank1]: RuntimeError: [../third_party/gloo"
            "/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv "
            "operation to complete\n",
            0,
        ),
        (
            f"{OF_RANK_0}[rank1]:[E101 00:00:00.0 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog "
            "caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, "
            "NumelOut=1, Timeout(ms)=600000) ran for 600002 milliseconds before timing out.\n",
            0,
        ),
        (OF_RANK_0 + EXITED + ABORTED + KILLED, 0),
        (OF_RANK_0 + EXITED + CRASHED, 0),
        (f"step 2 loss nan\nstep 3 loss 2.0\nstep 4 loss 2.0\n{UPLOAD}", None),
        (
            "/u/torch/cuda/__init__.py:107: UserWarning: CUDA initialization: The NVIDIA driver on "
            f"your system is too old (found version 11040).\n{BROKEN_PIPE}",
            None,
        ),
        (
            "UserWarning: \nNVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible "
            f"with the current PyTorch installation.\n{BROKEN_PIPE}",
            None,
        ),
    ],
)
def test_a_connection_of_the_program_itself_comes_before_what_follows_from_it(
    text: str, rank: int | None, tmp_path: Path
) -> None:
    """And before warnings."""
    (tmp_path / "log").write_text(f"step 1 loss 2.0\n{text}")
    record = result.diagnose([tmp_path / "log"])
    assert (record["cause"], record["rank"]) == ("exception", rank)


def test_a_rank_killed_after_the_end_of_another_by_a_log_of_srun(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text(f"step 1 loss 2.0\n{BROKEN_PIPE}")
    for text, cause in ((EXITED + KILLED, "exception"), (KILLED + EXITED, "killed")):
        (tmp_path / "srun.err").write_text(text)
        record = result.diagnose([tmp_path / "rank0.log", tmp_path / "srun.err"])
        assert record["cause"] == cause


@each("time", ["", "2026-11-30 02:00:29 "])
def test_a_connection_may_be_lost_with_a_rank_that_raised_an_exception(
    time: str, tmp_path: Path
) -> None:
    """On another machine: rank 0 uses a server in its process."""
    reset = "".join(f"[rank0]: {line}\n" for line in UPLOAD.splitlines())
    failed = f"[rank5]: {HEAD}[rank5]: {FRAME}[rank5]: ValueError: no\n"
    (tmp_path / "node0.log").write_text(f"2026-11-30 02:00:29 step 1 loss 2.0\n{reset}")
    (tmp_path / "node1.log").write_text(f"{time}loading\n{failed}")
    record = result.diagnose([tmp_path])
    assert (record["cause"], record["rank"]) == ("exception", 5)


def report(rank: int, at: str) -> str:
    return (
        "Root Cause (first observed failure):\n[0]:\n"
        f"  time      : 2026-11-30_{at}\n  rank      : {rank} (local_rank: 0)\n"
        f"  exitcode  : 1 (pid: {1000 + rank})\n"
    )


@each(
    ("reset_at", "failed", "rank"),
    [
        (report(0, "02:00:31"), ("02:30:29", report(5, "02:30:31")), 0),
        (report(0, "02:00:31"), ("02:00:29", report(5, "02:00:33")), 5),
        ("", ("02:30:29", report(5, "02:30:31")), 5),  # at any time
        (report(0, "02:00:31"), ("02:00:29", ""), 0),  # a handler of SIGTERM
        (report(1, "02:00:31"), ("02:00:29", ""), 5),
    ],
)
def test_a_connection_lost_long_before_an_exception_is_the_cause(
    reset_at: str, failed: tuple[str, str], rank: int, tmp_path: Path
) -> None:
    """Or lost by the first rank to fail, by the only report of a launcher."""
    reset = "".join(f"[rank0]: {line}\n" for line in UPLOAD.splitlines())
    (tmp_path / "n0.log").write_text(f"2026-11-30 02:00:29 step 1 loss 2.0\n{reset}{reset_at}")
    time, end = failed
    lines = f"[rank5]: {HEAD}[rank5]: {FRAME}[rank5]: ValueError: no\n"
    (tmp_path / "n1.log").write_text(f"2026-11-30 {time} step 1 loss 2.0\n{lines}{end}")
    assert result.diagnose([tmp_path])["rank"] == rank


@each(
    ("lost", "failed", "then", "rank"),
    [
        (0, 5, "", 0),
        (5, 0, "", 5),
        (0, 5, "2026-11-30 02:00:31 waiting\n", 0),
        (0, 5, "2026-11-30 02:00:28 waiting\n", 5),  # certainly before
        (0, 5, report(5, "02:00:33"), 5),
    ],
)
def test_the_only_report_of_a_launcher_decides_before_the_time(
    lost: int, failed: int, then: str, rank: int, tmp_path: Path
) -> None:
    """The last dated line before an exception may be any time before it."""
    reset = "".join(f"[rank{lost}]: {line}\n" for line in UPLOAD.splitlines())
    begin = "2026-11-30 02:00:29 step 1 loss 2.0\n"
    (tmp_path / "n0.log").write_text(f"{begin}{reset}{report(lost, '02:00:31')}")
    lines = "".join(
        f"[rank{failed}]: {line}\n" for line in (HEAD + FRAME + "ValueError: no").splitlines()
    )
    (tmp_path / "n1.log").write_text(f"2026-11-30 02:00:27 step 1 loss 2.0\n{lines}{then}")
    assert result.diagnose([tmp_path])["rank"] == rank


@each(("text", "rank"), [("training failed", 5), ("upload failed, retrying in 60 s", 0)])
def test_an_exception_with_a_time_of_its_own_was_before_a_lost_connection(
    text: str, rank: int, tmp_path: Path
) -> None:
    reset = "".join(f"[rank0]: {line}\n" for line in UPLOAD.splitlines())
    begin = "2026-11-30 02:30:29 step 1 loss 2.0\n"
    (tmp_path / "n0.log").write_text(f"{begin}{reset}{report(0, '02:30:31')}")
    message = f"[rank5]: 2026-11-30 02:00:50 ERROR {text}\n"
    lines = "".join(f"[rank5]: {line}\n" for line in (HEAD + FRAME + "ValueError: no").splitlines())
    (tmp_path / "n1.log").write_text(f"2026-11-30 02:00:27 step 1 loss 2.0\n{message}{lines}")
    assert result.diagnose([tmp_path])["rank"] == rank


def test_a_lost_connection_of_torch_may_be_the_first_of_a_chain(tmp_path: Path) -> None:
    """The rendezvous is at an etcd server."""
    (tmp_path / "log").write_text(
        "Traceback (most recent call last):\n"
        f'  File "/u/lib/python3.11/http/client.py", line 3, in f\n{RESET}\n\n'
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/u/torch/distributed/elastic/rendezvous/etcd_rendezvous.py", line 9, in g\n'
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: it has failed\n"
    )
    assert result.diagnose([tmp_path / "log"])["cause"] == "peer_died"

"""Diagnosis of whole logs: of two ranks that really failed, and of GPUs, NCCL, SLURM and W&B as
their programs print them. expected.json contains an expert's answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.cases import each
from training.diagnose import log_line
from training.diagnose.result import diagnose
from training.diagnose.source import logs_in

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
EXPECTED: dict[str, dict[str, Any]] = json.loads((LOGS / "expected.json").read_text())
FILES = sorted(name for name in EXPECTED if name.endswith(".log"))
FAILING = [name for name in FILES if not name.startswith("none/") and (LOGS / name).stat().st_size]
# Text that a form of a log has before each line.
BEFORE = {
    "prefixed": "node1: ",
    "container": "2025-11-06T10:00:00.123456789Z ",
    "journal": "Jun 01 12:00:00 ws1 python[1234]: ",
    "journal with a date": "2025-06-01T12:00:00+0200 ws1 torchrun[1234]: ",
    "ts": "Jun 01 12:00:00 ",
    "ts with a date": "[2025-06-01 12:00:00] ",
    "date": "2025-06-01 12:00:00 ",
}


def diagnosed(name: str) -> dict[str, Any]:
    return diagnose([LOGS / name])


def right(record: dict[str, Any], name: str) -> bool:
    return record["cause"] in (name.split("/", maxsplit=1)[0], *EXPECTED[name].get("or_cause", []))


@each("name", sorted(EXPECTED))
def test_the_root_cause_is_found(name: str) -> None:
    record, expected = diagnosed(name), EXPECTED[name]
    assert right(record, name), (record["cause"], record["evidence"])
    assert record["rank"] in (expected["rank"], *expected.get("or_rank", []))
    if expected["line"] != "any":
        assert record["line"] in (expected["line"], *expected.get("or_line", []))
    if record["cause"] != "none":
        assert record["summary"] and record["advice"]
        assert record["evidence"] or (LOGS / name).stat().st_size == 0


def test_every_log_has_an_expected_answer_and_exists() -> None:
    assert {
        str(p.relative_to(LOGS)) for p in LOGS.rglob("*.log") if p.parent.parent == LOGS
    } == set(FILES)
    assert all((LOGS / name).exists() for name in EXPECTED)


@each("name", FAILING[::9])
@each("form", ["utf-16", "crlf", "gzip", "coloured", *BEFORE])
def test_the_form_of_a_log_changes_nothing(name: str, form: str, tmp_path: Path) -> None:
    text = decoded((LOGS / name).read_bytes())
    path = tmp_path / "log.txt"
    if form == "utf-16":
        path.write_bytes(text.encode("utf-16"))
    elif form == "crlf":
        path.write_bytes(text.replace("\r\n", "\n").replace("\n", "\r\n").encode())
    elif form == "gzip":
        path.write_bytes(gzip.compress(text.encode()))
    elif form == "coloured":
        path.write_bytes("\n".join(f"\x1b[31m{line}\x1b[0m" for line in text.split("\n")).encode())
    else:
        path.write_bytes("\n".join(BEFORE[form] + line for line in text.split("\n")).encode())
    record = diagnose([path])
    assert right(record, name) and record["line"] == diagnosed(name)["line"]


def decoded(data: bytes) -> str:
    for encoding in (
        ("utf-16",) if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ("utf-8", "gb18030", "latin-1")
    ):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise AssertionError("latin-1 decodes everything")


@each("name", FAILING[::12])
def test_a_truncated_log_is_read(name: str, tmp_path: Path) -> None:
    """A log that ends before its failure gets no invented cause; one that ends in the middle of a
    line is at least read."""
    data = (LOGS / name).read_bytes()
    whole = diagnosed(name)
    right = {
        whole["cause"],
        "none",
        "unknown",
        "peer_died",
        *whole["also"],
        *EXPECTED[name].get("or_cause", []),
    }
    if b" nan," in data:
        right.add("nan_loss")  # a part may end before the loss recovers
    if b"attempting to recover from OOM" in data:
        right.add("gpu_oom")  # a part may end before the steps that show the recovery
    if b"===== start 2" in data:
        right.add("config_error")  # a part may end in the first start
    path = tmp_path / "log.txt"
    for part in range(1, 12):
        end = len(data) * part // 12
        path.write_bytes(data[:end])
        diagnose([path])
        path.write_bytes(data[: data.find(b"\n", end) + 1])
        assert diagnose([path])["cause"] in right


# A log in which nothing has failed is unknown only because nothing has succeeded either.
KNOWN = [name for name in FAILING if not name.startswith("unknown/")]


@each("name", KNOWN[::10])
def test_a_long_healthy_beginning_hides_nothing(name: str, tmp_path: Path) -> None:
    healthy = "".join(
        f"step {i:06d}/200000 | loss: 3.{i % 1000:03d} | lr 2.0e-04 | tok/sec: 118,300\n"
        for i in range(30_000)
    )
    path = tmp_path / "log.txt"
    path.write_bytes(healthy.encode() + decoded((LOGS / name).read_bytes()).encode())
    record = diagnose([path])
    assert right(record, name)
    assert record["line"] == 30_000 + diagnosed(name)["line"]


def test_the_logs_of_a_folder_are_one_run(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text(
        "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:5006.\n"
    )
    (tmp_path / "rank1.log").write_text(
        "step 1 | loss: 3.1\nRuntimeError: CUDA error: out of memory\n"
    )
    (tmp_path / "weights.pt").write_bytes(b"PK\x03\x04\0\0CUDA out of memory")
    assert [path.name for path in logs_in(tmp_path)[0]] == ["rank0.log", "rank1.log"]
    record = diagnose([tmp_path])
    assert (record["cause"], record["rank"], record["line"]) == ("gpu_oom", 1, 2)
    assert record["file"] == str(tmp_path / "rank1.log") and record["also"] == ["peer_died"]


@each("day", ["604", "1120", "0604"])
def test_the_first_of_two_ranks_is_named_by_the_times_of_their_logs(
    day: str, tmp_path: Path
) -> None:
    for rank, second in ((0, "09"), (1, "01")):
        (tmp_path / f"rank{rank}.log").write_text(
            f"step 10 loss 3.2\n[rank{rank}]:[E{day} 10:00:{second}.123456789 "
            f"ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group "
            "watchdog thread terminated with exception: CUDA error: an illegal memory access was "
            "encountered\n"
        )
    record = diagnose([tmp_path])
    assert (record["cause"], record["rank"]) == ("cuda_device_assert", 1)


@each(
    "raw, text",
    [
        ('│ File "a.py", line 3   │', 'File "a.py", line 3'),
        ("[rank1]: | x |", "x"),
        ("| " + "wide" + " " * 50_000 + "|", "wide"),
        ("|" + " " * 50_000 + "x", "|" + " " * 50_000 + "x"),
        ("|", "|"),
    ],
)
def test_a_frame_around_a_line(raw: str, text: str) -> None:
    assert log_line.split(raw)[0] == text


@each(
    ("before", "rank"),
    [("1: ", 1), ("[rank5]: ", 5), ("1: [rank5]: ", 5), ("[default1]:[rank5]: ", 5)],
)
def test_the_rank_that_torch_names_precedes_the_number_of_the_launcher(
    before: str, rank: int, tmp_path: Path
) -> None:
    """The numbers of srun with one torchrun on each machine, and of `torchrun --tee`."""
    frame = '  File "/u/train.py", line 30, in main\n    step()\n'
    text = f"Traceback (most recent call last):\n{frame}ValueError: bad sample\n"
    lines = "".join(f"{before}{line}\n" for line in text.splitlines())
    (tmp_path / "log").write_text(f"step 1 loss 2.0\n{lines}")
    record = diagnose([tmp_path / "log"])
    assert (record["cause"], record["rank"]) == ("exception", rank)
    assert record["where"] == "/u/train.py:30"

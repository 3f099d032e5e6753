"""`./duet diagnose`: its output, its errors and its bug-report bundle."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from training.cli import diagnose as command
from training.core import heartbeat
from training.core.messages import LANGUAGES, msg
from training.core.rundir import RunDir, write_json
from training.diagnose import card, result
from training.watchdog.hang_report import HangFinding

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "fixtures" / "logs"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total "
    "capacity of 31.37 GiB\n"
)
KEY = "0123456789abcdef0123456789abcdef01234567"


def plan(**more: Any) -> dict[str, Any]:
    values = {
        "total_batch_size": 512,
        "device_batch_size": 8,
        "num_workers": 2,
        "out_dir": "experiments",
        "log_dir": "logs",
    }
    return {
        "config": values | {"find_unused_parameters": False},
        "origins": dict.fromkeys(values, "default"),
        "command": {"script": "launch_train.sh", "args": []},
        "ranks": 2,
        "batch": {"device_sequences": 8, "seq_len": 32, "world_size": 2, "accumulation": 1},
        "memory": {"total_bytes": 10 << 30},
        "gpus": [],
    } | more


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "experiments" / "run")
    made.create()
    write_json(made.plan, plan())
    return made


def asked(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "lib" / "run_module.py"), "training.cli.diagnose", *args]
    return subprocess.run(line, capture_output=True, text=True, env=os.environ | env, check=False)


def test_json_output() -> None:
    done = asked(str(LOGS / "gpu_oom" / "01.log"), "--json")
    record = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == ""
    assert {
        "schema_version",
        "cause",
        "rank",
        "line",
        "evidence",
        "confidence",
        "summary",
        "advice",
        "also",
    } <= set(record)
    assert (record["cause"], record["rank"], record["confidence"]) == ("gpu_oom", 1, "high")
    assert record["evidence"].startswith(
        "torch.OutOfMemoryError: CUDA out of memory."
    ) and isinstance(record["advice"], list)


def test_the_card_is_in_the_language_of_the_locale() -> None:
    log = str(LOGS / "gpu_oom" / "01.log")
    english, chinese = (
        asked(log, DUET_LANG="", LC_ALL="C.UTF-8").stdout,
        asked(log, DUET_LANG="", LC_ALL="zh_CN.UTF-8", PYTHONIOENCODING="utf-8").stdout,
    )
    assert (
        "  Cause      gpu_oom: a GPU is out of memory\n" in english
        and "  Who        rank 1\n" in english
        and "  Try        " in english
    )
    assert "  原因       gpu_oom: GPU 显存不足\n" in chinese and "  建议       " in chinese
    assert asked(log, DUET_LANG="zh", LC_ALL="C.UTF-8", PYTHONIOENCODING="utf-8").stdout == chinese


def test_a_healthy_log_gets_one_line() -> None:
    done = asked(str(LOGS / "none" / "01.log"), LC_ALL="C.UTF-8")
    assert (
        done.returncode == 0
        and done.stdout.startswith("  no failure found")
        and done.stdout.count("\n") == 1
    )


def test_standard_input_is_a_log() -> None:
    line = [
        sys.executable,
        str(ROOT / "lib" / "run_module.py"),
        "training.cli.diagnose",
        "-",
        "--json",
    ]
    done = subprocess.run(line, input=f"step 1\n{OOM}".encode(), capture_output=True, check=True)
    assert json.loads(done.stdout)["cause"] == "gpu_oom"


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b"\0\1\2\xff" * 100, b"no line end, no words", "只有中文".encode("gbk")],
)
def test_other_content_is_neither_a_failure_nor_healthy(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    record = result.diagnose([path])
    assert (record["cause"], record["confidence"]) == ("unknown", "low")


def test_all_unreadable_paths_are_reported_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(tmp_path / "a.log"), str(tmp_path / "b.log")]) == 2
    error = capsys.readouterr().err
    assert (
        f"{tmp_path / 'a.log'} does not exist" in error
        and f"{tmp_path / 'b.log'} does not exist" in error
        and "Traceback" not in error
    )


@pytest.mark.parametrize(("words", "part"), [(["--jsn"], "./duet diagnose --json\n")])
def test_a_wrong_option_is_reported(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words) == 2
    assert part in capsys.readouterr().err


def test_a_damaged_gzip_file_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.gz").write_bytes(b"\x1f\x8b broken")
    assert command.main([str(tmp_path / "log.gz")]) == 2
    error = capsys.readouterr().err
    assert "log.gz" in error and "damaged gzip file" in error


def test_a_truncated_gzip_file_is_read_up_to_its_end(tmp_path: Path) -> None:
    packed = gzip.compress(OOM.encode() + os.urandom(100_000))
    (tmp_path / "log.gz").write_bytes(packed[:-50_000])
    assert result.diagnose([tmp_path / "log.gz"])["cause"] == "gpu_oom"


# ── Duet runs
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_advice_for_a_duet_run_has_its_values(run: RunDir) -> None:
    run.rank_log(1).write_text(OOM)
    record = result.diagnose([run.path])
    assert (record["cause"], record["rank"]) == ("gpu_oom", 1)
    assert (
        record["advice"][0]
        == "device_batch_size is 8: try 4, the same 512 tokens per step with 2 × accumulation"
    )
    assert record["advice"][1] == "./launch_train.sh 2 --resume=run --device_batch_size=4"


def test_advice_for_a_log_of_a_duet_run_has_its_values(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUET_LANG", "zh")
    run.rank_log(1).write_text(
        "RuntimeError: DataLoader worker (pid(s) 3216) exited unexpectedly\n"
    )
    record = result.diagnose([run.rank_log(1)])
    assert (
        record["rank"] == 1
        and "./launch_train.sh 2 --resume=run --num_workers=0" in record["advice"]
    )


def test_the_verdict_of_the_run_precedes_its_logs(run: RunDir) -> None:
    run.rank_log(0).write_text(OOM)
    failure = {
        "cause": "hang",
        "rank": 1,
        "summary": "stuck at model.py:12",
        "where": "model.py:12",
        "evidence": ["model.py:12 (forward)"],
    }
    write_json(run.failure, failure)
    record = result.diagnose([run.path])
    assert (record["cause"], record["rank"], record["where"]) == ("hang", 1, "model.py:12")
    assert any("--resume=run" in line for line in record["advice"])


@pytest.mark.parametrize("inside", ["", "ranks", "ranks/rank0.log"])
def test_a_verdict_without_a_known_cause_precedes_the_logs_too(run: RunDir, inside: str) -> None:
    """A killed rank logs nothing, and the others log only its loss."""
    run.rank_log(0).write_text(
        "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:5006.\n"
    )
    failure = {
        "cause": "killed",
        "kind": "died",
        "status": -9,
        "rank": 1,
        "summary": "killed by SIGKILL",
        "time": 1.0,
    }
    write_json(run.failure, failure | {"where": None, "evidence": []})
    record = result.diagnose([run.path / inside])
    assert (record["cause"], record["rank"], record["summary"]) == (
        "killed",
        1,
        "killed by SIGKILL",
    )
    assert "dmesg" in record["advice"][0]


def test_a_finished_script_that_trained_on_nan_is_found(run: RunDir) -> None:
    write_json(run.plan, plan() | {"script": {"path": "main.py"}})
    write_json(run.summary, {"status": "finished", "exit_code": 0, "time": 2.0})
    steps = [f"step {n}/30 loss {'nan' if n > 3 else 2.0} lr 0.1\n" for n in range(30)]
    run.rank_log(0).write_text("".join(steps))
    found = result.diagnose([run.path])
    assert (found["cause"], found["line"]) == ("nan_loss", 5)
    run.rank_log(0).write_text("".join(steps[:4]))
    assert result.diagnose([run.path])["cause"] == "none"


def test_a_run_can_be_named(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(run.summary, {"status": "stopped", "exit_code": 75, "steps": 4, "time": 2.0})
    monkeypatch.setattr(command, "EXPERIMENTS", run.path.parent)
    for words in (["--run=run"], [f"--run={run.path}"], ["run"], [str(run.path)], []):
        assert command.main(["--json", *words]) == 0
        assert json.loads(capsys.readouterr().out)["cause"] == "preempted"
    assert command.main(["--run=rum"]) == 2


def test_a_finished_run_has_no_cause(run: RunDir) -> None:
    run.rank_log(1).write_text(OOM)
    run.event("restart", cause="gpu_oom")
    write_json(run.summary, {"status": "finished", "exit_code": 0, "time": 2.0})
    record = result.diagnose([run.path])
    assert (record["cause"], record["summary"], record["advice"]) == (
        "none",
        "the run finished after 1 restart",
        [],
    )


@pytest.mark.parametrize(("code", "cause"), [(130, "interrupted"), (75, "preempted")])
def test_a_stopped_run_has_the_cause_of_its_exit_code(run: RunDir, code: int, cause: str) -> None:
    write_json(run.summary, {"status": "stopped", "exit_code": code, "steps": 4, "time": 2.0})
    assert result.diagnose([run.path])["cause"] == cause


@pytest.mark.parametrize("reader", LANGUAGES)
@pytest.mark.parametrize("writer", LANGUAGES)
@pytest.mark.parametrize("cause", ["gpu_oom", "unknown"])
def test_a_card_in_a_console_log_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, reader: str, cause: str
) -> None:
    """A card of either language, by a reader of either language."""
    record = {
        "cause": cause,
        "kind": "died",
        "rank": 1,
        "summary": "killed by SIGKILL",
        "where": None,
        "phase": "step 8: forward",
        "waiting": {},
    }
    record |= {
        "phases": {},
        "evidence": [f"step {i} loss 1.2390" for i in range(9)],
        "advice": ["x"],
        "stacks": None,
        "log": "rank1.log",
    }
    console = tmp_path / "console.log"
    monkeypatch.setenv("DUET_LANG", writer)
    shown = card.of_run(record)
    console.write_text(
        f"[INFO] 2025-11-06 10:00:00 start\nstep 8 loss 1.3\n[ERROR] 2025-11-06 10:00:01 training "
        f"failed\n{shown}\n"
    )
    monkeypatch.setenv("DUET_LANG", reader)
    found = result.diagnose([console])
    assert (found["cause"], found["rank"], found["summary"]) == (cause, 1, "killed by SIGKILL")


def test_a_console_log_leads_to_its_run(run: RunDir, tmp_path: Path) -> None:
    console = tmp_path / "redirected.log"
    console.write_text(f"[INFO] 2025-11-06 10:00:00 run directory: {run.path}\n{OOM}")
    assert (
        "./launch_train.sh 2 --resume=run --device_batch_size=4"
        in result.diagnose([console])["advice"]
    )


def test_a_folder_of_runs_is_not_one_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    other = RunDir(run.path.parent / "other")
    other.create()
    write_json(other.plan, plan())
    assert command.main([str(run.path.parent)]) == 2
    assert "contains 2 runs" in capsys.readouterr().err


def test_a_folder_without_logs_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights.pt").write_bytes(b"\0\1")
    assert command.main([str(tmp_path)]) == 2
    assert f"no log in {tmp_path}" in capsys.readouterr().err


def test_a_vanished_run_is_described_by_its_heartbeats(run: RunDir) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    write_json(
        run.supervisor,
        {"pid": int(gone.stdout), "host": socket.gethostname(), "started": time.time()},
    )
    writer = heartbeat.Heartbeat(run.heartbeat(1), 1)
    writer.step = 12
    writer.beat("backward")
    run.rank_log(1).write_text("step 11 | loss: 3.1\n")
    record = result.diagnose([run.path])
    assert record["cause"] == "unknown" and "rank 1: step 12: backward" in record["summary"]
    write_json(
        run.supervisor, {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
    )
    assert result.diagnose([run.path])["cause"] == "none", "it is alive"


def test_the_report_of_a_rank_precedes_the_logs_of_others(run: RunDir) -> None:
    run.rank_log(0).write_text(
        "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:5006.\n"
    )
    error = {
        "rank": 1,
        "guilty_rank": 1,
        "time": 7.0,
        "type": "OutOfMemoryError",
        "message": "CUDA out of memory. Tried to allocate 2.00 GiB.",
    }
    write_json(run.rank_error(1), error)
    record = result.diagnose([run.path])
    assert (record["cause"], record["rank"]) == ("gpu_oom", 1) and "peer_died" in record["also"]


def test_torch_error_files_are_read(tmp_path: Path) -> None:
    """torch/distributed/elastic/multiprocessing/errors/error_handler.py writes it."""
    folder = tmp_path / "attempt_0" / "1"
    folder.mkdir(parents=True)
    message = {
        "message": "RuntimeError: CUDA error: out of memory",
        "extraInfo": {"py_callstack": "…", "timestamp": "1700000000"},
    }
    write_json(folder / "error.json", {"message": message})
    (folder / "stderr.log").write_text("ERROR: see the error file\n")
    record = result.diagnose([tmp_path])
    assert (record["cause"], record["rank"]) == ("gpu_oom", 1)


# ── bug-report bundle
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_bundle_is_complete_and_redacted(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "jdoe1970")
    home = tmp_path / "home" / "jdoe1970"
    monkeypatch.setenv("HOME", str(home))
    secrets = (
        f"WANDB_API_KEY={KEY}\nhf_token: hf_abcdefghijklmnopqrstuvwx\nAuthorization: Bearer "
        f"abcdef123456789\nfrom https://me:word@host/x\n"
    )
    secrets += (
        "run --api-key hunter42 AKIAABCDEFGHIJKLMNOP sk-proj-abcdefghijklmnop1234 "
        "me@example.com 10.3.2.1\n"
    )
    secrets += "post to https://hooks.slack.com/services/T0/B0/xyz\n"
    run.rank_log(1).write_text(f"{secrets}reading {home}/data by jdoe1970\n{OOM}")
    run.event("restart", cause="gpu_oom")
    assert command.main([str(run.path), f"--report-issue={tmp_path / 'bundle.tar.gz'}"]) == 0
    with tarfile.open(tmp_path / "bundle.tar.gz") as tar:
        files = {
            member.name: tar.extractfile(member).read().decode() for member in tar.getmembers()
        }  # type: ignore[union-attr]
    assert {name.partition("/")[2] for name in files} >= {
        "card.txt",
        "diagnosis.json",
        "versions.json",
        "run/plan.json",
        "run/events.jsonl",
        "logs/ranks_rank1.log",
    }
    everything = "\n".join(files.values())
    hidden = [
        KEY,
        "hf_abcdefghijklmnopqrstuvwx",
        "abcdef123456789",
        "me:word",
        str(home),
        "jdoe1970",
        "hunter42",
        "AKIAABCD",
    ]
    for secret in (*hidden, "abcdefghijklmnop1234", "B0/xyz", "me@ex", "10.3.2.1"):
        assert secret not in everything, secret
    assert (
        "CUDA out of memory" in files["bundle/logs/ranks_rank1.log"]
        and "gpu_oom" in files["bundle/card.txt"]
    )
    assert json.loads(files["bundle/run/plan.json"])["config"]["total_batch_size"] == 512
    assert (
        json.loads(files["bundle/versions.json"])["python"]
        and json.loads(files["bundle/diagnosis.json"])["cause"] == "gpu_oom"
    )


def test_a_bundle_never_replaces_a_file(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bundle.tar.gz"
    target.write_text("mine")
    assert command.main([str(run.path), f"--report-issue={target}"]) == 2
    assert "already exists" in capsys.readouterr().err and target.read_text() == "mine"


def test_without_the_packages_of_the_product(tmp_path: Path) -> None:
    """A bare Python and a clone are enough to read a log on any machine."""
    bare = shutil.which("python3", path=os.defpath) or sys.executable
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "class Nothing:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] in ('re2', 'psutil', 'numpy', 'torch', 'pynvml', "
        "'tqdm'): raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Nothing())\n"
        "from training.cli.diagnose import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [bare, "-c", code, str(ROOT), str(LOGS / "gpu_oom" / "01.log"), "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["cause"], json.loads(done.stdout)["rank"]) == ("gpu_oom", 1)


def test_card_rows_have_two_columns_for_any_character_width() -> None:
    assert card.row("Cause", "x") == "Cause      x" and card.row("原因", "x") == "原因       x"


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_verdict_in_a_log_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    """The line that hang detection logs, in either language."""
    monkeypatch.setenv("DUET_LANG", language)
    how = msg("watchdog.stuck_at", frame="model.py:18 (forward)")
    found = HangFinding("hang", 1, None, how, {}, {}, 3.5, "step 5: forward")
    log = tmp_path / "console.log"
    log.write_text(f"[ERROR] 2025-11-06 10:00:01 {found.sentence()}\n")
    record = result.diagnose([log])
    assert (record["cause"], record["rank"], record["signature"]) == (
        "hang",
        1,
        "duet.verdict.hang",
    )

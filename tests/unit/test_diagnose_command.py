"""`./duet diagnose`: its output, its errors and its bug-report bundle."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.unit.conftest import python
from tests.unit.diagnosed import KEY, LOGS, OOM, ROOT, asked, new_run, plan
from tests.unit.monitor_runs import Made, old
from training.cli import diagnose as command
from training.core.messages import LANGUAGES, msg
from training.core.rundir import RunDir, write_json
from training.diagnose import card_rows, result
from training.diagnose.source import logs_in
from training.watchdog.hang_report import HangFinding


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


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


def test_the_module_is_the_same_command(tmp_path: Path) -> None:
    log = str(LOGS / "gpu_oom" / "01.log")
    for words, code in (([log, "--json"], 0), ([str(tmp_path / "none.log")], 2)):
        done = python("-m", "training.diagnose", *words, cwd=ROOT)
        there = python("-m", "training.cli.diagnose", *words, cwd=ROOT)
        assert (done.returncode, done.stdout) == (there.returncode, there.stdout), words
        assert done.returncode == code


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


def test_a_missing_log_is_answered_with_a_similar_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "EXPERIMENTS", tmp_path / "experiments")
    (tmp_path / "train.log").write_text("step 1")
    assert command.main([str(tmp_path / "tarin.log")]) == 2
    error = capsys.readouterr().err
    assert f"./duet diagnose {tmp_path / 'train.log'}\n" in error
    assert "./duet diagnose --help\n" in error
    (tmp_path / "experiments/run1").mkdir(parents=True)
    (tmp_path / "experiments/run1/plan.json").write_text("{}")
    assert command.main(["rnu1"]) == 2
    error = capsys.readouterr().err
    assert "./duet diagnose run1\n" in error and "--help" not in error


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
    made = plan(place={"master_addr": "one.corp.example"}, starter={"host": "head7"})
    made["script"] = {"args": ["--db_password", "hunter2x"]}
    made["config"]["hosts"] = "one.corp.example,bob7@two-b:2,[fd00::7]:2,a"
    write_json(run.plan, made)
    run.rank_log(0).write_text("node 1 is a node of bob7 (two-b, fd00::7), not one or head7\n")
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
        "hunter2x",
        "AKIAABCD",
    ]
    for secret in (*hidden, "abcdefghijklmnop1234", "B0/xyz", "me@ex", "10.3.2.1"):
        assert secret not in everything, secret
    places = json.loads(files["bundle/run/plan.json"])
    assert places["config"]["hosts"] == "HOST,USER@HOST:2,[HOST]:2,a"
    assert (places["place"]["master_addr"], places["starter"]["host"]) == ("HOST", "HOST")
    line = "node 1 is a node of USER (HOST, HOST), not one or HOST"
    assert files["bundle/logs/ranks_rank0.log"] == line
    assert (
        "CUDA out of memory" in files["bundle/logs/ranks_rank1.log"]
        and "gpu_oom" in files["bundle/card.txt"]
    )
    assert json.loads(files["bundle/run/plan.json"])["config"]["total_batch_size"] == 512
    assert (
        json.loads(files["bundle/versions.json"])["python"]
        and json.loads(files["bundle/diagnosis.json"])["cause"] == "gpu_oom"
    )


def test_a_bundle_has_every_log_as_text(tmp_path: Path) -> None:
    logs = [tmp_path / f"node{number}" / "train.log" for number in range(3)]
    for log in logs:
        log.parent.mkdir()
        log.write_text(f"{OOM}of {log.parent.name}\n")
    packed = tmp_path / "train.log.gz"
    packed.write_bytes(gzip.compress(b"first\n" * 100_000 + b"packed\n"))
    target = tmp_path / "bundle.tar.gz"
    assert command.main([*map(str, logs), str(packed), f"--report-issue={target}"]) == 0
    with tarfile.open(target) as tar:
        last = {
            member.name.partition("/logs/")[2]: tar.extractfile(member).read().split(b"\n")[-1]  # type: ignore[union-attr]
            for member in tar.getmembers()
            if "/logs/" in member.name
        }
    assert last == {
        "train.log": b"of node0",
        "train_2.log": b"of node1",
        "train_3.log": b"of node2",
        "train.log.gz": b"packed",
    }


def test_files_of_a_run_that_are_not_its_logs(run: RunDir) -> None:
    hang = (LOGS / "hang" / "01.log").read_text()
    for name in (
        "code/tests/hang/01.log",  # frozen for a SLURM job, by two submissions
        "code_2/notes.txt",
        "profile/rank0.trace.json.gz",
        "replaced/ranks/rank0.log",
        "samples/01.txt",
        "tokenizer/vocabulary",
        ".env",
        "code.env",
    ):
        file = run.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(hang.encode()) if file.suffix == ".gz" else hang.encode())
    for record in ("code.json", "code_2.json"):
        (run.path / record).write_text("{}")
    run.rank_log(1).write_text(OOM)
    assert logs_in(run.path) == ([run.rank_log(1)], [])
    assert result.diagnose([run.path])["cause"] == "gpu_oom"
    (run.path / "code.json").unlink()  # then it is any folder of this name
    assert len(logs_in(run.path)[0]) == 2


@pytest.mark.parametrize("archived", [False, True])
def test_a_bundle_of_an_archived_run_has_no_file_of_this_machine(
    run: RunDir, tmp_path: Path, archived: bool
) -> None:
    log = tmp_path / "console.log"
    log.write_text("of this machine")
    write_json(run.plan, plan(log_file=str(log)))
    if archived:
        write_json(run.archived, {})
    assert command.main([str(run.path), f"--report-issue={tmp_path / 'b.tar.gz'}"]) == 0
    with tarfile.open(tmp_path / "b.tar.gz") as tar:
        assert ("b/run/console.log" in tar.getnames()) is not archived


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
    assert (
        card_rows.row("Cause", "x") == "Cause      x"
        and card_rows.row("原因", "x") == "原因       x"
    )


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


def test_the_newest_run_by_its_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "EXPERIMENTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    newest = Made(tmp_path / "second").run
    old(Made(tmp_path / "first").run.plan)
    for words in (["latest"], ["--run=latest"], []):
        assert command._logs(command.options(words)) == [newest.path], words
    (tmp_path / "latest").write_text("a log")
    assert command._logs(command.options(["latest"])) == [Path("latest")]

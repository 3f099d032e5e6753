"""Unusual logs of other launchers: endless lines, encodings, no progress, unreadable."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from tests.unit.test_monitor_foreign_watch import PATIENCE_S, STEPS, look, made, verdict
from training.core.errors import UserError
from training.diagnose.log_parsers import log_tail as text_module
from training.monitor.log_watch import SILENT, LogWatch


def test_progress_bar_on_an_endless_line(tmp_path: Path) -> None:
    log = tmp_path / "some.log"
    bars = (
        f"\r{n // 1000:3}%|███▊      | {n}/100000 [00:10<00:12, 30.78it/s, "
        f"loss={2 - n / 100000:.5f}]"
        for n in range(100_000)
    )
    log.write_text("".join(bars))
    seen = look(log)
    assert (seen["run"]["source"], seen["progress"]["step"], seen["progress"]["total_steps"]) == (
        "tqdm",
        99_999,
        100_000,
    )
    assert len(seen["log"]["last_lines"]) == 1 and seen["log"]["last_lines"][0].startswith(" 99%")


def test_line_of_many_megabytes_is_read_within_bounds(tmp_path: Path) -> None:
    log = made(tmp_path, STEPS.encode() + b"x" * (5 << 20))
    watch = LogWatch(log)
    assert watch.read(PATIENCE_S)["progress"]["step"] == 100
    with log.open("a") as file:
        file.write("\nstep 110 loss 1.0\n")
    assert watch.read(PATIENCE_S)["progress"]["step"] == 110


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    log = made(tmp_path, STEPS.encode(encoding))
    seen = look(log)
    assert (
        seen["progress"]["step"],
        seen["training"]["loss"],
        len(seen["loss_curve"]["points"]),
    ) == (100, 2.0, 10)
    assert seen["log"]["last_lines"][-1] == "step 100 loss 2.00"


def test_log_in_gbk_and_utf8(tmp_path: Path) -> None:
    """GBK from a program, UTF-8 from a library in it; the last character is incomplete."""
    lines = "".join(f"第 1 轮 训练 step {n} 损失 {4 / n} 学习率 0.001\n" for n in range(1, 5))
    log = made(tmp_path, lines.encode("gbk"))
    seen = look(log)
    assert seen["progress"]["step"] == 4
    assert seen["log"]["last_lines"] == lines.splitlines()
    bar = "\r 50%|█████     | 5/10 [00:01<00:01,  5.27it/s, loss=2.5]"
    seen = look(made(tmp_path, lines.encode("gbk") + bar.encode() + "训".encode("gbk")[:1]))
    assert (seen["progress"]["step"], seen["training"]["loss"]) == (5, 2.5)


def test_accents_in_latin1_are_text(tmp_path: Path) -> None:
    log = made(
        tmp_path, "".join(f"éàü éàü step {n} loss {4 / n}\n" for n in range(1, 5)).encode("latin-1")
    )
    assert look(log)["progress"]["step"] == 4


def test_long_log_in_utf16(tmp_path: Path) -> None:
    long = "".join(f"step {n} loss {n % 7}.5 some more words\n" for n in range(30_000))
    log = made(tmp_path, long.encode("utf-16"))
    assert log.stat().st_size > text_module.WHOLE
    seen = look(log)
    assert (seen["progress"]["step"], seen["training"]["loss"]) == (29_999, 4.5)
    assert len(seen["loss_curve"]["points"]) > 100


def test_gzipped_log(tmp_path: Path) -> None:
    log = tmp_path / "some.log.gz"
    log.write_bytes(gzip.compress(STEPS.encode()))
    assert look(log)["progress"]["step"] == 100


def test_null_bytes_at_the_start(tmp_path: Path) -> None:
    """From a log that was truncated while its program kept writing at the old offset."""
    assert look(made(tmp_path, b"\0" * 3000 + STEPS.encode()))["progress"]["step"] == 100


# Files other than training logs


def test_no_progress(tmp_path: Path) -> None:
    seen = look(made(tmp_path, "GET /index.html 200\nGET /other.html 404\n", ago_s=0))
    assert (seen["run"]["state"], seen["run"]["reason"], seen["run"]["source"]) == (
        "running",
        "no progress lines recognised",
        None,
    )
    assert seen["log"]["last_lines"] == ["GET /index.html 200", "GET /other.html 404"]
    assert verdict(made(tmp_path, "GET /index.html 200\n"))[1].startswith(
        "no progress lines recognised; no output since "
    )  # type: ignore[union-attr]


def test_empty(tmp_path: Path) -> None:
    assert verdict(made(tmp_path, "", ago_s=0)) == ("starting", "no output yet: the log is empty")
    assert verdict(made(tmp_path, ""))[0] == SILENT


def test_binary_file(tmp_path: Path) -> None:
    seen = look(made(tmp_path, bytes(range(256)) * 5000))
    assert seen["run"]["state"] == SILENT and seen["run"]["reason"].startswith("not a text file; ")
    assert (seen["log"]["last_lines"], seen["loss_curve"]["points"]) == ([], [])


@pytest.mark.parametrize("what", ["folder", "missing", "pipe", "\0"])
def test_unreadable_logs(what: str, tmp_path: Path) -> None:
    path = tmp_path / what
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    with pytest.raises(UserError) as raised:
        LogWatch(path)
    words = {
        "folder": "a directory",
        "missing": "No such file or directory",
        "pipe": "not a regular file",
        "\0": "not a valid file name",
    }
    assert raised.value.problems[0].what == f"--log is {str(path)!r}: {words[what]}"


@pytest.mark.parametrize("form", ["[{}] loss: {}\n", "{}: loss {}\n", "[{}] lr 0.1, loss {}\n"])
def test_a_number_before_the_loss_is_a_step_if_it_grows(form: str, tmp_path: Path) -> None:
    log = made(tmp_path, "".join(form.format(n, 9 - n / 100) for n in range(0, 300, 100)))
    watch = LogWatch(log)
    seen = watch.read(PATIENCE_S)
    assert (seen["progress"]["step"], seen["training"]["loss"]) == (None, 7.0)
    steps = [*range(0, 3000, 100), 123_400]
    with log.open("a") as file:
        file.writelines(form.format(n, 9 - n / 100) for n in steps[3:])
    seen = watch.read(PATIENCE_S)
    assert [p["step"] for p in seen["loss_curve"]["points"]] == steps
    assert (seen["progress"]["step"], seen["training"]["loss"]) == (123_400, -1225.0)
    with log.open("a") as file:  # restarted
        file.write(form.format(2900, 0.5))
    seen = watch.read(PATIENCE_S)
    assert (seen["progress"]["step"], len(seen["loss_curve"]["points"])) == (2900, 30)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (3, 0, 2, 1), (0, 8, 16), (0,)])
def test_a_number_before_the_loss_is_a_rank_if_it_repeats(
    ranks: tuple[int, ...], tmp_path: Path
) -> None:
    log = made(tmp_path, "".join(f"[{r}] loss: {n}.{r}\n" for n in range(9) for r in ranks))
    seen = look(log)
    assert (seen["progress"]["step"], seen["training"]["loss"]) == (None, 8.0)
    assert [p["loss"] for p in seen["loss_curve"]["points"]] == list(range(9))

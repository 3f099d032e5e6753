"""Records received by W&B's real client, with a server on loopback."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.cases import each
from tests.conftest import TOKEN
from tests.unit.conftest import ROOT, clean_environment
from tests.unit.wandb_server import WandbServer
from training.config.schema import Config
from training.core.jsonl import parse
from training.core.rundir import RunDir, append_json, read_json, read_records, write_json
from training.trainer import tracking

KEY = "0123456789abcdef0123456789abcdef01234567"
# A rank 0 that has trained a few steps; how it ends is appended.
RANK_0 = """
import sys, time
sys.path.insert(0, sys.argv[1])
from training.config.schema import Config
from training.trainer import metrics_writer, tracking
from training.trainer.metrics_writer import MetricsWriter
from training.core.rundir import RunDir
run, mode, first, last = RunDir(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
run.create()
tracking.WANDB_INIT_S = 3.0
recorder = MetricsWriter(run, Config(wandb_mode=mode, tensorboard=False, notify="my command"))
took = []
for step in range(first, last + 1):
    begun = time.perf_counter()
    recorder.write({"step": step, "loss": 10 / step, "mfu": None, "compute_ms": [1.0, 2.0 + step]})
    took.append(time.perf_counter() - begun)
recorder.write({"step": last, "val_bpb": 1.25})
"""
FAILED = """
while recorder._trackers._threads[0]._queue.qsize():  # it started long before
    time.sleep(0.01)
metrics_writer.failed(1)
"""
# Killed before W&B sends anything, which it does every 15 s, once it has received all records.
KILLED = """
import os, signal
recorder.checkpoint()
recorder._trackers._put(lambda sink: os.kill(os.getpid(), signal.SIGKILL))
recorder._trackers._threads[0].join()
"""
FINISHED = 'recorder.close({"steps": last, "loss_last": 0.5, "status": "done", "mfu": None}, 0)'


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "a run")


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as made:
        yield made


def train(
    run: RunDir,
    mode: str,
    end: str,
    home: Path,
    token: str,
    first: int = 1,
    last: int = 20,
    words: Sequence[str] = (),
    **variables: str,
) -> str:
    """Train in a subprocess and return its standard error. `words`: of its command line."""
    status = -signal.SIGKILL if end == KILLED else 0
    env = clean_environment(HOME=str(home), **{TOKEN: token}, **variables)
    command = [
        sys.executable,
        "-c",
        RANK_0 + textwrap.dedent(end),
        str(ROOT),
        str(run.path),
        mode,
        str(first),
        str(last),
        *words,
    ]
    done = subprocess.run(
        command, env=env, cwd=home, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stderr


def sync(folders: Iterable[Path], home: Path, token: str, server: WandbServer, *more: str) -> None:
    env = clean_environment(
        HOME=str(home), WANDB_BASE_URL=server.address, WANDB_API_KEY=KEY, **{TOKEN: token}
    )
    wandb = str(Path(sys.executable).with_name("wandb"))
    done = subprocess.run(
        [wandb, "sync", "--yes", *more, *map(str, folders)],
        env=env,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def identity(run: RunDir) -> str:
    known = read_json(run.wandb_id)
    assert known and list(known) == ["id", "folder"], "the id of the run and nothing else"
    return str(known["id"])


def assert_nowhere(key: str, *folders: Path) -> None:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert key.encode() not in path.read_bytes(), f"the key is in {path}"


@pytest.mark.slow
def test_an_offline_run_is_sent_by_wandb_sync(
    run: RunDir, tmp_path: Path, token: str, server: WandbServer
) -> None:
    """Two starts of one run become one run on the server, with every record, including those of
    repeated steps."""
    train(run, "offline", FAILED, tmp_path, token, WANDB_API_KEY=KEY)
    append_json(run.events, {"event": "start"})
    append_json(
        run.events, {"event": "restart", "text": "rank 1 was killed: started again from step 15"}
    )
    train(run, "offline", FINISHED, tmp_path, token, first=16, last=24, WANDB_API_KEY=KEY)
    assert_nowhere(KEY, tmp_path)
    parts = sorted(run.wandb.glob("offline-run-*"))
    assert len(parts) == 2 and all(part.name.endswith(identity(run)) for part in parts)

    sync(parts, tmp_path, token, server)
    assert list(server.runs) == [identity(run)]
    got = server.run(identity(run))
    recorded = [r for r in read_records(run.metrics) if "loss" in r]
    assert len(recorded) == 29
    assert sorted((r["step"], r["loss"]) for r in got.history if "loss" in r) == sorted(
        (r["step"], r["loss"]) for r in recorded
    )
    assert {r["compute_ms/rank1"] for r in got.history if r.get("step") == 7} >= {9.0}
    assert [r["event"] for r in got.history if "event" in r] == [
        "restart: rank 1 was killed: started again from step 15"
    ]
    assert (got.summary["status"], got.summary["loss_last"]) == ("done", 0.5)
    assert got.config["depth"] == 12 and "notify" not in got.config


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (FINISHED, 0),
        (FAILED, 1),
        ('recorder.close({"steps": last, "status": "stopped"}, 75)', 75),
        # Ctrl-C is not a failure
        (
            'recorder.close({"steps": last, "status": "stopped"}, 130)',
            0,
        ),
    ],
    ids=["finished", "failed", "preempted", "stopped"],
)
def test_the_end_of_an_online_run_is_recorded(
    run: RunDir, tmp_path: Path, token: str, server: WandbServer, end: str, code: int
) -> None:
    """`wandb sync` and the live client use the same protocol; the exit status decides the state
    that W&B shows."""
    output = train(
        run, "online", end, tmp_path, token, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.address
    )
    got = server.run(identity(run))
    assert got.exit_codes == [code], output
    assert got.losses == {step: 10 / step for step in range(1, 21)}
    assert_nowhere(KEY, tmp_path)


def test_without_a_network_wandb_is_offline_and_the_key_is_not_written(
    run: RunDir, tmp_path: Path, token: str
) -> None:
    output = train(
        run,
        "online",
        FINISHED,
        tmp_path,
        token,
        WANDB_API_KEY=KEY,
        WANDB_BASE_URL="http://127.0.0.1:9",
    )
    assert (
        "W&B online did not start" in output
        and "continuing offline" in output
        and KEY not in output
    )
    assert len(list(run.wandb.glob("offline-run-*/*.wandb"))) == 1
    assert_nowhere(KEY, tmp_path)


@pytest.mark.slow
def test_wandb_gets_every_step_after_a_kill(
    run: RunDir, tmp_path: Path, token: str, server: WandbServer
) -> None:
    """Its service ends with rank 0, and has not sent everything."""
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.address}
    train(run, "online", FINISHED, tmp_path, token, last=8, **online)
    train(run, "online", KILLED, tmp_path, token, first=9, last=16, **online)
    train(run, "online", FINISHED, tmp_path, token, first=17, last=24, **online)
    got = server.run(identity(run))
    assert got.losses == {step: 10 / step for step in range(1, 25)}
    assert [record["step"] for record in got.history if "val_bpb" in record] == [8, 16, 24]
    assert sum(record.get("step") == 4 for record in got.history) == 1, "sent once"


@pytest.mark.slow
def test_wandb_gets_every_step_of_a_start_without_a_network(
    run: RunDir, tmp_path: Path, token: str, server: WandbServer
) -> None:
    """It is down when the first start is killed, and up again for the third one. What the second
    one leaves for `wandb sync` has the first one's steps too."""
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.address}
    train(run, "online", KILLED, tmp_path, token, last=8, **online)
    down = online | {"WANDB_BASE_URL": "http://127.0.0.1:9"}
    train(run, "online", FINISHED, tmp_path, token, first=9, last=16, **down)
    with WandbServer() as other:
        sync(run.wandb.glob("offline-run-*"), tmp_path, token, other)
        assert other.run(identity(run)).losses == {step: 10 / step for step in range(1, 17)}
    train(run, "online", FINISHED, tmp_path, token, first=17, last=24, **online)
    assert server.run(identity(run)).losses == {step: 10 / step for step in range(1, 25)}


def test_the_command_line_in_wandb_is_as_public_as_the_configuration(
    run: RunDir, tmp_path: Path, token: str, server: WandbServer
) -> None:
    """W&B records it itself."""
    hidden = ("curl ntfy.sh/my-topic", "mail me@example.com", "https://me:geheim@host/text")
    words = (
        *("a config.py", f"--notify={hidden[0]}", "--notify", hidden[1], "--depth=4"),
        *("--data", hidden[2], f"--data={hidden[2]}"),
    )
    online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.address}
    train(run, "online", FINISHED, tmp_path, token, words=words, **online)
    for value in hidden:
        assert_nowhere(value, tmp_path)
    (file,) = run.wandb.glob("run-*/files/wandb-metadata.json")
    args = json.loads(file.read_text())["args"]
    assert args[5:] == ["a config.py", "--depth=4", "--data", "…", "--data=…"]


def test_a_tracker_adds_almost_no_time_to_a_step(run: RunDir, tmp_path: Path, token: str) -> None:
    """The real client, while it starts and while it works: a step only waits for a write to a file
    and a queue."""
    code = (
        "import statistics; print(statistics.median(took) * 1e6, max(took) * 1e6, "
        "file=sys.stderr)\n" + FINISHED
    )
    output = train(run, "offline", code, tmp_path, token, last=400)
    median, _ = (float(word) for word in output.splitlines()[0].split())
    assert median < 2000, "microseconds"


def test_wandb_gets_at_the_next_start_what_it_lacks_of_a_start_that_was_killed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while W&B was starting, after step 4; resumed from step 2, without a network."""
    run.create()
    wandb = MagicMock()
    wandb.errors.Error = ConnectionError
    wandb.init.return_value.configure_mock(resumed=False, offline=True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for step in (1, 2, 3, 4):
        append_json(run.metrics, {"time": step, "step": step, "loss": 5.0 - step})
        if step == 2:
            append_json(run.metrics, {"time": step, "step": 2, "val_loss": 2.5})
    wandb.init.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        tracking.WandB(run, Config(), "online", {})
    wandb.init.side_effect = None
    earlier = run.metrics.stat().st_size
    append_json(run.metrics, {"time": 5, "step": 2, "val_loss": 9.0})  # of the next start

    def sent(first: int) -> list[dict[str, float]]:
        wandb.init.return_value.log.reset_mock()
        tracking.WandB(run, Config(), "online", {}, first=first, earlier=earlier)
        return [call.args[0] for call in wandb.init.return_value.log.call_args_list]

    assert sent(3) == [
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": 3.0},
        {"step": 2, "val_loss": 2.5},
    ]
    assert sent(3) == [], "once"


def test_of_a_long_run_only_the_lines_that_wandb_may_lack_are_parsed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.create()
    for step in range(1, 101):
        append_json(run.metrics, {"time": 1.5, "step": step, "loss": 0.5})
    size = run.metrics.stat().st_size
    append_json(run.metrics, {"time": 2.5, "step": 99, "loss": 9.0})  # of the next start
    parsed: list[bytes] = []
    monkeypatch.setattr(tracking, "parse", lambda line: parsed.append(line) or parse(line))
    found = tracking._recorded(run.metrics, size, range(98, 100))
    assert [(record["step"], record["loss"]) for record in found] == [(98, 0.5), (99, 0.5)]
    assert len(parsed) == 2
    cut = tracking._recorded(run.metrics, size - 3, range(98, 102))
    assert [record["step"] for record in cut] == [98, 99]


@each(
    "known, sent, again, lacks",
    [
        (1, 4, [4, 5, 6], 4),  # its evaluation may be missing
        (5, 4, [5, 6], 5),  # the start before has ended with step 4
        (None, 4, [5, 6], 5),  # by a start that was offline
        (None, None, [1, 2, 3, 4, 5, 6], 1),
        (None, 6, [], 7),
        (3, 9, [], 7),  # after the checkpoint
    ],
)
def test_wandb_gets_what_it_lacks_of_earlier_starts(
    known: int | None,
    sent: int | None,
    again: list[int],
    lacks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start from step 7. `sent`: the last step that W&B has; `lacks`: recorded until the end."""
    run, wandb = RunDir(tmp_path), MagicMock()
    wandb.errors.Error = ConnectionError
    summary = {} if sent is None else {"step": sent}
    wandb.init.return_value.configure_mock(resumed=True, offline=False, summary=summary)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for step in range(1, 10):
        append_json(run.metrics, {"time": step, "step": step, "loss": 0.5})
    write_json(run.wandb_id, {"id": "abc", **({"lacks_from": known} if known else {})})
    own = {"id": "abc", "folder": str(run.path)}
    tracker = tracking.WandB(
        run, Config(), "online", {}, first=7, earlier=run.metrics.stat().st_size
    )
    logged = [call.args[0]["step"] for call in wandb.init.return_value.log.call_args_list]
    assert (logged, read_json(run.wandb_id)) == (again, own | {"lacks_from": lacks})
    tracker.close(tracking.End(0))
    assert read_json(run.wandb_id) == own


def test_a_damaged_id_is_replaced(run: RunDir) -> None:
    run.create()
    run.wandb_id.write_text('{"id": "../../etc"}')
    made = tracking._wandb_id(run)
    assert made.isalnum() and tracking._wandb_id(run) == made


def test_a_copy_of_a_run_is_another_run_of_wandb(run: RunDir, tmp_path: Path) -> None:
    run.create()
    first = tracking._wandb_id(run)
    moved = RunDir(tmp_path / "moved")
    run.path.rename(moved.path)
    assert tracking._wandb_id(moved) == first
    write_json(moved.wandb_id, {"id": first, "folder": str(moved.path)})  # it has started there
    tmp_path.joinpath("link").symlink_to(moved.path)
    assert tracking._wandb_id(RunDir(tmp_path / "link")) == first
    shutil.copytree(moved.path, run.path)
    second = tracking._wandb_id(run)
    assert second != first
    assert [tracking._wandb_id(moved), tracking._wandb_id(run)] == [first, second]
    write_json(run.wandb_id, {"id": first})  # of an earlier version
    assert tracking._wandb_id(run) == first

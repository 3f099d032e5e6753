"""The plan: what is decided and written, what is refused with exit 3, and that a dry run touches nothing."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import ENHANCED, LAUNCH, ROOT, SIMPLE, Shell, python
from training.config.schema import FIELDS
from training.core.errors import Exit, Problem, UserError
from training.core.rundir import RunDir, write_json
from training.host import decisions
from training.host.gpus import Gpu, GpuInventory, GpuProcess
from training.host.torch_build import TorchBuild
from training.launcher import rendezvous
from training.plan import request, writer
from training.plan import training_plan as planner
from training.plan.request import Request

GIB = 1 << 30
Write = Callable[..., str]
BALANCED = "configs/dual_gpu/balanced.py"


@pytest.fixture
def folders(home: Path, tmp_path: Path) -> list[str]:
    """Flags that keep a run out of the project."""
    return [f"--out_dir={tmp_path}/runs", f"--log_dir={tmp_path}/logs"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """machine(31, 5): a machine with two GPUs of 32 GiB and so much free memory."""

    monkeypatch.setattr(planner.torch_build, "installed", lambda: TorchBuild("2.99.0", "13.0"))
    monkeypatch.setattr(planner.env_vars, "cpu_count", lambda: 8)

    def has(*free_gib: float, processes: tuple[GpuProcess, ...] = ()) -> None:
        cards = [Gpu(n, f"GPU-{n}", f"Card {n}", 32 * GIB, int(f * GIB), 0, 40, 70.0, (12, 0), processes) for n, f in enumerate(free_gib)]
        monkeypatch.setattr(
            planner.gpus, "inventory", lambda environ: GpuInventory(tuple(cards), f"{len(cards)} on this machine", "580", "13.0")
        )

    return has


@pytest.fixture
def in_project(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Standing in the project, with the default folders elsewhere."""
    monkeypatch.chdir(ROOT)


def make(
    *args: str, script: str = SIMPLE, env: dict[str, str] | None = None, ranks: int | None = None
) -> tuple[Request, dict[str, Any], Any]:
    started = (
        {} if ranks is None else {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    )
    return planner.make(script, list(args), started | (env or {}))


def lacking(*args: str, script: str = SIMPLE, ranks: int | None = None) -> list[Problem]:
    """The problems of a machine that can not do it."""
    with pytest.raises(UserError) as caught:
        make(*args, script=script, ranks=ranks)
    assert caught.value.code == Exit.RESOURCES
    return caught.value.problems


def commands(problems: list[Problem]) -> list[str]:
    """What of the advice is a command of ours."""
    return [f for p in problems for f in p.fixes if f.startswith(("./", "python"))]


# ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_everything_a_later_stage_needs_is_in_it(machine: Callable[..., None], in_project: None) -> None:
    machine(31, 31)
    _, plan, checks = make(BALANCED, "--seed=7", env={"NCCL_TIMEOUT": "9"})
    assert plan["schema_version"] == 1
    assert plan["command"] == {"script": SIMPLE, "args": [BALANCED, "--seed=7"], "cwd": str(ROOT)}
    assert set(plan["config"]) == set(plan["origins"]) == set(FIELDS)
    assert (plan["config"]["seed"], plan["origins"]["seed"]) == (7, "from --seed on the command line")
    assert (plan["config_file"], plan["ranks"], plan["resume"], plan["master_port"]) == (BALANCED, 2, False, 0)
    decided = {n: plan[n]["value"] for n in ("device", "precision", "compile", "device_batch_size", "launcher")}
    assert decided == {"device": "cuda", "precision": "bf16", "compile": True, "device_batch_size": 12, "launcher": "spawn"}
    assert all(plan[n]["reason"] for n in decided)
    assert plan["batch"] == {"device_sequences": 12, "seq_len": 2048, "world_size": 2, "accumulation": 1}
    assert plan["memory"]["free_bytes"] == 31 * GIB
    assert plan["memory"]["needed_bytes"] > plan["memory"]["total_bytes"] > 10 * GIB
    assert [g["name"] for g in plan["gpus"]] == ["Card 0", "Card 1"]
    assert any(n.startswith("NCCL_TIMEOUT=9 has no effect") for n in plan["notes"])
    assert [c.status for c in checks] == ["ok"] * len(checks)
    assert json.loads(json.dumps(plan))["config"] == plan["config"]


def test_the_same_input_gives_the_same_plan_from_both_scripts(machine: Callable[..., None], in_project: None) -> None:
    machine(31, 31)
    plans = [make(BALANCED, script=s)[1] for s in (SIMPLE, ENHANCED)]
    for plan in plans:
        del plan["created"], plan["command"], plan["launch"]
        del plan["retries"]  # how often the ranks start again is the scripts' only difference
        plan["text"] = [s for s in plan["text"] if not s.startswith("recovery: ")]
    assert plans[0] == plans[1]


def test_an_automatic_device_batch_is_a_number_in_the_plan(machine: Callable[..., None], in_project: None) -> None:
    machine(31, 12)
    _, plan, _ = make(BALANCED, "--device_batch_size=auto")
    size = plan["config"]["device_batch_size"]
    assert plan["batch"]["device_sequences"] == plan["device_batch_size"]["value"] == size
    assert 1 <= size < 12 and 12 % size == 0
    assert plan["memory"]["needed_bytes"] <= 12 * GIB
    assert any(f"device_batch_size {size}: the fastest of" in s for s in plan["text"])


def test_the_sentences_carry_the_reasons_and_the_promise(machine: Callable[..., None], in_project: None) -> None:
    machine(31, 31)
    text = "\n".join(make(BALANCED)[1]["text"])
    for part in (
        "2 ranks by spawn: ",
        "device cuda: as asked",
        "precision bf16: ",
        "compile on: ",
        "12 sequences × 2048 tokens × 2 ranks × 1 accumulation step = 49152 tokens per step",
        "data: stdlib, ",
        "the original authors promise 20–22 GB of 32 GB",
    ):
        assert part in text


def test_ranks_that_share_too_few_cores_are_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner.env_vars, "cpu_count", lambda: 2)
    notes = make("8", "--device=cpu", "--depth=1", "--total_batch_size=98304", script=LAUNCH)[1]["notes"]
    assert "CPU: 8 ranks share 2 CPU cores: it works, slowly" in notes


def test_a_wish_that_is_not_fulfilled_is_told(home: Path) -> None:
    wish = ["--device=cpu", "--depth=1", "--use_static_graph"]
    assert make(*wish, script=ENHANCED)[1]["static_graph"]["value"] is True
    _, plan, _ = make(*wish, "--total_batch_size=49152", script=ENHANCED)
    assert plan["static_graph"]["value"] is False
    assert any(n.startswith("use_static_graph: torch's static graph is broken") for n in plan["notes"])


def test_a_busy_gpu_with_room_is_a_warning(machine: Callable[..., None], in_project: None) -> None:
    machine(31, 31, processes=(GpuProcess(4711, GIB, "alice", "python other.py"),))
    _, plan, checks = make(BALANCED)
    assert [c.status for c in checks if c.name.startswith("GPU ")] == ["warning", "warning"]
    assert any("occupied by pid 4711 (alice, 1.0 GiB): python other.py" in n for n in plan["notes"])


def test_our_own_process_is_no_stranger(machine: Callable[..., None], in_project: None) -> None:
    machine(31, 31, processes=(GpuProcess(os.getpid(), GIB, "me", "python"),))
    assert all(c.status == "ok" for c in make(BALANCED)[2])


def test_what_is_chosen_for_the_memory_stands_in_the_plan(machine: Callable[..., None], in_project: None) -> None:
    machine(31, 31)
    _, plan, checks = make("configs/dual_gpu/aggressive.py")
    blocks, chunks = plan["activation_checkpointing"], plan["loss_chunks"]
    assert 0 < blocks["value"] < 20 and chunks["value"] >= 1
    assert blocks["reason"] == "so that 14 sequences fit 31.0 GiB free"
    (said,) = [s for s in plan["text"] if s.startswith("activation checkpointing: ")]
    assert said.startswith(f"activation checkpointing: {blocks['value']} of 20 blocks")
    assert "costs about " in said
    assert plan["memory"]["load"]["blocks"] == blocks["value"]
    assert all(c.status != "error" for c in checks)
    assert plan["config"]["activation_checkpointing"] == "auto", "a resumed run decides again, on its own machine"
    _, asked, _ = make("configs/dual_gpu/aggressive.py", "--activation_checkpointing=20", "--loss_chunks=4")
    assert (asked["activation_checkpointing"], asked["loss_chunks"]["value"]) == ({"value": 20, "reason": "as asked"}, 4)


@pytest.mark.parametrize("more", [["--activation_checkpointing=none"], ["--activation_checkpointing=3", "--loss_chunks=2"]], ids=" ".join)
def test_settings_that_do_not_fit_are_refused_with_some_that_do(
    more: list[str], machine: Callable[..., None], in_project: None, shell: Shell
) -> None:
    machine(31, 31)
    problems = lacking("configs/dual_gpu/aggressive.py", *more)
    assert len(problems) == 2 and problems[0].fixes == problems[1].fixes
    flags = [f.partition("aggressive.py")[2] for f in problems[0].fixes]
    assert any(" --activation_checkpointing=1" in f for f in flags)
    assert any("--device_batch_size=" in f for f in flags)
    assert any("--depth=" in f for f in flags)
    for command in commands(problems):
        script, args = shell.paste(command)
        make(*args, script=script)


# ── a machine that can not do it: exit 3, and advice that works ──────────────────────────────────────────────────────


@pytest.mark.parametrize("more", [[], ["--device=cuda"], ["--device", "cuda"], ["--seed", "7"]], ids=" ".join)
def test_too_few_gpus(more: list[str], machine: Callable[..., None], in_project: None, shell: Shell) -> None:
    machine()
    problems = lacking(BALANCED, *more)
    assert "2 GPUs are needed, 0 visible: 0 on this machine" in problems[0].what
    found = [shell.read(c) for c in commands(problems)]
    assert [(r.config_file, r.config.device) for r in found] == [(Path("configs/dual_gpu/quickstart.py"), "auto")], "no hours on a CPU"


@pytest.mark.parametrize("script", [SIMPLE, LAUNCH])
def test_the_gpus_that_are_there_are_offered(script: str, machine: Callable[..., None], in_project: None, shell: Shell) -> None:
    machine(31)
    args = ["2"] * (script == LAUNCH) + [BALANCED, "--seed=7"]
    problems = lacking(*args, script=script)
    found = [shell.read(c) for c in commands(problems)]
    alone = [r for r in found if r.ranks == 1]
    assert alone, "one GPU is there: a command for one rank"
    assert (str(alone[0].config_file), alone[0].config.seed) == (BALANCED, 7)


@pytest.mark.parametrize(
    "more", [[], ["--device_batch_size=12"], ["--device-batch-size", "12"], ["--device_batch_size=auto"]], ids=" ".join
)
def test_too_little_gpu_memory(more: list[str], machine: Callable[..., None], in_project: None, shell: Shell) -> None:
    machine(31, 1, processes=(GpuProcess(4711, GIB, "alice", "python other.py"),))
    problems = lacking(BALANCED, *more)
    assert len(problems) == 1
    assert "Card 1, 1.0 GiB free of 32.0 GiB: this run needs " in problems[0].what
    assert "occupied by pid 4711 (alice, 1.0 GiB): python other.py" in problems[0].what
    assert "kill 4711   # if it is yours: python other.py" in problems[0].fixes
    before = request.read(SIMPLE, [BALANCED, *more], {}).config
    for command in commands(problems):
        assert shell.read(command).config != before, "advice to do the same again"


@pytest.mark.parametrize("more", [[], ["--device_batch_size=8"], ["--depth", "12"], ["--depth=12", "--device_batch_size=4"]], ids=" ".join)
def test_too_little_host_memory(more: list[str], home: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    monkeypatch.setattr(decisions.cgroups, "available_memory", lambda: 9 * GIB)
    asked = ["--device=cpu", "--activation_checkpointing=none", *more]
    problems = lacking(*asked, script=ENHANCED)
    assert problems[0].what.startswith("4.5 GiB free for each of 2 ranks: this run needs ")
    pasted = [shell.paste(c) for c in commands(problems)]
    assert len(pasted) >= 2  # a smaller micro-batch, a smaller model
    for script, args in pasted:
        make(*args, script=script)  # raises when it does not fit or divide


def test_everything_that_is_missing_is_told_at_once(machine: Callable[..., None], in_project: None, tmp_path: Path) -> None:
    machine(2, 1)
    (tmp_path / "file").touch()
    problems = lacking(BALANCED, f"--out_dir={tmp_path}/file", f"--log_dir={tmp_path}/file/logs")
    assert [p.what.split(" ")[0] for p in problems] == ["Card", "Card", "run", "log"]
    assert all(p.fixes for p in problems)


def test_a_dry_run_shows_what_is_missing_instead(machine: Callable[..., None], in_project: None) -> None:
    machine()
    _, plan, checks = make(BALANCED, "--dry_run")
    text = planner.describe(plan, checks)
    assert "  error    GPUs" in text
    assert "try: ./train_dual_gpu.sh" in text


# ── what is written ──────────────────────────────────────────────────────────────────────────────────────────────────


def written(*args: str, script: str = ENHANCED) -> Path:
    asked, plan, checks = make("--device=cpu", "--depth=1", *args, script=script)
    return writer.write(plan, checks, asked, rendezvous.ask).path


def nul(path: Path) -> list[str]:
    text = path.read_bytes().decode()
    assert text.endswith("\0")
    return text.split("\0")[:-1]


def test_the_run_directory_of_a_plan(folders: list[str], write: Write, tmp_path: Path) -> None:
    run = written(write("my config.py", "seed = 3\n"), *folders)
    assert run.parent == tmp_path / "runs"
    assert run.name.startswith("my config_20")
    assert sorted(p.name for p in run.iterdir()) == sorted(
        ["plan.json", "preflight.json", "launch.argv", "launch.env", "heartbeat", "ranks", "checkpoints"]
    )
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["run_name"], plan["run_dir"], plan["config"]["seed"]) == (run.name, str(run), 3)
    assert Path(plan["log_file"]).parent == tmp_path / "logs"
    assert Path(plan["log_file"]).name.startswith("train_dual_gpu_enhanced_20")
    assert Path(plan["log_file"]).read_text() == ""
    assert {c["name"] for c in json.loads((run / "preflight.json").read_text())["checks"]} >= {"host memory", "run folder"}


def test_the_command_survives_any_character(home: Path, tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s a\n"run" $HOME `id`'
    run = written(f"--out_dir={odd}", f"--log_dir={tmp_path}/logs", "--run_name=x")
    assert run == odd / "x"
    program, *_, module, argument = nul(run / "launch.argv")
    assert (program, module, argument) == (sys.executable, "training.cli.supervise", str(run))
    variables = dict(v.split("=", 1) for v in nul(run / "launch.env"))
    assert variables["DUET_RUN_DIR"] == str(run)
    assert variables["DUET_LOG_FILE"] == json.loads((run / "plan.json").read_text())["log_file"]
    assert variables["OMP_NUM_THREADS"]


def test_only_variables_that_we_set_are_exported(home: Path, tmp_path: Path) -> None:
    asked, plan, checks = planner.make(
        ENHANCED, ["--device=cpu", "--depth=1", f"--out_dir={tmp_path}/runs", f"--log_dir={tmp_path}/logs"], {"OMP_NUM_THREADS": "3"}
    )
    run = writer.write(plan, checks, asked, rendezvous.ask).path
    assert not [v for v in nul(run / "launch.env") if v.startswith("OMP_NUM_THREADS")]
    assert {"name": "OMP_NUM_THREADS", "value": "3", "why": "your own value stays", "origin": "kept"} in plan["variables"]


def test_two_runs_within_a_second_do_not_share_anything(folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.time, "strftime", lambda form: "20261121_040000")
    runs = [written(*folders) for _ in range(3)]
    assert [r.name for r in runs] == ["run_20261121_040000", "run_20261121_040000_2", "run_20261121_040000_3"]
    logs = [json.loads((r / "plan.json").read_text())["log_file"] for r in runs]
    assert len(set(logs)) == 3


def test_a_resumed_run_stays_where_it_is(folders: list[str], tmp_path: Path) -> None:
    run = written(*folders, "--run_name=mine", "--seed=5")
    again = written(*folders, "--resume=mine")
    assert again == run
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["resume"], plan["config"]["seed"], plan["origins"]["seed"]) == (True, 5, "from resumed run mine")
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["mine"]


def test_a_run_that_is_still_running_is_not_resumed(folders: list[str], tmp_path: Path) -> None:
    place = [f"--out_dir={tmp_path}/my runs", folders[1]]
    run = RunDir(written(*place, "--run_name=mine"))
    asked = ["--device=cpu", *place, "--resume=mine"]
    other = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        subprocess.Popen([*other, str(run.path)], stdin=subprocess.PIPE) as supervisor,
        subprocess.Popen(other, stdin=subprocess.PIPE) as stranger,
    ):
        facts = {"pid": supervisor.pid, "host": socket.gethostname()}
        write_json(run.supervisor, facts)
        (problem,) = lacking(*asked, script=ENHANCED)
        assert problem.what == f"mine is still running (pid {supervisor.pid})"
        assert shlex.split(problem.fixes[0]) == ["./monitor_training.sh", f"--run={run.path}"]
        assert problem.fixes[1] == f"kill {supervisor.pid}"
        for harmless in ({"pid": stranger.pid}, {"host": "another"}):
            write_json(run.supervisor, facts | harmless)
            make(*asked, script=ENHANCED)
        stranger.communicate()
        supervisor.communicate()
    write_json(run.supervisor, facts)
    make(*asked, script=ENHANCED)


def test_the_whole_plan_for_people(home: Path) -> None:
    _, plan, checks = make("--device=cpu", "--depth=1", "--max-seq-len=1536", "--dry_run", script=ENHANCED, env={"WANDB_MODE": "offline"})
    text = planner.describe(plan, checks)
    lines = text.splitlines()
    assert lines[0] == "Plan (dry run: nothing is launched, nothing was written)"
    start = lines.index("Configuration") + 1
    shown = {x.split()[0]: x for x in lines[start : lines.index("", start)]}
    assert list(shown) == list(FIELDS)
    assert shown["depth"].split(maxsplit=2) == ["depth", "1", "--depth on the command line"]
    assert shown["max_seq_len"].endswith("--max-seq-len on the command line")
    assert shown["wandb_mode"].endswith("WANDB_MODE in the environment")
    assert shown["seed"].endswith("default")
    for v in plan["variables"]:
        assert [x for x in lines if x.startswith(f"  {v['name']}={v['value']}   {v['origin']}: {v['why']}")]
    assert not any(home.iterdir())


def test_the_plan_is_announced(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = written(*folders)
    planner.announce(json.loads((run / "plan.json").read_text()))
    err = capsys.readouterr().err
    assert f"run directory: {run}\n" in err
    assert "device cpu: as asked" in err
    assert "set OMP_NUM_THREADS=" in err


# ── as a program ─────────────────────────────────────────────────────────────────────────────────────────────────────


def plan_program(*args: str, cwd: Path, **variables: str) -> Any:
    return python("-m", "training.cli.plan", ENHANCED, "--device=cpu", "--depth=1", *args, cwd=cwd, **variables)


def test_it_prints_the_run_directory_and_nothing_else(tmp_path: Path) -> None:
    done = plan_program("--out_dir=runs", "--log_dir=logs", "--run_name=r", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/runs/r\n", "")
    assert (tmp_path / "runs/r/plan.json").exists()


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--depht=1"], 2),
        (["--total_batch_size=7"], 2),
        (["--log_dir=file/logs"], 3),
        (["--out_dir=link"], 3),
        (["--log_dir=link/logs"], 3),
        (["--depth=256"], 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_problems_go_to_standard_error_and_nothing_is_made(args: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    defaults = [f for f in ("--out_dir=runs", "--log_dir=logs") if f.partition("=")[0] not in args[0]]
    done = python("-m", "training.cli.plan", ENHANCED, "--device=cpu", *defaults, *args, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    assert f"nothing was launched (exit {code})" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = plan_program("--dry_run", "--out_dir=runs", "--log_dir=logs", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Plan (dry run")
    assert os.listdir(tmp_path) == []
    (tmp_path / "runs").touch()
    failing = plan_program("--dry_run", "--out_dir=runs", "--log_dir=logs", cwd=tmp_path)
    assert failing.returncode == 3
    assert "is not a folder" in failing.stdout


def test_a_data_file_whose_name_is_no_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text("some text")
    done = plan_program("--out_dir=runs", "--log_dir=logs", "--run_name=r", f"--data={name}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")

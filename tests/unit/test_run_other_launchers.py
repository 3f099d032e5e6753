"""`duet run` with flags of torchrun, accelerate and deepspeed: each is understood or answered with a
command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.test_run_command import ENVIRONMENT
from training.cli import run, run_words
from training.core.errors import Problem, UserError
from training.core.project import ROOT
from training.plan import script_request
from training.plan.script_words import RUN


def answers(words: list[str]) -> list[Problem]:
    """The problems of `duet run WORDS train.py --x`."""
    try:
        translated = run.translate(*run_words.parse([*words, "train.py", "--x"]), ENVIRONMENT)
        read = script_request.read(RUN, translated, ENVIRONMENT)
    except UserError as error:
        return error.problems
    assert (read.runs.path, read.runs.args) == ("train.py", ["--x"]), words
    return []


# Flags of deepspeed/launcher/runner.py, with a value where they take one.
DEEPSPEED = (
    "--num_gpus=2 --num_accelerators=2 --num_nodes=1 --node_rank=0 --master_addr=a --master_port=9"
    " --include=localhost:0 --exclude=localhost:0 --module --no_python --no_local_rank"
    " --enable_each_rank_log=logs --bind_cores_to_rank --bind_core_list=0 --save_pid --force_multi"
    " --hostfile=hosts --ssh_port=2222 --launcher=pdsh --launcher_args=x --no_ssh --no_ssh_check"
    " --venv_script=x --autotuning=run --elastic_training --min_elastic_nodes=1"
    " --max_elastic_nodes=2"
)


def options(tool: str) -> list[list[str]]:
    """Every option of a launcher, from its own parser where there is one."""
    if tool == "deepspeed":
        return [[word] for word in DEEPSPEED.split()]
    if tool == "torchrun":
        parser = pytest.importorskip("torch.distributed.run").get_args_parser()
    else:
        launch = pytest.importorskip("accelerate.commands.launch", reason="missing: make peers")
        parser = launch.launch_command_parser()
    return [
        [
            max(one.option_strings, key=len),
            *([] if one.nargs == 0 else [str((one.choices or ["2"])[0])]),
        ]
        for one in parser._actions
        if one.option_strings and one.dest != "help"
    ]


@pytest.mark.parametrize("tool", ["torchrun", "accelerate", "deepspeed"])
def test_every_flag_of_another_launcher_is_understood_or_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if tool == "accelerate":
        monkeypatch.syspath_prepend(str(ROOT / ".tools/peers"))
    Path("train.py").write_text("")
    Path("hosts").write_text("localhost slots=2\n")
    documented = (ROOT / "docs/migrating.md").read_text()
    missing, unanswered = [], {}
    for words in options(tool):
        name = words[0].partition("=")[0]
        parts = name.split("_")
        groups = [f"`{'_'.join(parts[:end])}_…`" for end in range(1, len(parts))]
        if not re.search(rf"`{name}\b", documented) and not any(g in documented for g in groups):
            missing.append(name)
        for problem in answers(words):
            # the flag belongs to the script, or to no program
            if problem.code in ("script.own_flag", "script.file", "run.no_program", "script.field"):
                unanswered[name] = problem.what
    assert (missing, unanswered) == ([], {})


def test_flags_of_every_version_of_torchrun_are_documented() -> None:
    documented = (ROOT / "docs/migrating.md").read_text()
    accepted = {*run_words.TORCHRUN, *run_words.IGNORED_SWITCHES}
    named = set(re.findall(r"`--([a-z-]+)[`=]", documented))
    assert {name.replace("_", "-") for name in accepted} - named == set()


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("-n 2 --mixed_precision bf16", "ACCELERATE_MIXED_PRECISION=bf16 ./duet run -n 2"),
        ("--num_processes=2 --cpu", "ACCELERATE_USE_CPU=true ./duet run -n 2 --device=cpu"),
        ("--num_processes=2 --multi_gpu -q", "./duet run -n 2"),
        (
            "--num_processes=4 --main_process_port=9 --use_fsdp --fsdp_version 2",
            "./duet watch -- accelerate launch --num_processes=4 --main_process_port=9 --use_fsdp"
            " --fsdp_version=2",
        ),
        ("-i localhost:2,3", "CUDA_VISIBLE_DEVICES=2,3 ./duet run -n 2"),
        ("--include=a:0@b:0", "CUDA_VISIBLE_DEVICES=0 ./duet run -n 1 --hosts=a,b"),
        (
            "--include=a:0,1@b:2,3",
            "./duet watch -- deepspeed --include=a:0,1@b:2,3",
        ),
        ("--include=a@b:1", "./duet watch -- deepspeed --include=a@b:1"),
        (
            "--hostfile=hosts --include=b:0,1",
            "CUDA_VISIBLE_DEVICES=0,1 ./duet run -n 2 --hosts=b",
        ),
        ("--hostfile hosts --num_nodes=1 --num_gpus 2", "./duet run -n 2 --hosts=a:2"),
        ("--num_nodes=2 --hostfile=three", "./duet run -n 4 --hosts=a:4,b:4"),
        ("--num_nodes=9 --hostfile=hosts", "./duet run -n 2 --hosts=a:2,b:2"),
        ("--ssh_port 22 --hosts a,b", "./duet run -n 1 --hosts=a,b --ssh_args='-p 22'"),
        ("-n 2 --no_ssh", "./duet watch -- deepspeed --num_gpus=2 --no_ssh"),
        (
            "--no_ssh --hostfile hosts --node_rank 1 --master_addr h --master_port 1234",
            "./duet watch -- deepspeed --hostfile=hosts --node_rank=1 --master_addr=h"
            " --master_port=1234 --no_ssh",
        ),
        (
            "--hostfile hosts --launcher slurm --launcher_args=-A",
            "./duet watch -- deepspeed --hostfile=hosts --launcher=slurm --launcher_args=-A",
        ),
        ("--launcher=pdsh", "./duet watch -- deepspeed --launcher=pdsh"),
        ("--launcher OpenMPI -n 2", "./duet watch -- deepspeed --num_gpus=2 --launcher=OpenMPI"),
        (
            "--launcher=mpich --retries=2 --run_name=a --dry_run",
            "./duet watch --dry_run --retries=2 --run_name=a -- deepspeed --launcher=mpich",
        ),
        (
            "--virtual-local-rank --nnodes 2 --node-rank 1 --master-addr h --nproc-per-node 2",
            "./duet watch -- torchrun --nproc_per_node=2 --nnodes=2 --node_rank=1 --master_addr=h"
            " --virtual_local_rank",
        ),
        (
            "-n 2 --virtual-local-rank --tee 3 --max-restarts 3 --log-dir logs",
            "./duet watch -- torchrun --nproc_per_node=2 --tee=3 --max_restarts=3 --log_dir=logs"
            " --virtual_local_rank",
        ),
        (
            "-n 2 --nnodes=2 --master_addr=h --use_fsdp --tee 0:3,1:0",
            "./duet watch -- accelerate launch --num_processes=4 --num_machines=2"
            " --main_process_ip=h --tee=0:3 --use_fsdp",
        ),
        ("-n 2 --exclude=a", "./duet watch -- deepspeed --exclude=a"),
        ("--exclude=localhost:0", "./duet watch -- deepspeed --exclude=localhost:0"),
        (
            "--num_accelerators=2 --no_ssh",
            "./duet watch -- deepspeed --num_accelerators=2 --no_ssh",
        ),
        ("--config_file a.yaml", "./duet watch -- accelerate launch --config_file=a.yaml"),
        ("--use_fsdp", "./duet watch -- accelerate launch --use_fsdp"),
        ("-n 2 --use_fsdp", "./duet watch -- accelerate launch --num_processes=2 --use_fsdp"),
        (
            "-n 2 --virtual-local-rank",
            "./duet watch -- torchrun --nproc_per_node=2 --virtual_local_rank",
        ),
        (
            "-n 2 --num_machines=2 --machine_rank=1",
            "./duet run -n 2 --node_rank=1 --nnodes=2 --master_addr=ADDRESS",
        ),
        ("--num_nodes 2 --num_gpus 8", "./duet run -n 8 --hosts=a,b"),
        (
            "--num_nodes 2 --num_gpus 8 --master_addr h",
            "./duet run -n 8 --master_addr=h --nnodes=2",
        ),
        (
            "--num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1"
            " --main_process_port 29500",
            "./duet run -n 2 --master_port=29500 --master_addr=10.0.0.1 --node_rank=1 --nnodes=2",
        ),
        (
            "--num_processes=6 --nnodes=3 --master_addr=10.0.0.1",
            "./duet run -n 2 --nnodes=3 --master_addr=10.0.0.1",
        ),
    ],
)
def test_the_answer_is_a_whole_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("hosts").write_text("a slots=2\nb slots=2\n")
    Path("three").write_text("a slots=4\nb slots=4\nc slots=4\n")
    found = answers(words.split())
    assert found and {problem.fixes[0] for problem in found} == {f"{fix} train.py --x"}
    assert all(problem.code in ("flag.launcher", "flag.unknown") for problem in found)


def test_a_total_that_machines_cannot_share_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    found = answers(["--num_processes=5", "--num_machines=2"])
    assert [(problem.code, problem.fixes) for problem in found] == [
        ("ranks.value", [f"./duet run -n {n} --hosts=a,b train.py --x" for n in (2, 3)]),
        ("flag.unknown", ["./duet run -n 2 --hosts=a,b train.py --x"]),
    ]


def test_a_list_in_place_of_a_hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    (problem,) = answers(["-n", "1", "-H", "a:1,b:1"])
    assert (problem.code, problem.fixes) == (
        "hosts.file",
        ["./duet run -n 1 --hosts=a:1,b:1 train.py --x"],
    )

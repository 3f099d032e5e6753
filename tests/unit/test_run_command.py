"""`duet run`: its words as those of launch_train.sh, and back."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.conftest import clean_environment
from training.cli import run, run_words, watch
from training.core.errors import Exit, UserError
from training.host.platform_env import SHUTDOWN
from training.launcher import timeouts
from training.plan import script_request
from training.plan.cli_args import command
from training.plan.script_words import RUN

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}


def translated(line: str) -> str:
    return " ".join(run.translate(*run_words.parse(line.split()), ENVIRONMENT))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train.py", "1 --script=train.py"),
        ("-n 2 train.py -n 4 --dry_run", "2 --script=train.py -- -n 4 --dry_run"),
        ("-n2 -- train.py -- x", "2 --script=train.py -- x"),
        ("-n2 train.py a -- x", "2 --script=train.py -- a -- x"),
        ("--nproc-per-node=3 -m a.b --x", "3 --module --script=a.b -- --x"),
        ("--nproc_per_node 3 --no-python prog", "3 --no_python --script=prog"),
        ("-n cpu train.py", f"{len(os.sched_getaffinity(0))} --script=train.py"),
        ("-n two train.py", "two --script=train.py"),
        ("--standalone --rdzv-backend c10d --rdzv-id 7 t.py", "1 --script=t.py"),
        (
            "--nnodes=2 --node-rank 1 --rdzv-endpoint host:29400 t.py",
            "1 --nnodes=2 --node_rank=1 --master_addr=host --master_port=29400 --script=t.py",
        ),
        ("-n 2 --nnodes=1:4 t.py", "2 --nnodes=4 --min_ranks=2 --script=t.py"),
        ("-n 2 --nnodes=1:4 --min_ranks=3 t.py", "2 --nnodes=4 --min_ranks=3 --script=t.py"),
        ("-n 2 --nnodes=1:4 --max-restarts=0 t.py", "2 --nnodes=4 --retries=0 --script=t.py"),
        ("--nnodes=2:2 t.py", "1 --nnodes=2 --script=t.py"),
        ("--max-restarts=3 --log-dir logs t.py", "1 --retries=3 --log_dir=logs --script=t.py"),
        ("--tee 3 --redirects 3 t.py", "1 --show_ranks=all --script=t.py"),
        ("-t 0:3,1:0,2:1 t.py", "1 --show_ranks=0,2 --script=t.py"),
        ("-t 1:3 t.py", "1 --show_ranks=0,1 --script=t.py"),
        ("-t 0:0,1:3 t.py", "1 --show_ranks=1 --script=t.py"),
        ("-t3 -r1 t.py", "1 --show_ranks=all --script=t.py"),
        ("-n 2 --rdzv_id= --role= t.py", "2 --script=t.py"),  # not needed
        (
            "--rdzv-conf join_timeout=9,read_timeout=8 t.py",
            "1 --rendezvous_timeout=9 --script=t.py",
        ),
        ("--rdzv_conf=timeout=9 t.py", "1 --rendezvous_timeout=9 --script=t.py"),
        ("--rdzv_conf=last_call_timeout=9,is_host=1 t.py", "1 --script=t.py"),
        ("--local-ranks-filter 0 --role r --tee 3 t.py", "1 --show_ranks=0 --script=t.py"),
        ("--max_restarts=0 --max-restarts=2 t.py", "1 --retries=2 --script=t.py"),
        (
            "--master_port=1 --master_addr=a --rdzv_endpoint=[::1]:29500 t.py",
            "1 --master_addr=::1 --master_port=29500 --script=t.py",
        ),
        ("--rdzv_endpoint=[::1] t.py", "1 --master_addr=::1 --script=t.py"),
        ("--master-addr [::1] t.py", "1 --master_addr=::1 --script=t.py"),
        ("--nproc_per=3 --standal --use_env t.py", "3 --script=t.py"),
        ("--shutdown-timeout 9 t.py", "1 --script=t.py"),  # a variable
        ("--rdzv 3 t.py", "1 --rdzv=3 --script=t.py"),  # of several flags
        ("--local-ranks-filter=0,1 t.py", "1 --show_ranks=0,1 --script=t.py"),
        ("--dry_run --hang_timeout 9 t.py", "1 --dry_run --hang_timeout=9 --script=t.py"),
        ("--no-report --debug t.py", "1 --no-report --debug --script=t.py"),
        ("-n 2 --hosts=a:8,b t.py", "2 --hosts=a:8,b --script=t.py"),
        ("--hosts a:8,b:8 t.py", "8 --hosts=a:8,b:8 --script=t.py"),
        ("--hosts a:1,b:2 t.py", "2 --hosts=a:1,b:2 --script=t.py"),  # refused by the plan
        ("--unknown 3 t.py", "1 --unknown=3 --script=t.py"),
    ],
)
def test_words(line: str, words: str) -> None:
    assert translated(line) == words


def test_the_time_of_the_ranks_that_save_is_that_of_torchrun_s_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SHUTDOWN, "")
    assert timeouts.shutdown_s() == timeouts.SHUTDOWN_S
    run_words.set_shutdown(
        run_words.parse(["--shutdown-timeout=7", "--shutdown_t", "9", "t.py"])[0]
    )
    assert timeouts.shutdown_s() == 9.0


def test_a_program_is_required_and_gpu_needs_one() -> None:
    for line, codes in (
        ("-n 2", ["run.no_program"]),
        ("-n", ["run.no_program", "ranks.value"]),
        ("-n gpu t.py", ["run.no_gpu"]),
    ):
        with pytest.raises(UserError) as caught:
            translated(line)
        assert [problem.code for problem in caught.value.problems] == codes
    for words in (["-n", "-1"], ["-n", "2", ""]):
        with pytest.raises(UserError) as caught:
            run.translate(*run_words.parse(words), ENVIRONMENT)
        assert {fix for p in caught.value.problems for fix in p.fixes} == {
            "./duet run -n 2 main.py"
        }


def test_a_number_of_processes_is_suggested_with_the_user_s_program() -> None:
    for words, environ in (
        (["-n", "gpu"], {}),
        ([], POD | {"PET_NPROC_PER_NODE": "many"}),
    ):
        with pytest.raises(UserError) as caught:
            parsed = run_words.parse([*words, "--debug", "t.py", "a b"])
            run.translate(*parsed, ENVIRONMENT | environ)
        fix = caught.value.problems[0].fixes[-1]
        assert fix == "./duet run -n 2 --debug t.py 'a b'"


@pytest.mark.parametrize(
    ("words", "code", "fixes"),
    [
        (["-n", "", "--debug"], "ranks.value", ["./duet run -n 2 --debug t.py 'a b'"]),
        (["--nproc_per_node="], "ranks.value", ["./duet run -n 2 t.py 'a b'"]),
        (["-n", "-1", "--debug"], "ranks.value", ["./duet run -n 2 --debug t.py 'a b'"]),
        (["--debug", "8"], "script.file", ["./duet run -n 8 --debug t.py 'a b'"]),
        (["--rdzv-endpoint="], "flag.no_value", []),
        (["--master-addr="], "flag.no_value", ["--master_addr=ADDRESS t.py"]),
        (["--max-restarts", ""], "flag.no_value", []),
        (["--tee", ""], "flag.no_value", []),
        (["-n", "8", "--tee", "7"], "script.show_ranks", ["-n 8 --tee=3 t.py"]),
        (["--tee=0:3,1:4"], "script.show_ranks", ["--tee=3"]),
        (["--shutdown-timeout="], "flag.no_value", []),
        (["--shutdown-timeout=-1"], "field.value", ["--shutdown-timeout=30 t.py"]),
        (["--nnodes=3:1"], "field.value", ["--nnodes=1:3 t.py"]),
        (["--nnodes=0:2"], "field.value", ["--nnodes=1:2 t.py"]),
        (["--rdzv-endpoint=a:port"], "field.value", ["--rdzv-endpoint=a:29500 t.py"]),
        (["--rdzv-endpoint", "a:1:2"], "field.value", ["--rdzv-endpoint=a:29500 t.py"]),
        (["--master-addr=a:1"], "field.value", ["--master-addr=a t.py"]),
        (["--nporc-per-node=2"], "script.own_flag", ["--nproc-per-node=2 t.py"]),
        (["--max_restrats", "2"], "script.own_flag", ["--max-restarts=2 t.py"]),
    ],
)
def test_a_value_that_would_silently_count_as_none(
    words: list[str], code: str, fixes: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        run.translate(*run_words.parse([*words, "t.py", "a b"]), ENVIRONMENT)
    (problem,) = caught.value.problems
    assert problem.code == code and len(problem.fixes) == len(fixes)
    assert all(part in fix for part, fix in zip(fixes, problem.fixes, strict=True))


def test_launch_with_flags_of_run_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_text("depth = 4\n")
    for line, meant in (
        ("-n 2 train.py", True),
        ("-n2 train.py", True),
        ("--max-restarts=1 -n 2 train.py", True),
        ("--nproc-per-node=2 train.py config.py", True),
        ("-m train", True),
        ("--no-python ./p.sh", True),
        ("-n 2 config.py", False),
        ("-n 2 --script config.py", False),
        ("2 train.py -n 2", False),
        ("--master_port=29500 2 train.py", False),
    ):
        assert run_words.is_meant(line.split()) == meant, line


ELASTIC = "--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=h:29500 --rdzv_id=7"


@pytest.mark.parametrize(
    ("line", "environ", "code", "fixes"),
    [
        (
            f"{ELASTIC} t.py --x",
            {},
            "nodes.no_node_rank",
            [
                "-n 1 --nnodes=2 --master_addr=h --master_port=29500 --node_rank=0 t.py --x",
                "-n 1 --nnodes=2 --master_addr=h --master_port=29500 --node_rank=1 t.py --x",
                "-n 1 --hosts=a,b t.py --x",
            ],
        ),
        (
            "-n 2 --rdzv-backend c10d -m a.b",
            {"DUET_NNODES": "2", "DUET_MASTER_ADDR": "h"},
            "nodes.no_node_rank",
            ["-n 2 --node_rank=0 -m a.b", "-n 2 --node_rank=1 -m a.b", "-n 2 --hosts=a,b -m a.b"],
        ),
        ("--rdzv_backend=etcd --rdzv_endpoint=s:2379 t.py", {}, "run.backend", ["-n 1 t.py"]),
        (
            "--nnodes=1:3 --node_rank=1 --rdzv_backend=etcd-v2 --rdzv_endpoint=s:2379 t.py",
            {},
            "run.backend",
            [
                "-n 1 --nnodes=3 --node_rank=1 --min_ranks=1 --master_addr=ADDRESS t.py",
                "-n 1 --min_ranks=1 --hosts=a,b,c t.py",
            ],
        ),
    ],
)
def test_machines_without_a_number_are_refused_at_once(
    line: str, environ: dict[str, str], code: str, fixes: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        run.translate(*run_words.parse(line.split()), ENVIRONMENT | environ)
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.code) == (code, Exit.CONFIG)
    assert [fix.partition("   #")[0] for fix in problem.fixes] == [f"./duet run {f}" for f in fixes]


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        (f"{ELASTIC} --node_rank=0", {}),
        (ELASTIC, {"DUET_NODE_RANK": "1"}),
        (ELASTIC, {"SKYPILOT_NODE_IPS": "a\nb", "SKYPILOT_NODE_RANK": "1"}),
        (ELASTIC, {"JOB_COMPLETION_INDEX": "1"}),
        (f"{ELASTIC} -n 2 --hosts=a,b", {}),
        ("--nnodes=2 --rdzv_backend=static --master_addr=h", {}),
        ("--nnodes=1:1 --rdzv_backend=c10d --rdzv_endpoint=localhost:0", {}),
    ],
)
def test_machines_with_a_number_start(line: str, environ: dict[str, str]) -> None:
    words = run.translate(*run_words.parse([*line.split(), "t.py"]), ENVIRONMENT | environ)
    assert words[-1] == "--script=t.py"


POD = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h", "PET_NPROC_PER_NODE": "4"}


@pytest.mark.parametrize(
    ("line", "environ", "count"),
    [
        ("t.py", POD, "4"),
        ("-n 2 t.py", POD, "2"),
        ("t.py", POD | {"PET_NPROC_PER_NODE": "cpu"}, str(len(os.sched_getaffinity(0)))),
        ("t.py", POD | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, "1"),
        ("--launcher=spawn t.py", POD, "1"),
        ("--hosts=localhost,b t.py", POD, "1"),
        ("t.py", {"PET_NPROC_PER_NODE": "4"}, "1"),  # of a shell profile
    ],
)
def test_processes_of_a_pod(line: str, environ: dict[str, str], count: str) -> None:
    assert run.translate(*run_words.parse(line.split()), ENVIRONMENT | environ)[0] == count


@pytest.mark.parametrize(
    ("line", "environ", "limit"),
    [
        ("t.py", {"PET_NNODES": "1:2"}, ["--min_ranks=4"]),  # of 4 ranks each
        ("--min_ranks=6 t.py", {"PET_NNODES": "1:2"}, ["--min_ranks=6"]),
        ("t.py", {"PET_NNODES": "1:2", "DUET_MIN_RANKS": "6"}, []),
        ("--nnodes=2 t.py", {"PET_NNODES": "1:2"}, []),
        ("t.py", {"PET_NNODES": "2:2"}, []),
    ],
)
def test_an_elastic_pod_continues_with_fewer(
    line: str, environ: dict[str, str], limit: list[str]
) -> None:
    words = run.translate(*run_words.parse(line.split()), ENVIRONMENT | POD | environ)
    assert [word for word in words if word.startswith("--min_ranks")] == limit


@pytest.mark.parametrize(
    ("text", "code"), [("four", "environment.rank_variable"), ("gpu", "run.no_gpu")]
)
def test_processes_of_a_pod_that_cannot_start(text: str, code: str) -> None:
    with pytest.raises(UserError) as caught:
        run.translate([], ["t.py"], ENVIRONMENT | POD | {"PET_NPROC_PER_NODE": text})
    (problem,) = caught.value.problems
    assert problem.code == code and f"PET_NPROC_PER_NODE is '{text}'" in problem.what


def test_ranks_of_other_machines_are_not_counted_on_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list").write_text("login@a\nb\n")
    for line in ("--hosts=login@a,b t.py --x", "-n gpu --hostfile=list t.py --x"):
        with pytest.raises(UserError) as caught:
            run.translate(*run.parse(line.split()), ENVIRONMENT)
        (problem,) = caught.value.problems
        assert problem.code == "ranks.of_hosts" and "login@a,b" in problem.what
        listed = "--hosts=login@a,b" if "--hosts" in line else "--hostfile=list"
        assert problem.fixes == [
            f"./duet run -n 8 {listed} t.py --x",
            "./duet run --hosts=login@a:8,b:8 t.py --x",
        ]
        for fix in problem.fixes:
            assert run.translate(*run.parse(fix.split()[2:]), ENVIRONMENT)[0] == "8"
    with pytest.raises(UserError):
        run.translate([], ["t.py"], ENVIRONMENT | {"DUET_HOSTS": "a,b"})
    words = run.translate([], ["t.py"], ENVIRONMENT | {"DUET_HOSTS": "a:4,b:4"})
    assert words[0] == "4"
    assert run.translate(*run.parse(["--hosts=b,localhost", "t.py"]), ENVIRONMENT)[0] == "1"


def test_a_suggested_command_is_one_of_duet_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my t.py").touch()
    words = ["2", "--master_port=29500", "--module", "--script=my t.py", "--", "--x", "a b"]
    assert command(RUN, words, master_port=29501) == (
        "./duet run -n 2 --master_port=29501 -m 'my t.py' --x 'a b'"
    )
    with pytest.raises(UserError) as caught:
        script_request.read(RUN, ["2", "--script=my u.py", "--", "--x", "1"], {})
    assert caught.value.problems[0].fixes == ["./duet run -n 2 'my t.py' --x 1"]
    with pytest.raises(UserError) as caught:
        script_request.read(RUN, ["2", "--epochs=3", "--script=my t.py", "--", "--x"], {})
    assert caught.value.problems[0].fixes[-1] == "./duet run -n 2 'my t.py' --epochs=3 --x"


def test_a_run_is_named_after_project_and_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my gpt").mkdir()
    monkeypatch.chdir(tmp_path / "my gpt")
    Path("train.py").touch()
    environ = {"PATH": os.environ["PATH"]}
    for words, name in (
        (["--script=train.py"], "my_gpt_train"),
        (["--script=../my gpt/train.py"], "my_gpt_train"),
        (["--module", "--script=scripts.train"], "my_gpt_scripts.train"),
        (["--script=env"], "my_gpt_env"),
        (["--watch", "--script=env"], "my_gpt_env"),
    ):
        assert script_request.read(RUN, ["2", *words], environ).base_name == name


def test_words_of_a_watched_command() -> None:
    words = ["--hang_timeout", "9", "--", "torchrun", "--nproc-per-node=2", "t.py", "--", "-n", "2"]
    translated = watch.translate(*run_words.parse(words))
    assert translated[:4] == ["1", "--hang_timeout=9", "--watch", "--script=torchrun"]
    assert translated[4:] == ["--", "--nproc-per-node=2", "t.py", "--", "-n", "2"]
    assert command(RUN, translated, hang_timeout=30) == (
        "./duet watch --hang_timeout=30 -- torchrun --nproc-per-node=2 t.py -- -n 2"
    )
    with pytest.raises(UserError) as caught:
        script_request.read(RUN, ["1", "--hosts=a,b", *translated[1:]], os.environ)
    fixes = [problem.fixes for problem in caught.value.problems if problem.code == "watch.nodes"]
    assert fixes[0] == [
        "./duet watch --hang_timeout=9 --nnodes=1 -- torchrun --nproc-per-node=2 t.py -- -n 2"
    ]
    for line, codes in (
        ("--retries=3", ["watch.no_command"]),
        ("-n 2 --nnodes=2", ["watch.flag", "watch.flag", "watch.no_command"]),
    ):
        with pytest.raises(UserError) as caught:
            watch.translate(*run_words.parse(line.split()))
        assert [problem.code for problem in caught.value.problems] == codes
    with pytest.raises(UserError) as caught:
        watch.translate(*run_words.parse(["-n", "2", "--hang_timeout=9", "torchrun", "t.py"]))
    assert caught.value.problems[0].fixes == ["./duet watch --hang_timeout=9 -- torchrun t.py"]


def test_the_scripts_need_no_execute_permission(project: Path) -> None:
    """On a noexec mount, exFAT or a cloud drive."""
    scripts = [project / "duet", *project.glob("*.sh")]
    for words, status in (
        ("train --depht=3", Exit.CONFIG),
        ("run -n 2 nowhere.py", Exit.CONFIG),
        ("watch -- no-such-program", Exit.CONFIG),
        ("completion flags train", Exit.DONE),
    ):
        for one in scripts:
            one.chmod(0o644)
        try:
            done = subprocess.run(
                ["bash", str(project / "duet"), *words.split()],
                capture_output=True,
                text=True,
                check=False,
                cwd=project,
                env=clean_environment(),
            )
        finally:
            for one in scripts:
                one.chmod(0o755)
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
        assert "--depth=" in done.stdout + done.stderr or "train" not in words

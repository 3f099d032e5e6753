"""Plans for the GPUs of a fake driver library: device, precision, compute modes, MIG, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.conftest import LAUNCH, ROOT, SIMPLE, clean_environment, python
from tests.unit.nvidia_machine import BALANCED, QUICKSTART, UUID, Nvidia, dry_run, look
from training.host import packages
from training.tasks.gpt import memory

GIB = 1 << 30


def test_the_emptiest_gpus_are_used_and_those_of_the_user_respected(nvidia: Nvidia) -> None:
    four = {"COUNT": 4, "FREE_GIB": "5,31,31,31", "USE": "0,90,0,0"}
    found = dry_run(nvidia(**four), QUICKSTART).stdout
    assert "CUDA_VISIBLE_DEVICES=2,3   set here" in found
    assert "GPU 2 (free memory 31.0 GiB, utilization 0 %), GPU 3" in found
    own = dry_run(nvidia(**four, CUDA_VISIBLE_DEVICES="0,1,2"), QUICKSTART).stdout
    assert "2,3" not in own and "CUDA_VISIBLE_DEVICES=0,1,2" in own


def test_of_equally_empty_gpus_a_bridged_pair_is_used(nvidia: Nvidia) -> None:
    four = {"COUNT": 4, "FREE_GIB": "5,31,31,31", "USE": "0", "NVLINKS": "4"}
    assert "CUDA_VISIBLE_DEVICES=2,3 " in dry_run(nvidia(**four, BRIDGES=1), QUICKSTART).stdout
    assert "CUDA_VISIBLE_DEVICES=1,2 " in dry_run(nvidia(**four), QUICKSTART).stdout


def test_a_plan_for_two_gpus(nvidia: Nvidia) -> None:
    done = dry_run(nvidia(COUNT=2), BALANCED)
    assert (done.returncode, done.stderr) == (0, "")
    assert "device cuda: the default" in done.stdout
    assert "torch 2.99.0, CUDA 13.0" in done.stdout
    assert "precision bf16: the GPU has bf16 matrix units; compile on: " in done.stdout
    assert "the original authors report 20–22 GB of 32 GB" in done.stdout
    assert "2 visible, 2 used; driver 580.65.06, CUDA up to 13.0" in done.stdout
    assert "Fake GPU 1, 31.0 GiB free of 32.0 GiB" in done.stdout
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID   set here" in done.stdout


def test_an_old_gpu_gets_fp16(nvidia: Nvidia) -> None:
    assert (
        "precision fp16: Fake GPU 0 (compute capability 7.5) has fp16 matrix units and no bf16"
        in dry_run(nvidia(CAPABILITY="7.5", TOTAL_GIB=128, FREE_GIB=127), BALANCED).stdout
    )


def test_segments_of_the_allocator_by_gpu_and_program(nvidia: Nvidia) -> None:
    name = "PYTORCH_ALLOC_CONF=expandable_segments"
    assert f"{name}:True " in dry_run(nvidia(COUNT=2), QUICKSTART).stdout
    assert f"{name}:False " in dry_run(nvidia(COUNT=2, VIRTUAL=2), QUICKSTART).stdout
    words = (LAUNCH, "1", "--script", "train.py", "--dry_run")
    script = python("-m", "training.cli.plan", *words, cwd=ROOT, **nvidia(COUNT=2)).stdout
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in script and name not in script


MIXED = "NVIDIA GeForce RTX 3090,NVIDIA GeForce RTX 4090"


@pytest.mark.parametrize(
    ("cards", "ranks", "words", "found"),
    [
        ({}, 2, (), 2),
        ({"DRIVER": "550.40.07"}, 2, (), 0),
        ({}, 2, ("--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1"), 0),
        ({}, 2, ("--device=cpu",), 0),
        ({"NAME": MIXED, "CUDA_VISIBLE_DEVICES": "0"}, 1, (), 2),
        ({"COUNT": 1}, 1, (), 0),
    ],
)
def test_accelerate_starts_with_an_old_driver_for_its_gpus(
    cards: dict[str, object], ranks: int, words: tuple[str, ...], found: int, nvidia: Nvidia
) -> None:
    asked = (LAUNCH, str(ranks), "--script", "train.py", "--dry_run", *words)
    machine = {"COUNT": 2, "NAME": "NVIDIA GeForce RTX 4090", "DRIVER": "535.183.01"} | cards
    done = python("-m", "training.cli.plan", *asked, cwd=ROOT, **nvidia(**machine))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("_DISABLE=1   set here") == found


def test_auto_takes_two_gpus_and_falls_back_to_the_cpu_with_the_reason(nvidia: Nvidia) -> None:
    assert (
        "device cuda: a GPU for each of 2 ranks (2 GPUs on this machine)"
        in dry_run(nvidia(COUNT=2), QUICKSTART).stdout
    )
    assert (
        "device cpu: 1 GPU for 2 ranks (1 GPU on this machine)"
        in dry_run(nvidia(COUNT=1), QUICKSTART).stdout
    )
    without = dry_run(nvidia(COUNT=2, torch=None), QUICKSTART).stdout
    assert (
        "device cpu: there are 2 GPUs, but the installed torch 2.99.0 is built for the CPU only"
        in without
    )
    hidden = dry_run(nvidia(COUNT=2, CUDA_VISIBLE_DEVICES="0"), QUICKSTART).stdout
    assert "device cpu: 1 GPU for 2 ranks (1 of 2 by CUDA_VISIBLE_DEVICES='0')" in hidden


def test_a_resumed_run_stays_on_gpus(nvidia: Nvidia, tmp_path: Path) -> None:
    made = ["-m", "training.cli.plan", SIMPLE, f"--out_dir={tmp_path}", f"--log_dir={tmp_path}"]

    def planned(*words: str, **driver: object) -> tuple[int, bool]:
        done = python(*made, *words, cwd=ROOT, **nvidia(**driver))
        return done.returncode, "Driver Not Loaded" in done.stderr

    assert planned(QUICKSTART, COUNT=2) == (0, False)
    for words in (["--resume=latest"], [QUICKSTART, "--resume=latest"]):
        assert planned(*words, INIT=9) == (3, True)
        assert planned(*words, COUNT=1) == (3, False)
    for device in ("cpu", "auto"):
        dry = ("--resume=latest", f"--device={device}", "--dry_run")
        assert planned(*dry, INIT=9) == (0, False)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"COUNT": 1}, "2 GPUs are needed, 1 visible: 1 GPU on this machine"),
        ({"COUNT": 0}, "2 GPUs are needed, 0 visible: 0 GPUs on this machine"),
        (
            {"CUDA_VISIBLE_DEVICES": "1"},
            "2 GPUs are needed, 1 visible: 1 of 2 by CUDA_VISIBLE_DEVICES='1'",
        ),
        ({"FREE_GIB": "31,5"}, "Fake GPU 1, 5.0 GiB free of 32.0 GiB: this run needs 5.8"),
        ({"INIT": 9}, "the NVIDIA driver does not answer"),
        ({"torch": None}, "torch 2.99.0 is built for the CPU only and cannot use GPUs"),
        (
            {"torch": "14.1"},
            "torch 2.99.0 is built for CUDA 14.1; driver 580.65.06 supports CUDA up to 13.0",
        ),
    ],
    ids=str,
)
def test_insufficient_gpus_exit_with_3_and_advice(
    values: dict[str, object], expected: str, nvidia: Nvidia, tmp_path: Path
) -> None:
    folders = [f"--out_dir={tmp_path}/runs", f"--log_dir={tmp_path}/logs"]
    done = python(
        "-m", "training.cli.plan", SIMPLE, BALANCED, *folders, cwd=ROOT, **nvidia(**values)
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert expected in done.stderr
    assert "    try:     " in done.stderr
    assert "nothing was launched (exit 3)" in done.stderr
    assert os.listdir(tmp_path) == []


def test_all_gpus_visible_is_the_first_suggestion_where_some_are_hidden(nvidia: Nvidia) -> None:
    def suggested(job: str = "", **values: object) -> bool:
        allocated = {"LSB_JOBID": job} if job else {}
        done = dry_run(nvidia(CUDA_VISIBLE_DEVICES="0", **values) | allocated, BALANCED)
        assert done.returncode == 3
        first = done.stdout.partition("try: ")[2].splitlines()[0]
        return first == f"env -u CUDA_VISIBLE_DEVICES ./{SIMPLE} {BALANCED} --dry_run"

    assert suggested(COUNT=3)
    assert not suggested(COUNT=1)
    assert not suggested(COUNT=2, FREE_GIB="31,0.2"), "the other one is full"
    assert not suggested(COUNT=2, COMPUTE_MODE="0,2"), "no process may use it"
    assert not suggested(job="4", COUNT=3), "they belong to other jobs"


def test_a_gpu_that_does_not_answer_is_reported(nvidia: Nvidia) -> None:
    seen = look(nvidia(COUNT=3, LOST=2))
    assert ([gpu.index for gpu in seen.gpus], seen.silent) == ([0, 2], (1,))
    done = dry_run(nvidia(COUNT=3, LOST=2), BALANCED)
    assert done.returncode == 0 and "warning  GPU 1 " in done.stdout
    assert f"CUDA_VISIBLE_DEVICES={UUID.format(0)},{UUID.format(2)} " in done.stdout
    few = dry_run(nvidia(COUNT=2, LOST=2), BALANCED)
    (line,) = (one for one in few.stdout.splitlines() if "1 visible" in one)
    assert few.returncode == 3 and "GPU 1 does not answer" in line


def test_a_gpu_in_prohibited_mode(nvidia: Nvidia) -> None:
    assert [g.compute_mode for g in look(nvidia(COMPUTE_MODE="0,3")).gpus] == [
        "default",
        "exclusive process",
    ]
    done = dry_run(nvidia(COMPUTE_MODE="0,2"), BALANCED)
    assert done.returncode == 3
    assert (
        "error    GPU 1        Fake GPU 1, 31.0 GiB free of 32.0 GiB: its compute mode is "
        "'prohibited', no process may use it" in done.stdout
    )
    assert "try: sudo nvidia-smi -i 1 -c DEFAULT" in done.stdout


def test_a_gpu_in_exclusive_mode(nvidia: Nvidia) -> None:
    assert dry_run(nvidia(COMPUTE_MODE="3"), BALANCED).returncode == 0
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=clean_environment()
    ) as other:
        done = dry_run(nvidia(COMPUTE_MODE="3", PID=other.pid), BALANCED)
        other.stdin.close()  # type: ignore[union-attr]
    assert done.returncode == 3
    assert (
        "its compute mode is 'exclusive process', only one process may use it; occupied by pid"
        in done.stdout
    )
    assert f"try: kill {other.pid}   # if it is yours: " in done.stdout
    assert "or:  sudo nvidia-smi -i 0 -c DEFAULT" in done.stdout


def test_a_gpu_that_another_process_has_for_itself_is_not_suggested(nvidia: Nvidia) -> None:
    other = {"FREE_GIB": "31,0.2", "PROCESSES": f"{os.getpid()}:1"}  # of GPU 0
    alone = "launch_train.sh 1 "
    assert alone in dry_run(nvidia(**other), BALANCED).stdout
    closed = dry_run(nvidia(**other, COMPUTE_MODE="3,0"), BALANCED)
    assert (closed.returncode, alone in closed.stdout) == (3, False)


def test_mps_shares_a_gpu_in_exclusive_mode(nvidia: Nvidia) -> None:
    with subprocess.Popen(
        ["nvidia-cuda-mps-server", "-c", "import sys; sys.stdin.read()"],
        executable=sys.executable,
        stdin=subprocess.PIPE,
    ) as other:
        done = dry_run(nvidia(COMPUTE_MODE="3", PID=other.pid), BALANCED)
        other.stdin.close()  # type: ignore[union-attr]
    assert (done.returncode, f"kill {other.pid}" in done.stdout) == (0, False)


def test_a_pid_of_the_host_is_not_looked_up_in_a_container(nvidia: Nvidia, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from training.host import gpu_processes, gpus;"
        "gpu_processes.PIDS = Path(sys.argv[1]); found = gpus.inventory().gpus[0].processes[0];"
        "print(found.pid, found.user, found.command, found.known)"
    )
    (tmp_path / "pid").symlink_to("pid:[4026532193]")
    seen = python("-c", code, str(tmp_path / "pid"), **nvidia(PID=os.getpid()))
    assert seen.stdout == f"{os.getpid()} - - False\n"
    seen = python("-c", code, "/proc/self/ns/pid", **nvidia(PID=os.getpid()))
    assert seen.stdout.endswith(" True\n")


def test_a_gpu_in_mig_mode_is_for_one_rank(nvidia: Nvidia) -> None:
    assert [g.mig for g in look(nvidia(MIG="0,1")).gpus] == [False, True]
    assert [g.mig for g in look(nvidia()).gpus] == [None, None], "most cards have no MIG"
    done = dry_run(nvidia(MIG="0,1"), BALANCED)
    assert done.returncode == 3
    assert "GPU 1 parts  split by MIG: a process sees one instance only" in done.stdout
    assert "try: sudo nvidia-smi -i 1 -mig 0" in done.stdout
    one = ("-m", "training.cli.plan", "launch_train.sh", "1", BALANCED, "--dry_run")
    done = python(*one, cwd=ROOT, **nvidia(MIG="1,1"))
    assert done.returncode == 0
    assert "warning  GPU 0 parts  split by MIG: the rank gets one instance" in done.stdout


def test_one_rank_trains_on_an_instance_that_a_scheduler_has_chosen(nvidia: Nvidia) -> None:
    chosen = nvidia(MIG="1", MIG_GIB="9.5", CUDA_VISIBLE_DEVICES="MIG-00000001")
    (part,) = look(chosen).gpus
    assert (part.uuid, part.index, part.mig) == ("MIG-00000001", 1, True)
    assert (part.free_bytes, part.capability) == (int(9.5 * 2**30), [12, 0])
    first, _ = look(nvidia(MIG="1", MIG_GIB="9.5")).gpus
    assert first.free_bytes == part.free_bytes, "a process sees the first instance"
    one = ("-m", "training.cli.plan", "launch_train.sh", "1", QUICKSTART, "--dry_run")
    done = python(*one, cwd=ROOT, **chosen)
    assert (done.returncode, "expandable_segments:False" in done.stdout) == (0, True)
    assert "parts" not in done.stdout


def test_mig_instances_are_not_counted_as_gpus(nvidia: Nvidia) -> None:
    done = dry_run(nvidia(CUDA_VISIBLE_DEVICES="MIG-4711"), BALANCED)
    assert done.returncode == 3
    assert (
        "try: list whole GPUs in CUDA_VISIBLE_DEVICES: MIG instances are not counted" in done.stdout
    )


def test_a_tight_fit_is_a_warning(nvidia: Nvidia) -> None:
    fixed = ("--activation_checkpointing=none", "--compile=0")
    machine = nvidia(FREE_GIB="23")
    done = dry_run(machine, BALANCED, *fixed)
    assert done.returncode == 0
    assert "tight, the run may need 24.5 GiB" in done.stdout
    # --check measures a step, whose check then has the only figure
    code = (
        "import os; from training.plan import training_plan\n"
        f"words = ['--device=cuda', *{fixed}, '--check', {BALANCED!r}]\n"
        "made = training_plan.make('train_dual_gpu_enhanced.sh', words, os.environ)\n"
        "print([(c.status, '24.5' in c.text) for c in made[2] if c.name == 'GPU 0'])"
    )
    checked = python("-c", code, cwd=ROOT, **machine)
    assert checked.stdout.splitlines()[-1:] == ["[('warning', False)]"], checked.stderr[-2000:]


def test_the_driver_is_not_queried_on_the_cpu(nvidia: Nvidia) -> None:
    assert dry_run(nvidia(INIT=9), QUICKSTART, "--device=cpu").returncode == 0


def test_before_the_installation_gpus_are_counted_without_pynvml(
    nvidia: Nvidia, tmp_path: Path
) -> None:
    code = (
        "from training.host import gpus; m = gpus.inventory(); print(len(m.gpus), "
        "m.gpus[0].uuid if m.gpus else m.reason)"
    )
    for variables, answer in (
        ({"COUNT": 2}, f"2 {UUID.format(0)}"),
        ({"COUNT": 2, "CUDA_VISIBLE_DEVICES": "1"}, f"1 {UUID.format(1)}"),
        ({"INIT": 9}, "0 the NVIDIA driver does not answer"),
    ):
        done = python("-S", "-c", code, **nvidia(**variables))
        assert (done.stdout, done.stderr) == (answer + "\n", "")
    plan = (
        "lib/run_module.py",
        "training.cli.plan",
        "--before-install",
        "train_dual_gpu.sh",
        BALANCED,
    )
    done = python("-S", *plan, cwd=ROOT, **nvidia(COUNT=1))
    assert done.returncode == 3 and "2 GPUs are needed, 1 visible" in done.stderr
    done = python("-S", *plan, cwd=ROOT, **nvidia(COUNT=2))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = python("-S", *plan, "--check", cwd=ROOT, **nvidia(COUNT=2))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = python("-S", *plan, cwd=ROOT, **nvidia(COUNT=2, FREE_GIB=3))
    assert done.returncode == 3 and "3.0 GiB free of 32.0 GiB" in done.stderr
    # Another build of torch, known before gigabytes of one without kernels are installed.
    # no torch, packages of PyPI
    bare = {"PYTHONPATH": str(ROOT), "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    index = "PIP_EXTRA_INDEX_URL=URL ./train_dual_gpu.sh"
    for variables, why, fix in (
        ({"CAPABILITY": "7.0"}, "GPU 0 (Fake GPU 0) needs kernels for sm_70", index),
        ({"CUDA": 12080}, "driver 580.65.06 supports CUDA up to 12.8", "update the NVIDIA driver"),
    ):
        done = python("-S", *plan, cwd=ROOT, **(nvidia(COUNT=2, **variables) | bare))
        assert (done.returncode, done.stdout) == (0, "")
        assert why in done.stderr and fix in done.stderr, done.stderr
    pip = tmp_path / "pip.conf"
    pip.write_text("[global]\nindex-url = https://packages.example/simple\n")
    for own in (
        {"PIP_INDEX_URL": "https://packages.example/simple"},
        {"PIP_CONFIG_FILE": str(pip)},
    ):
        done = python("-S", *plan, cwd=ROOT, **(nvidia(COUNT=2, CAPABILITY="7.0") | bare | own))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("package", "flag"),
    [("nvidia-ml-py", "--check"), ("psutil", "--num_iterations=1"), ("tqdm", "--check")],
)
def test_a_rank_started_by_hand_names_a_missing_package(
    package: str, flag: str, nvidia: Nvidia, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {packages.REQUIRED[package]!r}:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    variables = nvidia(COUNT=2)
    variables["PYTHONPATH"] = f"{tmp_path}:{variables['PYTHONPATH']}"
    done = python("train.py", QUICKSTART, flag, cwd=ROOT, **variables)
    assert done.returncode == 3, done.stderr
    assert f"lacks {package}\n" in done.stderr and "Traceback" not in done.stderr


def test_memory_shared_with_the_host_counts_once(nvidia: Nvidia) -> None:
    """GB10, Jetson: the step, the copy of a checkpoint and the rank's own memory are in one."""
    code = """
import json, os, sys; from training.host import cgroups
cgroups.available_memory, cgroups.says_who = lambda: 20 << 30, lambda: ""
from training.plan import training_plan
args = ["1", "--device=cuda", sys.argv[1], "--max_seq_len=1024", "--device_batch_size=auto"]
more = ["--total_batch_size=65536", "--tokenizer=bytes", "--out_dir=/tmp"]
made, plan, checks = training_plan.make("launch_train.sh", [*args, *more, "--dry_run"], os.environ)
found = [(check.status, check.text) for check in checks if check.name == "host memory"]
print(json.dumps([plan["memory"], found]))"""

    def planned(depth: int, **driver: int) -> tuple[dict[str, int], list[list[str]]]:
        done = python(
            "-c", code, f"--depth={depth}", cwd=ROOT, **nvidia(COUNT=1, CAPABILITY="9.0", **driver)
        )
        assert done.returncode == 0, done.stderr
        estimate, found = json.loads(done.stdout)
        return estimate, found

    shared, (line,) = planned(14, NOT_SUPPORTED=1)
    needed = shared["needed_bytes"]
    assert shared["free_bytes"] == 18 * GIB >= needed
    assert shared["saved_bytes"] > shared["parameters_bytes"]
    assert line == ["ok", f"18.0 GiB free, {memory.gib(needed)} needed"]
    # Without the copy of a checkpoint, 19.3 GiB.
    large, ((status, text),) = planned(28, NOT_SUPPORTED=1)
    assert status == "warning" and large["needed_bytes"] > 30 * GIB
    assert text == f"18.0 GiB free: this run needs {memory.gib(large['needed_bytes'])} per rank"
    own, ((_, text),) = planned(14, FREE_GIB=31)
    assert own["saved_bytes"] == 0 and "beside the GPUs" in text

"""Resource report and checks at every start: folders, disk, memory. Shared memory, cores and open
files: test_host_workers.py; GPUs and memory: test_plan.py, test_host_gpu_plan.py,
test_host_driver.py; `--check`: test_host_gpu_health.py, test_host_torch_kernels.py,
test_host_inputs.py, test_host_surroundings.py."""

from __future__ import annotations

import ast
import errno
import json
import os
import shlex
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import each
from tests.conftest import ROOT
from tests.unit.conftest import ENHANCED, LAUNCH, Shell, ask, clean_environment, python
from training.core.cells import cells
from training.core.check_names import check_title
from training.core.errors import UserError
from training.core.rundir import RunDir, write_json
from training.host import cgroups, env_vars
from training.plan import preflight, script_request
from training.plan import training_plan as planner
from training.plan.preflight import (
    ERROR,
    OK,
    WARNING,
    Check,
    folder,
    folder_checks,
    startup_checks,
)
from training.tasks.gpt import memory
from training.tasks.gpt.step import GptStep

Usage = namedtuple("Usage", "total used free")
GIB = 1 << 30
NAMES_OF_THINGS = {"/dev/shm", "CPU", "GPUs", "W&B", "compile", "torch"}  # the same in Chinese


def check(path: Path, needed: int = 1 << 20) -> Check:
    return folder("run", path, needed, "from --out_dir on the command line", ["move"])


def test_a_writable_folder_or_one_to_create(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "new" / "deep"):
        found = check(path)
        assert (found.name, found.status) == ("run folder", OK)
        assert found.text.startswith(f"{path}: ")
    assert os.listdir(tmp_path) == [], "the check leaves nothing behind"


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        found = check(path)
        assert (found.status, found.fixes) == (ERROR, ["move"])
        assert (
            found.text
            == f"run folder {path} (from --out_dir on the command line): {tmp_path}/file is not a "
            f"folder"
        )


def test_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "link", tmp_path / "link" / "run"):
        assert check(path).status == ERROR


def test_a_disk_without_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(9 * GIB, 6 * GIB, 3 * GIB))
    assert check(tmp_path, 3 * GIB).status == OK
    found = check(tmp_path, 4 * GIB)
    assert found.status == ERROR
    assert found.text.endswith(": 3.0 GiB free, 4.0 GiB needed")


def test_a_disk_that_cannot_map_files(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FUSE with direct_io. The ranks of a script have no heartbeat file."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(folder_checks.mmap, "mmap", refuse)
    asked = ask("--device=cpu")
    found = folder_checks.run_folder(asked, None)
    assert (found.status, found.fixes) == (ERROR, ["--out_dir=/local/folder"])
    asked.resume_from = RunDir(tmp_path)
    (fix,) = folder_checks.run_folder(asked, None).fixes
    assert f" --resume=/local/folder/{tmp_path.name}" in fix
    assert check(tmp_path).status == OK, "of a log folder"
    (home / "my.py").touch()
    script = script_request.read(LAUNCH, ["2", "--script=my.py"], {})
    assert folder_checks.run_folder(script, None).status == OK
    assert os.listdir(home) == ["my.py"]


@each(
    ("number", "copies"),
    [(errno.EACCES, True), (errno.EROFS, True), (errno.ENOSPC, False), (errno.EDQUOT, False)],
)
def test_a_run_that_may_not_be_written_is_copied(
    number: int, copies: bool, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user's; only a full disk is searched for what takes the room."""

    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folder_checks.tempfile, "TemporaryFile", refuse)
    asked = ask("--device=cpu")
    found = folder_checks.run_folder(asked, None)
    assert (found.status, found.fixes) == (ERROR, ["--out_dir=/another/folder"])
    asked.resume_from = RunDir(tmp_path / "run")
    (fix,) = folder_checks.run_folder(asked, None).fixes
    copied = f"cp -a {shlex.quote(f'{tmp_path}/run')} /another/folder/ && "
    assert (fix.startswith(copied), fix.startswith("du ")) == (copies, not copies)
    assert not copies or " --resume=/another/folder/run" in fix


CODE = """
import sys
from pathlib import Path
from typing import Any, cast
from training.plan.preflight import folder
found = folder("run", Path(sys.argv[1]), 4096, "default", [])
print(found.status, found.text)
"""


def test_a_read_only_disk(
    on_small_disk: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = on_small_disk("-c", CODE, f"{tmp_path}/disk/run", options="ro")
    assert (
        done.stdout
        == f"error run folder {tmp_path}/disk/run (default) is not writable: Read-only file "
        f"system\n"
    ), done.stderr


def test_a_full_disk(
    on_small_disk: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    filled = "head -c 1048576 /dev/zero >filler"
    done = on_small_disk("-c", CODE, f"{tmp_path}/disk/run", options="size=1m", before=filled)
    assert (
        done.stdout
        == f"error run folder {tmp_path}/disk/run (default) is not writable: No space left on "
        f"device\n"
    ), done.stderr


def test_memory_beside_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = memory.Estimate(GIB, 0, 2 * GIB, 0, 0, 0, 0, 0)
    monkeypatch.setattr(startup_checks.cgroups, "available_memory", lambda: 8 * GIB)
    monkeypatch.setattr(startup_checks.cgroups, "says_who", lambda: " (limited)")
    assert startup_checks.ram_beside_gpus(estimate, None, 2, resumes=False) == Check(
        "host memory", OK, "8.0 GiB free, about 7.0 GiB needed beside the GPUs"
    )
    tight = startup_checks.ram_beside_gpus(estimate, None, 3, resumes=False)
    assert (tight.status, tight.text) == (
        WARNING,
        "8.0 GiB free, about 9.0 GiB needed beside the GPUs (limited)",
    )


def test_memory_beside_gpus_includes_pinned_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Width 768: matrices of 2.25 and 6 MiB are copied to 4 and 8 MiB; Muon's state of the other
    rank is received and copied. To resume, both ranks read the checkpoint."""
    load = memory.StepWorkload(12, 8, 1536, 320, bf16=True, compiled=True, ranks=2)
    step, mib = GptStep(load), 1 << 20
    blocks, table = 12 * (4 * 4 + 3 * 8) * mib, mib
    other = 12 * (4 * 2.25 + 3 * 6) * mib / 2
    assert step.saving == blocks * 1.5 + 6 * table + 2 * other
    whole = step.estimate.parameters + step.estimate.optimizer + step.elsewhere
    assert step.saving > 1.3 * whole
    seen = []
    for free in (4 * GIB + step.saving, 4 * GIB + 2 * whole):
        for short in (0, 1):
            monkeypatch.setattr(
                startup_checks.cgroups, "available_memory", lambda free=free - short: free
            )
            for resumes in (False, True):
                found = startup_checks.ram_beside_gpus(step.estimate, step, 2, resumes=resumes)
                seen.append(found.status)
    assert seen == [OK, WARNING, WARNING, WARNING, OK, OK, OK, WARNING]


def test_a_control_group_with_too_little_memory_is_an_error(
    home: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.setattr(cgroups, "memory", lambda: cgroups.CgroupMemory(6 * GIB, GIB))
    with pytest.raises(UserError) as caught:
        planner.make(ENHANCED, ["--device=cpu", "--activation_checkpointing=none"], {})
    (problem,) = caught.value.problems
    assert problem.what.startswith("2.5 GiB free for each of 2 ranks: this run needs ")
    assert problem.what.endswith(
        " per rank (the control group of this shell or container allows 6.0 GiB)"
    )
    for command in problem.fixes:
        shell.read(command)


def test_the_report_has_one_line_per_check() -> None:
    records = [
        Check("GPUs", OK, "fine").record(),
        Check("run folder", ERROR, "no").record(),
        Check("port", WARNING, "hm").record(),
    ]
    assert (
        preflight.table(records)
        == "  ok       GPUs        fine\n  error    run folder  no\n  warning  port        hm\n"
    )


def test_the_report_in_chinese_has_chinese_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes keep the English ones; columns are aligned by the width of the characters."""
    monkeypatch.setenv("DUET_LANG", "zh")
    names = ["host memory", "GPU 0 state", "/dev/shm", "versions", "memory of a step"]
    checks = [Check(name, OK, "|") for name in names]
    assert [check.code for check in checks] == [
        f"preflight.{code}"
        for code in ("host_memory", "gpu_state", "shm", "versions", "memory_of_a_step")
    ]
    titles = [check_title(name) for name in names]
    assert [title == name for title, name in zip(titles, names, strict=True)] == [
        *(False, False, True, False, False)
    ]
    lines = preflight.table([check.record() for check in checks]).splitlines()
    assert all(title in line for title, line in zip(titles, lines, strict=True))
    assert len({cells(line) for line in lines}) == 1


def test_every_check_has_a_chinese_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUET_LANG", "zh")
    calls = [
        node
        for path in (ROOT / "training").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and node.args
        and ast.unparse(node.func).split(".")[-1] == "Check"
    ]
    names = {
        str(first.value)
        for call in calls
        if isinstance(first := call.args[0], ast.Constant) and isinstance(first.value, str)
    }
    assert {"torch kernels", "clock", "memory of a step"} <= names
    assert {name for name in names if check_title(name) == name} <= NAMES_OF_THINGS


def test_fixes_are_listed_once_below_their_line() -> None:
    checks = [
        Check("a", WARNING, "hm", ["x", "y"]),
        Check("long", ERROR, "no", ["y", "z"]),
        Check("b", OK, "fine", ["never shown"]),
    ]
    assert preflight.table([c.record() for c in checks]) == (
        "  warning  a     hm\n"
        "                 try: x\n"
        "                 or:  y\n"
        "  error    long  no\n"
        "                 try: z\n"
        "  ok       b     fine\n"
    )
    assert preflight.count(checks) == "3 checks: 1 ok, 1 warning, 1 error"
    assert (
        preflight.count([*checks, checks[0], checks[1]]) == "5 checks: 1 ok, 2 warnings, 2 errors"
    )
    assert [preflight.worst(checks[:n]) for n in range(4)] == [OK, WARNING, ERROR, ERROR]


def test_the_report_as_a_program(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    write_json(run.preflight, {"checks": [Check("GPUs", OK, "2 visible").record()]})
    log = tmp_path / "x.log"
    done = python("-m", "training.cli.resources", str(run.path), DUET_LOG_FILE=str(log))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.endswith("resource check\n  ok       GPUs  2 visible\n")
    assert log.read_text() == done.stderr


def test_a_failed_check_is_a_problem_with_fixes() -> None:
    problem = Check("GPUs", ERROR, "none", ["do this"]).problem()
    assert (problem.code, problem.what) == ("preflight.gpus", "none")
    assert problem.fixes == ["do this"]
    assert json.loads(json.dumps(Check("a", OK, "b").record())) == {
        "code": "preflight.a",
        "name": "a",
        "status": "ok",
        "text": "b",
        "fixes": [],
    }
    assert clean_environment()["PYTHONPATH"]


def test_more_ranks_than_cores_suggests_fewer(
    home: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.setattr(env_vars, "cpu_count", lambda: 2)
    args = ["8", "--device=cpu", "--depth=1", "--total_batch_size=98304"]
    (found,) = [c for c in planner.make(LAUNCH, args, {})[2] if c.name == "CPU"]
    assert (found.status, found.text) == (WARNING, "8 ranks share 2 CPU cores: slow")
    assert shell.read(found.fixes[0]).ranks == 2


def test_no_fitting_batch_is_reported() -> None:
    request = ask("--device=cpu", "--depth=1")
    estimate = memory.Estimate(GIB, 0, 0, 0, 0, 0, 0, 0)
    found = startup_checks.host_memory(GIB, estimate, request, [])
    assert found.fixes == ["a machine or container with 4.2 GiB free"]


def test_a_tight_limit_is_left_to_the_measurement_of_a_step() -> None:
    estimate = memory.Estimate(4 * GIB, 0, 0, 0, 0, 0, 0, 0)
    for flag, shown in (("--dry_run", True), ("--check", False)):
        request = ask("--device=cpu", "--depth=1", flag)
        found = startup_checks.host_memory(estimate.tight - 1, estimate, request, [])
        assert (found.status, "may need 6.0 GiB" in found.text) == (WARNING, shown)


def test_all_checks_together_use_a_core_for_less_than_a_second_and_a_half(tmp_path: Path) -> None:
    code = (
        "import os; started = sum(os.times()[:4]);"
        "from training.plan import preflight, training_plan;"
        "request, made, checks = training_plan.make('train_dual_gpu_enhanced.sh', ['--device=cpu', "
        "'--depth=1', '--check'], os.environ);"
        "print(sum(os.times()[:4]) - started, len(checks))"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seconds, checks = done.stdout.split()
    assert int(checks) >= 10
    assert float(seconds) < 1.5
    assert list(tmp_path.iterdir()) == []


def test_a_normal_start_checks_neither_network_nor_all_files(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        preflight, "only_in_check", lambda facts: pytest.fail("these are for --check")
    )
    names = [c.name for c in planner.make(ENHANCED, ["--device=cpu", "--depth=1"], {})[2]]
    assert names == ["host memory", "CPU", "open files", "run folder", "log folder"]

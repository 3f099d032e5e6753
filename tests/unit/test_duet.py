"""The ./duet command."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import training
from tests.cases import each
from tests.unit.conftest import ROOT, clean_environment
from training.cli import completion
from training.cli.commands import COMMANDS
from training.core import project


def duet(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "duet"), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=clean_environment(),
        timeout=120,
    )


@pytest.mark.parametrize(("words", "status"), [((), 2), (("help",), 0), (("--help",), 0)])
def test_help_lists_every_command(words: tuple[str, ...], status: int) -> None:
    done = duet(*words)
    assert (done.returncode, done.stderr) == (status, "")
    assert [name for name in COMMANDS if f"\n  {name} " not in done.stdout] == []
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []


@each("words", [("completion", "--help"), ("help", "completion"), ("help", "version")])
def test_commands_of_duet_itself_have_help(words: tuple[str, ...]) -> None:
    done = duet(*words)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


def test_the_completion_into_a_closed_pipe_is_quiet() -> None:
    command = f"set -o pipefail; '{ROOT}/duet' completion bash | exec 0<&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@each("name", COMMANDS)
def test_every_command_has_help_from_any_folder(name: str, tmp_path: Path) -> None:
    by_flag, by_name = duet(name, "--help", cwd=tmp_path), duet("help", name, cwd=tmp_path)
    assert (by_flag.returncode, by_flag.stderr) == (0, "")
    assert by_flag.stdout == by_name.stdout != ""
    # where a path with a space is quoted
    in_the_project = re.sub(r"'(\./\w+(?:\.sh)?)'", r"\1", by_flag.stdout.replace(f"{ROOT}/", "./"))
    assert [line for line in in_the_project.splitlines() if len(line) > 80] == []


def test_a_script_behaves_as_under_its_own_name(tmp_path: Path) -> None:
    words = ["--depht=3", f"--out_dir={tmp_path}"]
    direct = subprocess.run(
        [str(ROOT / "train_dual_gpu.sh"), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=clean_environment(),
    )
    through = duet("train", *words)
    assert through.returncode == direct.returncode == 2
    without_time = [
        [line.split(" ", 3)[-1] for line in done.stderr.splitlines()] for done in (direct, through)
    ]
    assert without_time[0] == without_time[1]


def test_version() -> None:
    assert duet("--version").stdout == f"duet {training.__version__}\n"


def test_an_unknown_command_gets_a_suggestion() -> None:
    for words in (("mointor",), ("help", "mointor")):
        done = duet(*words)
        assert (done.returncode, done.stdout) == (2, "") and "./duet monitor\n" in done.stderr


def test_the_status_of_a_command_is_the_status_of_duet(tmp_path: Path) -> None:
    assert duet("diagnose", str(tmp_path / "nothing.log")).returncode == 2


COMPLETE = """
source <({duet} completion {shell})
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
compopt() {{ :; }}
_duet {duet}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("duet mon", ["monitor"]),
        ("duet inspect --pi", ["--pid="]),
        ("duet train --dept", ["--depth="]),
    ],
)
def test_bash_completes(words: str, expected: list[str]) -> None:
    code = COMPLETE.format(duet=f"'{ROOT}/duet'", shell="bash", words=words)
    done = subprocess.run(
        ["bash", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(),
        timeout=60,
    )
    assert done.stdout.split() == expected, done.stderr


MODULES = [c.module for c in COMMANDS.values() if c.module and not c.first]
WITH_FLAGS = [
    m for m in (import_module(f"training.cli.{n}") for n in MODULES) if "FLAGS" in vars(m)
]


@each("module", WITH_FLAGS, ids=lambda module: module.__name__)
def test_completed_flags_are_those_of_the_command(module: ModuleType) -> None:
    found = {f.strip("-=").replace("-", "_") for f in completion.described(module.__doc__ or "")}
    known = {name.replace("-", "_") for name in module.FLAGS}
    assert found <= known and known - found <= {"help", "dir", "ascii", "run"}


def test_flags_of_a_help_text() -> None:
    text = """Usage: x [--no] --key=value
  --a=1,2|all, --b=F  as --c, or
                --d=X of another
  -m, --module  text
  --watch[=S]   text
  --key=value   any field
--out="a b"   text, as --no"""
    assert completion.described(text) == {"--a=", "--b=", "--module", "--watch", "--out="}


def test_zsh_has_no_compopt() -> None:
    bash, zsh = completion.text(["bash"]), completion.text(["zsh"])
    assert bash.count("compopt") == 2 and "compopt" not in zsh and "mapfile" not in zsh
    assert bash.splitlines()[-1] == "complete -F _duet duet ./duet"
    assert zsh.splitlines()[-1] == "complete -o default -F _duet duet ./duet"
    code = f"autoload() {{ :; }}; bashcompinit() {{ :; }}; {zsh}\ndeclare -f _duet"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert "COMPREPLY=()" in done.stdout, "its lines are still a function"


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_accepts_the_completion() -> None:
    code = (
        f"autoload -U +X compinit && compinit -u; source <('{ROOT}/duet' completion zsh) && "
        f"whence _duet"
    )
    done = subprocess.run(
        ["zsh", "-f", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(),
        timeout=60,
    )
    assert done.stdout.strip() == "_duet", done.stderr


def shown(script: str) -> str:
    """As it is typed in another folder."""
    return shlex.quote(str(ROOT / script))


def _suggested(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.partition("try:")[2].partition("\n")[0].strip()


def test_a_suggested_command_can_be_pasted_from_any_folder(tmp_path: Path) -> None:
    link, folder = tmp_path / "the project", tmp_path / "elsewhere"
    link.symlink_to(ROOT)
    folder.mkdir()
    (folder / "link").symlink_to(ROOT / "duet")
    on_path = {"PATH": f"{ROOT}:{clean_environment()['PATH']}"}

    def shell(command: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=cwd,
            env=clean_environment() | env,
            capture_output=True,
            text=True,
            check=False,
        )

    for command, suggested, cwd, env in (
        ("./duet lanch", "./duet launch", ROOT, {}),
        ("../the\\ project/duet lanch", "'../the project/duet' launch", folder, {}),
        ("duet lanch", "duet launch", folder, on_path),
        ("./link lanch", f"{shown('duet')} launch", folder, {}),
        (f"{shown('duet')} train --depht=3", shown("train_dual_gpu.sh"), folder, {}),
    ):
        done = shell(command, cwd, env)
        fix = _suggested(done)
        assert done.returncode == 2 and fix.startswith(suggested), done.stderr
        assert shell(f"{fix} --help", cwd, env).returncode == 0


def test_commands_in_help_and_cards_are_those_of_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, run = (duet(name, "--help", cwd=tmp_path).stdout for name in ("train", "run"))
    assert f"\n  {shown('train_dual_gpu.sh')} CONFIG" in train
    assert f"\n  {shown('duet')} run " in run
    assert "\n  ./duet run " in duet("run", "--help").stdout

    chinese = "运行 ./duet diagnose r，或 ../launch_train.sh、./launch_train.sh 2"
    assert project.typed(chinese) == chinese
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(project.STARTED_AS, "/gone/duet")
    launch = f"../launch_train.sh、{shown('launch_train.sh')} 2"
    here = f"运行 {shown('duet')} diagnose r，或 {launch}"
    assert project.typed(chinese) == project.typed(project.typed(chinese)) == here
    assert project.published(chinese) == chinese


def test_commands_of_the_doctor_are_the_doctor_s(tmp_path: Path) -> None:
    def suggested(*words: str, cwd: Path) -> list[str]:
        done = duet("doctor", *words, "--json", cwd=cwd)
        return [fix for one in json.loads(done.stdout)["problems"] for fix in one["fixes"]]

    assert suggested("--depht=2", cwd=ROOT) == ["./duet doctor --json --depth=2"]
    assert suggested("--depht=2", cwd=tmp_path) == [f"{shown('duet')} doctor --json --depth=2"]
    assert suggested("--no-such-flag-at-all", cwd=ROOT) == ["./duet doctor --help"]
    shown_help = duet("doctor", "--help", cwd=ROOT).stdout
    assert "\n  ./duet doctor [CONFIG]" in shown_help and "--device_batch_size=" in shown_help
    assert "  ./train_dual_gpu_enhanced" not in shown_help
    done = duet("train-enhanced", "--check", "--depht=2", "--json")
    assert json.loads(done.stdout)["problems"][0]["fixes"][0].startswith(
        "./train_dual_gpu_enhanced.sh"
    )


def test_a_shipped_config_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Path("configs/dual_gpu/quickstart.py")
    assert project.shipped(config) == ROOT / config
    assert project.shipped(Path("train.py")) == Path("train.py")
    config.parent.mkdir(parents=True)
    config.touch()
    assert project.shipped(config) == config


@each(
    "words, status",
    [
        (("runs", f"--dir=/tmp/{'x' * 300}"), 2),
        (("clean", "--keep=last", f"--dir=/tmp/{'x' * 300}"), 2),
        (("archive", "latest", f"--out=/tmp/{'x' * 300}/run.tar.gz"), 2),
        (("report", f"--out=/tmp/{'x' * 300}/page.html"), 2),
        (("sweep", "~unknown-user/c.py", "--depth=1,2"), 2),
        (("diagnose", "x" * 300), 2),
    ],
)
def test_odd_paths_are_answered(words: tuple[str, ...], status: int) -> None:
    done = duet(*words)
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr


@each("words", [("help",), ("runs", "--help")])
def test_characters_that_the_encoding_lacks(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [str(ROOT / "duet"), *words],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env=clean_environment() | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")


PLAN = ("train", "configs/dual_gpu/quickstart.py", "--device=cpu", "--dry_run")


@each("words", [("help",), ("--version",), ("runs",), ("clean", "--help"), PLAN])
def test_output_that_cannot_be_written(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [str(ROOT / "duet"), *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=ROOT,
            env=clean_environment(),
        )
    assert done.returncode == 3 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("[ERROR] ")


LOG = "tests/fixtures/logs/gpu_oom/01.log"


@each("words", [("runs",), ("diagnose", LOG), ("inspect", "latest"), ("inspect", "--pid=1")])
def test_closed_output_is_refused(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["bash", "-c", f"exec ./duet {shlex.join(words)} >&-"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
        env=clean_environment(),
    )
    assert done.returncode == 2 and "standard output is closed" in done.stderr, done.stderr

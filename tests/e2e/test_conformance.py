"""What a program sees under plain Python, under torchrun and under Duet: the same, with a few
differences that are listed here with their reasons."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import zipapp
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FACTS = Path(__file__).parent / "scripts/facts.py"
Facts = dict[str, Any]
# Set by each launcher for its own launch.
OWN_VALUE = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"}
DIFFERS = {
    # torchrun's agent opens the store; under Duet rank 0 does, as under any other launcher
    "TORCHELASTIC_USE_AGENT_STORE": ("True", "False"),
    # read by torchrun's agent only
    "TORCHELASTIC_SIGNALS_TO_HANDLE": ("SIGTERM,SIGINT,SIGHUP,SIGQUIT", None),
    # loopback: ranks of one machine must not depend on its network
    "GLOO_SOCKET_IFNAME": (None, "lo"),
}
OF_THE_LAUNCHER = {"DUET_TOKEN", "_"}


@pytest.fixture
def place(tmp_path: Path, token: str) -> Path:
    """A folder with the program in several forms."""
    (tmp_path / "real").mkdir()
    shutil.copy(FACTS, tmp_path / "real/facts.py")
    (tmp_path / "link.py").symlink_to("real/facts.py")
    shutil.copy(FACTS, tmp_path / "nosuffix")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("module.py", "__main__.py"):
        shutil.copy(FACTS, package / name)
    zipapp.create_archive(package, tmp_path / "archive.pyz")
    return tmp_path


@pytest.fixture
def seen(place: Path, token: str, project: Path) -> Iterator[Callable[..., list[Facts]]]:
    """The facts of every rank of a command. FOLDER in it is replaced by the folder of the facts."""

    def run(*command: str, ranks: int = 1) -> list[Facts]:
        folder = place / f"facts {len(list(place.glob('facts *')))}"
        folder.mkdir()
        words = [word if word != "FOLDER" else folder.name for word in command]
        env = {k: v for k, v in os.environ.items() if not k.startswith("DUET_")}
        env |= {"DUET_TOKEN": token, "PWD": str(place)}
        ended = subprocess.run(
            words,
            cwd=place,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        assert ended.returncode == 0, ended.stderr
        assert "to stdout 0\nat exit\n" in ended.stdout and "to stdout" not in ended.stderr
        assert "to stderr 0\n" in ended.stderr and "to stderr" not in ended.stdout
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]

    # A shell ignores SIGQUIT for its jobs in the background, and nohup SIGHUP; torchrun does not pass
    # that on.
    before = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGQUIT, signal.SIGHUP)}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def duet(place: Path, project: Path, *words: str) -> list[str]:
    """`duet run` with these words. `project`: the copy of Duet under test."""
    folders = [f"--out_dir={place / 'experiments'}", f"--log_dir={place / 'logs'}"]
    return [str(project / "duet"), "run", *folders, "--report=false", *words]


def interpreter(project: Path) -> str:
    return str(project / ".venv/bin/python")


def comparable(facts: Facts) -> Facts:
    """Without the environment, and what each program must have for itself."""
    out = {name: value for name, value in facts.items() if name != "environment"}
    out["argv"] = [word for word in out["argv"] if not word.startswith("facts ")]
    out["orig_argv"] = [word for word in out["orig_argv"] if not word.startswith("facts ")]
    return out


def without_duet(facts: Facts, project: Path) -> Facts:
    """Without what Duet adds on purpose: the inspector, last on sys.path, the open file of its
    stacks, and that ranks ignore SIGHUP, as under nohup."""
    assert facts["path"].pop() == str(project / "lib/pythonpath")
    signals = facts["signals"]
    assert signals["SIGHUP"] == str(signal.SIG_IGN)
    return facts | {
        "descriptors": facts["descriptors"] - 1,
        "signals": signals | {"SIGHUP": str(signal.SIG_DFL)},
    }


@pytest.mark.parametrize(
    "words",
    [
        ["./link.py"],
        ["nosuffix"],
        ["-m", "package.module"],
        pytest.param(["package"], marks=pytest.mark.soak),  # as an archive
        ["archive.pyz"],
    ],
    ids=["symbolic link", "no suffix", "module", "folder", "archive"],
)
def test_one_rank_is_like_plain_python(
    seen: Callable[..., list[Facts]], place: Path, project: Path, words: list[str]
) -> None:
    arguments = ["FOLDER", "--epochs=3", "--dry_run", "-n", "4"]
    (python,) = seen(interpreter(project), "-u", *words, *arguments)
    (own,) = seen(*duet(place, project, "-n", "1", *words, *arguments))
    assert without_duet(comparable(own), project) == comparable(python)
    assert own["environment"]["WORLD_SIZE"] == "1"


@pytest.mark.slow
def test_two_ranks_are_like_under_torchrun(
    seen: Callable[..., list[Facts]], place: Path, project: Path
) -> None:
    agent = [interpreter(project), "-m", "torch.distributed.run", "--standalone"]
    words = ["--nproc-per-node", "2", "--max-restarts=0", "real/facts.py", "FOLDER"]
    theirs = seen(*agent, "--local-addr=127.0.0.1", *words, ranks=2)
    ours = seen(*duet(place, project, *words), ranks=2)
    for torchrun, own in zip(theirs, ours, strict=True):
        assert without_duet(comparable(own), project) == comparable(torchrun) | {
            # torchrun's pipes
            "descriptors": own["descriptors"] - 1
        }
        names = {*torchrun["environment"], *own["environment"]} - OWN_VALUE - OF_THE_LAUNCHER
        differing = {
            name: (torchrun["environment"].get(name), own["environment"].get(name))
            for name in names
            if torchrun["environment"].get(name) != own["environment"].get(name)
        }
        assert differing == DIFFERS
        assert set(own["environment"]) >= OWN_VALUE

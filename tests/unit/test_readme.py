"""The README is correct: its tables, links and commands are checked against the code."""

from __future__ import annotations

import re
import shlex

from tests.cases import each
from tests.conftest import ROOT
from training.config import flags, loader
from training.core.errors import EXIT_MEANING
from training.plan.cli_args import SCRIPTS

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"(?:^    (?:\$ )?|`)(\./(?:train_dual_gpu|train_dual_gpu_enhanced|launch_train)\.sh[^`\n]*)",
    README,
    re.MULTILINE,
)


def test_exit_codes() -> None:
    table = dict(re.findall(r"^\| (\d+) \| (.+) \|$", README, re.MULTILINE))
    assert table == {str(int(code)): meaning for code, meaning in EXIT_MEANING.items()}


def test_configs() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", README, re.MULTILINE)
    assert {row[0] for row in rows} == {
        p.stem for p in (ROOT / "configs/dual_gpu").glob("[a-z]*.py")
    }
    for name, *shown in rows:
        values, _ = loader.load(ROOT / f"configs/dual_gpu/{name}.py")
        fields = ("depth", "device_batch_size", "total_batch_size", "max_seq_len")
        assert [int(number) for number in shown] == [values[field][0] for field in fields]


def test_links() -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", README):
        assert (ROOT / target).exists(), target


@each("command", COMMANDS)
def test_commands_have_known_flags(command: str) -> None:
    assert len(COMMANDS) > 8
    words = [w for w in shlex.split(command, comments=True) if not set(w) & set("[]…")]
    if words[0] == "sbatch":
        words.pop(0)
        assert (ROOT / words[0]).exists()
        return
    script = words[0].removeprefix("./")
    assert script in SCRIPTS
    # what follows belongs to the user's script
    own = words[1 : words.index("--")] if "--" in words else words[1:]
    assert not flags.parse([w for w in own if w != "CONFIG"]).problems
    if "--script" not in own:
        assert all(
            (ROOT / word).exists()
            for word in own
            if word.endswith(".py") and not word.startswith("--")
        )

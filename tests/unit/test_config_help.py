"""The option list of --help is complete and fast."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.unit.conftest import ROOT
from training.config import flags
from training.config.flags import ACTIONS
from training.config.schema import FIELDS, GROUPS
from training.core.errors import EXIT_MEANING
from training.plan.option_help import INDENT, WIDTH, option_lines


def line_of(name: str) -> str:
    """The entry of an option, unwrapped: `  --flag=kind text`."""
    entries: list[str] = []
    for line in option_lines():
        if line.startswith(" " * INDENT):
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line)
    (entry,) = [x for x in entries if re.match(rf"  --{name}(?![\w-])", x)]
    return entry


def test_no_line_is_wider_than_a_terminal() -> None:
    assert [line for line in option_lines() if len(line) > WIDTH] == []


def test_every_field_with_its_default_unit_and_variable() -> None:
    for name, field in FIELDS.items():
        line = line_of(name)
        assert field.metadata["help"] in line
        assert f"[{field.metadata['unit']}]" in line or not field.metadata["unit"]
        default = "''" if field.default == "" else str(field.default)
        default = default.lower() if isinstance(field.default, bool) else default
        assert f"(default {default}" in line
        assert field.metadata["env"] in line


def test_every_action_group_and_exit_code() -> None:
    text = "\n".join(option_lines())
    for name, meaning in ACTIONS.items():
        assert meaning in line_of(name)
    for title in GROUPS.values():
        assert f"\n{title}:\n" in text
    for code, meaning in EXIT_MEANING.items():
        assert f" {int(code)}  {meaning}" in " ".join(text.split("\n       ")).replace("\n", "\n ")


def test_the_short_forms_of_bool_fields() -> None:
    (line,) = [x for x in option_lines() if "--no-FIELD" in x]
    for flag in re.findall("--(?:no-)?FIELD(?:=[a-z]+)?", line):
        assert not flags.parse([flag.replace("FIELD", "report")]).problems


def test_how_values_are_shown() -> None:
    assert line_of("device").startswith("  --device=auto|cuda|cpu ")
    assert line_of("device_batch_size").startswith("  --device_batch_size=int|auto ")
    assert line_of("compile").endswith("(default auto; also TORCH_COMPILE)")
    assert line_of("persistent_workers").endswith("(default false)")
    assert line_of("run_name").endswith("(default '')")


def test_help_needs_only_the_standard_library() -> None:
    # Called like this by the shell before anything is installed.
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import training.cli.option_list as o; "
        "print('\\n'.join(o.of_script('train_dual_gpu.sh')))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == option_lines()
    assert done.stderr == ""

"""docs/notify.md: every recipe is valid and sends title and text of the run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cases import each
from tests.conftest import ROOT
from training.config.secrets import first
from training.launcher import post_run

TEXT = (ROOT / "docs/notify.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"--notify='[^']+'", TEXT)
FACTS = {"title": 'a "run" failed', "text": "it's `so`, $HOME \\ 训练"}


def leaves(value: object) -> list[object]:
    return (
        [leaf for one in value.values() for leaf in leaves(one)]
        if isinstance(value, dict)
        else [value]
    )


def test_recipes_contain_no_secret() -> None:
    assert len(RECIPES) >= 10
    for recipe in RECIPES:
        assert first(recipe) == "", recipe


@each("recipe", RECIPES)
def test_a_recipe_sends_what_happened(recipe: str, tmp_path: Path) -> None:
    """curl, mail and notify-send are replaced by programs that record their input."""
    (word,) = shlex.split(recipe)
    command = word.removeprefix("--notify=")
    if "jq" in command and not shutil.which("jq"):
        pytest.skip("jq is not installed")
    for name in ("curl", "mail", "notify-send"):
        (tmp_path / name).write_text(
            '#!/bin/sh\nprintf "%s\\n" "$@" > args\n[ "$2" = "$DUET_TEXT" ] || cat > given\n'
        )
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DUET_STATUS": "failed",
        "DUET_TITLE": FACTS["title"],
        "DUET_TEXT": FACTS["text"],
    }
    env |= {name: f"https://{name}" for name in re.findall(r"\$(\w+_WEBHOOK)", command)} | {
        "NTFY_TOKEN": "secret"
    }
    done = subprocess.run(
        [post_run.SHELL, "-c", command],
        cwd=tmp_path,
        env=env,
        input=json.dumps(FACTS),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    args, given = (
        (tmp_path / "args").read_text().splitlines(),
        (tmp_path / "given").read_text() if (tmp_path / "given").exists() else "",
    )
    if "jq" in command:
        assert f"{FACTS['title']}\n{FACTS['text']}" in leaves(json.loads(given))
        assert args[-1].startswith("https://")
    else:
        assert FACTS["text"] in args or FACTS["text"] in given

"""docs/notify.md: every recipe is valid and sends title and text of the run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from tests.cases import each
from tests.conftest import ROOT
from training.config.secrets import first
from training.launcher import hook_runner, post_run
from training.launcher.stop_signals import PASSED_ON, StopSignals

TEXT = (ROOT / "docs/notify.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"--notify='[^']+'", TEXT)
RECORD = """#!/bin/sh
printf '%s\\n' "$@" > args
[ "$2" = "$DUET_TEXT" ] || cat > given
"""
# as the mail of BSD, which does not wait for sendmail
BACKGROUND = """#!/bin/sh
printf '%s\\n' "$@" > args
cat > taken
(sleep 5; mv taken given) > /dev/null &
"""
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
def test_a_recipe_sends_what_happened(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """curl, notify-send and the mailers are replaced by programs that record their input."""
    (word,) = shlex.split(recipe)
    command = word.removeprefix("--notify=").replace("/usr/sbin/", "")
    if "jq" in command and not shutil.which("jq"):
        pytest.skip("jq is not installed")
    monkeypatch.chdir(tmp_path)
    for name in ("curl", "mail", "notify-send", "sendmail"):
        (tmp_path / name).write_text(BACKGROUND if name == "mail" else RECORD)
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
    argv, facts = [post_run.SHELL, "-c", command], json.dumps(FACTS).encode()
    try:
        assert hook_runner.run(argv, env, facts, 30.0, StopSignals()) == ("", "")
    finally:
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
    args, given = (
        (tmp_path / "args").read_text().splitlines(),
        (tmp_path / "given").read_text() if (tmp_path / "given").exists() else "",
    )
    if "jq" in command:
        assert f"{FACTS['title']}\n{FACTS['text']}" in leaves(json.loads(given))
        assert args[-1].startswith("https://")
    else:
        assert FACTS["text"] in args or FACTS["text"] in given
    if "mail" in command:
        head, _, body = given.partition("\n\n")
        assert f"Subject: {FACTS['title']}" in head.splitlines()
        assert json.loads(body.partition("\n\n")[2]) == FACTS

"""Required and optional packages, and the effects of missing ones (training/host/packages.py)."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, tomllib
from training.config.origin import FLAG, VARIABLE, Origin
from training.config.schema import Config
from training.diagnose import patterns
from training.host import package_sources, packages, torch_build
from training.plan import builder, request


def names(specifiers: list[str]) -> set[str]:
    return {re.split(r"[=<>~! ;\[]", one, maxsplit=1)[0] for one in specifiers}


def test_every_direct_requirement_is_required_or_optional() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (full,) = extras["full"]
    in_full = [
        package for extra in re.findall(r"\w+", full.partition("[")[2]) for package in extras[extra]
    ]
    assert packages.REQUIRED.keys() == names(project["dependencies"])
    assert packages.OPTIONAL.keys() == names(in_full)
    oldest = ".".join(map(str, torch_build.OLDEST))
    assert f"torch>={oldest}" in project["dependencies"]
    assert packages.lacking([*packages.REQUIRED, *packages.OPTIONAL]) == [], (
        "the tested environment has all"
    )


def test_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = re.search(r"^py-spy==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert locked
    python, there = sys.executable, set[str]()
    monkeypatch.setattr(packages, "found", lambda module: False)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    by_itself = [python, "-m", "pip", "install"]
    for tools, words in (
        ("pip uv", ["uv", "pip", "install", "--python", python]),
        ("pip", ["pip", "--python", python, "install"]),
        ("", by_itself),
    ):
        there |= set(tools.split())
        assert packages.installer() == words
        there.clear()
    monkeypatch.setattr(packages, "found", lambda module: True)
    there.add("uv")
    assert packages.installer() == by_itself
    assert (
        packages.install(["psutil", "py-spy"])
        == f"{shlex.join(by_itself)} psutil py-spy=={locked[1]}"
    )
    assert re.search(r"pillow==\d", packages.install(["pillow"])), "a line with a marker"
    text = packages.missing_text(["py-spy", "wandb"])
    assert (
        "no stacks of hung ranks (py-spy), no W&B (wandb)" in text
        and text.count("pip install") == 1
        and "\n" not in text
    )
    assert packages.missing_text([]) == ""


def test_a_selected_tracker_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "found", lambda module: module not in ("wandb", "tensorboard"))
    config = Config(tensorboard=True, wandb_mode="online")
    asked = {
        "tensorboard": Origin("from --tensorboard on the command line", FLAG),
        "wandb_mode": Origin("from DUET_WANDB_MODE in the environment", VARIABLE),
    }
    problems = request.not_trackable(config, asked)
    assert [p.fixes[-1] for p in problems] == ["--tensorboard=false", "--wandb_mode=disabled"]
    assert (
        request.not_trackable(config, {"tensorboard": "default", "wandb_mode": "from my.py:3"})
        == []
    ), "reported by a note"
    assert request.not_trackable(Config(tensorboard=False, use_dummy_wandb=True), asked) == []


def test_another_re2_is_not_google_re2(tmp_path: Path) -> None:
    from tests.unit.conftest import python

    (tmp_path / "re2.py").write_text("def compile(pattern): ...\n")
    done = python(
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from training.diagnose import "
        f"patterns; print(patterns.re2)",
    )
    assert done.stdout == "None\n", done.stderr
    assert patterns.re2 is not None and builder.packages is packages


def test_a_user_without_a_home_has_package_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    environ = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "https://a.b/simple"}
    variables, _ = package_sources.uv_sources(environ)
    assert variables["UV_INDEX_URL"] == "https://a.b/simple"

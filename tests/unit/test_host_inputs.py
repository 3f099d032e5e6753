"""Checks of data files and of W&B."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from tests.cases import each
from training.config.schema import Config
from training.host import packages
from training.host.wandb_login import wandb_mode
from training.plan.preflight import data_checks
from training.plan.preflight.data_checks import data, wandb
from training.plan.preflight.report import ERROR, OK, WARNING

KEY = "0123456789abcdef0123456789abcdef01234567"


def made(folder: Path, **files: bytes) -> list[Path]:
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return sorted(folder.iterdir())


def test_files_with_the_expected_header(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18\x00\x00\x00\x00"
    files = made(
        tmp_path,
        a_txt=b"x",
        b_txt=b"",
        c_jsonl_gz=gzip.compress(b"{}"),
        d_parquet=b"PAR1x",
        e_txt_zst=b"\x28\xb5\x2f\xfdx",
        f_txt_zst=skippable,
    )
    found = data(files, "texts/")
    assert (found.status, found.text) == (OK, "6 files, all readable")
    assert data(files[:1], "texts/").text == "1 file, all readable"


def test_all_unreadable_files_are_reported(tmp_path: Path) -> None:
    files = made(
        tmp_path,
        a_txt=b"x",
        b_txt_gz=b"not compressed",
        c_parquet=b"",
        d_txt_zst=b"x",
        e_parquet=b"x",
    )
    (tmp_path / "z.txt").mkdir()
    found = data([*files, tmp_path / "z.txt", tmp_path / "gone.txt"], "texts/")
    assert found.status == ERROR
    assert found.text == (
        f"6 of 7 files cannot be read: {tmp_path}/b.txt.gz: not a .gz file; {tmp_path}/c.parquet: "
        f"empty; "
        f"{tmp_path}/d.txt.zst: not a .zst file; and 3 more"
    )
    assert found.fixes == ["recreate them, or remove them from texts/"]


def test_a_file_that_opens_but_fails_to_read(tmp_path: Path) -> None:
    (tmp_path / "memory.txt").symlink_to("/proc/self/mem")  # its first page is not mapped
    found = data([tmp_path / "memory.txt"], "memory.txt")
    assert (found.status, found.fixes) == (ERROR, ["recreate it, or remove it from memory.txt"])
    assert found.text == f"1 of 1 file cannot be read: {tmp_path}/memory.txt: Input/output error"


def test_too_many_files_for_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = made(tmp_path, a_txt=b"x", b_txt=b"x", c_txt=b"x")
    times = iter([0.0, 0.1, 0.5])
    monkeypatch.setattr(data_checks.time, "monotonic", lambda: next(times))
    found = data(files, "texts/")
    assert (found.status, found.text) == (
        OK,
        "the first 2 of 3 files are readable (stopped after 0.4 s)",
    )


def test_escape_sequences_in_a_name(tmp_path: Path) -> None:
    assert "\n" not in data([tmp_path / "a\n\x1b[2J.txt"], "x").text


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without a login, with W&B installed."""
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return tmp_path


def state(**fields: object) -> tuple[str, str, list[str]]:
    found = wandb(Config(**fields))  # type: ignore[arg-type]
    return found.status, found.text, found.fixes


def test_wandb_without_a_login(no_login: Path) -> None:
    assert state() == (
        OK,
        "not used: no login; `wandb login` or --wandb_mode=offline turns it on",
        [],
    )
    assert state(use_dummy_wandb=True) == (OK, "not used: dummy", [])
    assert state(wandb_mode="disabled") == (OK, "not used: as asked", [])
    assert state(wandb_mode="offline")[:2] == (
        OK,
        "offline (as asked), project duet: files in the run directory, `wandb sync` uploads them",
    )
    text = "online (as asked), but there is no login: continues offline"
    assert state(wandb_mode="online") == (WARNING, text, ["wandb login", "--wandb_mode=offline"])


def test_the_wandb_login_is_never_shown(no_login: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_login / ".netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    (no_login / ".netrc").chmod(0o600)
    assert state() == (OK, "online, project duet, login in ~/.netrc", [])
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert state(wandb_mode="online", wandb_project="mine") == (
        OK,
        "online, project mine, login by WANDB_API_KEY",
        [],
    )
    assert KEY not in json.dumps(wandb(Config()).record())


@each(
    "file, host, environ, online",
    [
        (".netrc", "api.wandb.ai", {}, True),
        ("_netrc", "api.wandb.ai", {}, True),
        ("own rc", "api.wandb.ai", {"NETRC": "~/own rc"}, True),
        (".netrc", "api.wandb.ai", {"NETRC": "~/own rc"}, False),
        (".netrc", "ai.lab.example:8080", {"WANDB_BASE_URL": "http://ai.lab.example:8080/"}, True),
        (".netrc", "api.wandb.ai", {"WANDB_BASE_URL": "http://ai.lab.example:8080"}, False),
        (".netrc", "ai.lab.example", {"WANDB_CONFIG_DIR": "~/w b"}, True),
        (".netrc", "wandb.example", {}, False),
    ],
)
def test_the_login_is_that_of_the_server(
    file: str,
    host: str,
    environ: dict[str, str],
    online: bool,
    tmp_path: Path,
    no_login: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where wandb finds it: in a netrc file, for its cloud or a server of one's own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "w b").mkdir()
    (tmp_path / "w b/settings").write_text("[default]\nbase_url = https://ai.lab.example\n")
    (tmp_path / file).write_text(f"machine {host} login user password {KEY}\n")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert wandb_mode(Config())[0] == ("online" if online else "disabled")
    if online:
        assert f"login in {environ.get('NETRC', f'~/{file}')}" in state()[1]


def test_missing_wandb(no_login: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert state()[0] == OK, "not requested"
    assert state(wandb_mode="offline") == (
        WARNING,
        "offline (as asked), but wandb is not installed: disabled",
        [packages.install(["wandb"]), "--wandb_mode=disabled"],
    )

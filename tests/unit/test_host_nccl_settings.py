"""NCCL's settings in files, by the rules of ncclInitEnv (src/misc/param.cc)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import each
from training.host import nccl_settings


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(nccl_settings, "OF_SYSTEM", tmp_path / "etc")
    monkeypatch.setattr(nccl_settings, "_home", lambda: tmp_path)
    return tmp_path


@each(
    ("content", "found"),
    [
        (b"NCCL_P2P_DISABLE=1\nNCCL_ALGO=Ring", {"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring"}),
        (b"# NCCL_ALGO=Ring\n#NCCL_ALGO=Ring\n\n", {}),
        (b"NCCL_ALGO=Ring # a value\n", {"NCCL_ALGO": "Ring # a value"}),
        (b" NCCL_ALGO=Ring\nNCCL_PROTO =Simple\n", {"NCCL_PROTO ": "Simple"}),
        (b"NCCL_ALGO=a=b\nNCCL_ALGO=c\nNCCL_PROTO\n", {"NCCL_ALGO": "a=b"}),
        (b"NCCL_ALGO=\r\nPATH=/\nNCCL_PROTO=\xff\n", {"NCCL_ALGO": "\r", "NCCL_PROTO": "\\xff"}),
    ],
)
def test_lines_are_read_as_nccl_does(content: bytes, found: dict[str, str], home: Path) -> None:
    (home / ".nccl.conf").write_bytes(content)
    assert nccl_settings.effective({"HOME": "/elsewhere", "PATH": "/bin"}) == found


def test_the_environment_precedes_the_file_of_the_user(home: Path) -> None:
    (home / "etc").write_text("NCCL_A=system\nNCCL_B=system\nNCCL_C=system\nNCCL_D=system")
    (home / ".nccl.conf").write_text("NCCL_A=user\nNCCL_B=user\nNCCL_C=user")
    (home / "named").write_text("NCCL_A=named")
    own = {"NCCL_A": "own", "NCCL_B": ""}
    rest = {"NCCL_C": "user", "NCCL_D": "system"}
    assert nccl_settings.effective(own) == own | rest
    named = {"NCCL_CONF_FILE": str(home / "named")}
    assert nccl_settings.effective(named) == named | {
        "NCCL_A": "named",
        **dict.fromkeys(("NCCL_B", "NCCL_C", "NCCL_D"), "system"),
    }


def test_files_that_cannot_be_read_are_ignored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".nccl.conf").mkdir()
    assert nccl_settings.effective({}) == {}
    monkeypatch.setattr(nccl_settings, "_home", lambda: None)
    assert nccl_settings.effective({}) == {}

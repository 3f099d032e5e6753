"""Config files: allowed contents, errors with file and line, and no execution."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.conftest import only
from training.config.loader import load
from training.core.errors import Problem

Write = Callable[..., str]


def values(path: str) -> dict[str, object]:
    found, problems = load(Path(path))
    assert problems == []
    return {name: value for name, (value, _) in found.items()}


def refused(path: str) -> Problem:
    return only(load(Path(path))[1])


def test_plain_assignments_with_their_lines(write: Write) -> None:
    text = (
        '"""About."""\n# comment\ndepth = 12  # blocks\n\nmax_seq_len: int = 1536\n'
        'data = "a b.txt"\ntensorboard = False\nmatrix_lr = 2e-3\n'
    )
    found, problems = load(Path(write("a b.py", text)))
    assert problems == []
    assert found == {
        "depth": (12, "a b.py:3"),
        "max_seq_len": (1536, "a b.py:5"),
        "data": ("a b.txt", "a b.py:6"),
        "tensorboard": (False, "a b.py:7"),
        "matrix_lr": (0.002, "a b.py:8"),
    }


def test_arithmetic_with_names_assigned_above(write: Write) -> None:
    text = (
        "max_seq_len = 1536\ntotal_batch_size = 2 * 8 * max_seq_len\nseed = -(-7) + 1 - 2 // "
        "2\nmatrix_lr = 1 / 4 + 0.5\n"
    )
    assert values(write("c.py", text)) == {
        "max_seq_len": 1536,
        "total_batch_size": 24576,
        "seed": 7,
        "matrix_lr": 0.75,
    }


def test_the_last_assignment_counts_as_in_python(write: Write) -> None:
    found, _ = load(Path(write("c.py", "depth = 1\ndepth = depth + 1\n")))
    assert found == {"depth": (2, "c.py:2")}


@pytest.mark.parametrize("text", ["", "\n\n", '"""Only a docstring."""\n', "# nothing\n"])
def test_an_empty_config_is_a_config(text: str, write: Write) -> None:
    assert values(write("c.py", text)) == {}


MARK = "open('marker', 'w')"


@each(
    "line",
    [
        "import os",
        "from os import system",
        f"depth = {MARK}",
        f"{MARK}",
        f"depth = [{MARK} for x in (1,)]",
        f"depth = (lambda: {MARK})()",
        f"depth = 1 if {MARK} else 2",
        f'depth = f"{{{MARK}}}"',
        f"depth = 1 + {MARK}",
        f"depth = -{MARK}",
        f"depth: {MARK}",
        f"depth = not {MARK}",
        f"depth = (x := {MARK})",
        f"depth = 1 and {MARK}",
        f"def depth(x={MARK}): pass",
        f"class depth:\n    x = {MARK}",
        f"@{MARK}\ndef depth(): pass",
        f"for x in {MARK}: pass",
        f"with {MARK}: pass",
        f"if {MARK}: depth = 1",
        f"assert {MARK}",
        f"x[{MARK}] = 1",
        f"x.y = {MARK}",
        "a = b = 1",
        "a, b = 1, 2",
        "depth += 1",
        "del depth",
        "pass",
        "raise SystemExit",
        "exec('1')",
        "depth = __import__('os').getpid()",
        "depth = (1).__class__",
        "depth = depth.real",
        "depth = 9 ** 9 ** 9",
        "depth = 2 ** 3",
        "depth = 1 << 9999999",
        "depth = 'x' * 9999999999",
        "depth = 'a' + 'b'",
        "depth = True + 1",
        "depth = -True",
        "depth = 1 // 0",
        "depth = 1.0 / 0",
        "depth = 7 % 2",
        "depth = [1, 2]",
        "depth = {}",
        "depth = other",
        "depth = ~1",
        "depth = 1 < 2",
    ],
)
def test_other_statements_are_rejected_with_file_and_line(
    line: str, write: Write, home: Path
) -> None:
    found, problems = load(Path(write("c.py", f"# first line\n{line}\nseed = 3\n")))
    assert not (home / "marker").exists()
    problem = only(problems)
    assert (
        problem.what.startswith(("c.py:2: ", "c.py:3: "))
        if line.startswith("@")
        else problem.what.startswith("c.py:2: ")
    )
    assert "depth = 12" in problem.allowed or "numbers, text" in problem.allowed
    # The rest of the file is still parsed: all problems are reported at once.
    assert found["seed"][0] == 3


def test_annotations_are_not_executed(write: Write, home: Path) -> None:
    load(Path(write("c.py", f"depth: {MARK} = 3\n")))
    assert not (home / "marker").exists()


def test_every_bad_line_is_reported(write: Write) -> None:
    _, problems = load(Path(write("c.py", "import os\ndepth = f()\nseed = 2 ** 3\n")))
    assert [p.what.split(" ")[0] for p in problems] == ["c.py:1:", "c.py:2:", "c.py:3:"]
    assert "'import os'" in problems[0].what
    assert problems[1].what.startswith("c.py:2: depth: ")


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("depth = 1\nseed == 3 =\n", 2, "'seed == 3 ='"),
        ("depth = (\n", 1, "depth = ("),
        ("depth = 12 blocks\n", 1, "depth = 12 blocks"),
        ("depth = 1\n  seed = 2\n", 2, "seed = 2"),
        ("a = 'x\n", 1, "a = 'x"),
        ("depth = 0x\n", 1, "depth = 0x"),
    ],
)
def test_a_syntax_error_has_file_and_line(text: str, line: int, shown: str, write: Write) -> None:
    problem = refused(write("c.py", text))
    assert problem.what.startswith(f"c.py:{line}: ")
    assert shown in problem.what


@pytest.mark.parametrize(
    "text",
    [
        "depth = 1\0\n",
        "depth = " + "(" * 500 + "1" + ")" * 500,
        "depth = " + "-" * 5000 + "1",
        "depth = 1" + " + 1" * 5000,
        # Python parses these, but they are too deep for a recursive evaluation.
        "depth = " + "-" * 2000 + "1",
        "depth = 1" + " + 1" * 2000,
        "depth = " + "1" * 5000,
    ],
    ids=[
        "null byte",
        "parentheses",
        "minuses",
        "pluses",
        "fewer minuses",
        "fewer pluses",
        "digits",
    ],
)
def test_expressions_beyond_the_limits_of_python(text: str, write: Write) -> None:
    assert refused(write("c.py", text)).what.startswith("c.py:1: ")


def test_huge_numbers_are_rejected(write: Write) -> None:
    # Repeated squaring: 40 such lines would need a terabyte.
    start = time.monotonic()
    _, problems = load(Path(write("c.py", "depth = 10\n" + "depth = depth * depth\n" * 16)))
    assert problems
    assert problems[0].what.startswith("c.py:")
    assert time.monotonic() - start < 5


def test_windows_files(write: Write) -> None:
    assert values(write("c.py", b"depth = 1\r\nseed = 2\r\n")) == {"depth": 1, "seed": 2}
    assert load(Path("c.py"))[0]["seed"][1] == "c.py:2"


def test_json(write: Write) -> None:
    found, problems = load(
        Path(
            write("c.json", '{"depth": 12, "data": "a.txt", "tensorboard": true, "matrix_lr": 0.1}')
        )
    )
    assert problems == []
    assert found == {
        "depth": (12, "c.json: 'depth'"),
        "data": ("a.txt", "c.json: 'data'"),
        "tensorboard": (True, "c.json: 'tensorboard'"),
        "matrix_lr": (0.1, "c.json: 'matrix_lr'"),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"depth": 12,\n "seed": }', "c.json:2:10: "),
        ("", "c.json:1:1: "),
        ("{'depth': 12}", "c.json:1:2: "),
        ('{"depth": 12', "c.json:1:"),
        ("[12]", "a list instead of"),
        ("12", "a number instead of"),
        ("null", "null instead of"),
        ('"depth"', "text instead of"),
        ("[" * 200_000, "nested too deep"),
        ('{"depth": ' + "1" * 5000 + "}", "c.json"),
    ],
    ids=["comma", "empty", "quotes", "cut", "list", "number", "null", "text", "deep", "digits"],
)
def test_json_must_be_a_flat_object(text: str, expected: str, write: Write) -> None:
    problem = refused(write("c.json", text))
    assert expected in problem.what
    assert '{"depth": 12}' in problem.allowed


def test_json_with_comments_and_trailing_commas(write: Write) -> None:
    text = (
        '{\n  // why, with a "quote"\n  "data": "http://x,]", // here, too\n  "seed": 4, // '
        "the "
        "last\n}\n"
    )
    values, problems = load(Path(write("c.json", text)))
    assert ({name: value for name, (value, _) in values.items()}, problems) == (
        {"data": "http://x,]", "seed": 4},
        [],
    )
    assert "c.json:4:1: " in refused(write("c.json", '{\n"seed": 4,\n"depth": 12,,\n}')).what


def test_duplicate_json_keys(write: Write) -> None:
    _, problems = load(Path(write("c.json", '{"depth": 1, "seed": 2, "depth": 3, "seed": 2}')))
    assert [p.what for p in problems] == [
        "c.json: 'depth' is given twice",
        "c.json: 'seed' is given twice",
    ]


def test_unusable_files(write: Write, home: Path) -> None:
    (home / "folder.py").mkdir()
    write("folder.py/inside.py", "depth = 1\n")
    (home / "dangling.py").symlink_to("nowhere")
    write("text.txt", "depth = 1\n")
    write("latin.py", b"# caf\xe9\ndepth = 1\n")
    write("latin.json", b'{"data": "caf\xe9"}')
    expected = {
        "missing.py": "does not exist",
        "dangling.py": "does not exist",
        "text.txt/c.py": "does not exist",
        "folder.py": "is a directory",
        "text.txt": "is neither .py nor .json",
        "latin.py": "cannot be read",
        "latin.json": "cannot be read",
    }
    for name, words in expected.items():
        problem = refused(name)
        assert f"config {name} {words}" in problem.what
        assert problem.allowed
    assert "folder.py/inside.py" in refused("folder.py").fixes[0]


def test_a_name_beyond_the_limit_of_the_file_system(home: Path) -> None:
    assert "does not exist" in refused("x" * 300 + ".py").what


def test_a_file_without_read_permission(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("c.py", "depth = 1\n")

    def denied(*args: object, **kwargs: object) -> str:
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, which can read everything.
    monkeypatch.setattr(Path, "read_text", denied)
    assert "config c.py cannot be read: [Errno 13] Permission denied" in refused(path).what


def test_provided_configs_are_suggested_for_a_missing_one(write: Write) -> None:
    write("configs/dual_gpu/balanced.py", "depth = 16\n")
    write("configs/dual_gpu/__init__.py", "")
    (fix,) = refused("configs/dual_gpu/balancd.py").fixes
    assert "configs/dual_gpu/balanced.py" in fix
    assert "__init__" not in fix


def test_a_file_beside_a_missing_one_is_suggested(write: Write) -> None:
    for name in ("my configs/small.py", "my configs/other.py", "small.py"):
        write(name, "depth = 1\n")
    assert refused("my configs/smalll.py").fixes == ["--config='my configs/small.py'"]
    assert refused("smalll.json").fixes == ["--config=small.py"]


def test_a_program_is_not_suggested(write: Write) -> None:
    write("train.py", "import torch\n")
    assert "--config=train.py" not in refused("trainn.py").fixes


def test_a_valid_config_is_read_alone(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(path: Path) -> list[Path]:
        raise AssertionError(path)

    monkeypatch.setattr("training.config.loader._beside", listed)
    assert values(write("c.py", "depth = 1\n")) == {"depth": 1}


def test_a_suggested_config_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = [Path("/a b/quickstart.py")]
    monkeypatch.setattr("training.config.loader._ready", lambda folder: ready)
    assert refused("nothing_like_it.py").fixes == ["--config='/a b/quickstart.py'"]


def test_reading_creates_no_compiled_file(write: Write, home: Path) -> None:
    values(write("c.py", "depth = 1\n"))
    assert os.listdir(home) == ["c.py"]

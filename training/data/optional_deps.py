"""Optional packages that a file format or tokenizer needs, and the problem reported if one is
missing.

Nothing is imported here: a package counts as installed if the interpreter would find it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from training.core.errors import Problem
from training.host import packages

# Suffix, package, its use.
FORMS = (
    (".parquet", "pyarrow", "reads .parquet"),
    (".zst", "zstandard", "reads .zst"),
    (".json", "tokenizers", "loads a tokenizer.json"),
    (".tiktoken", "tiktoken", "loads a .tiktoken file"),
)


def missing(files: Iterable[Path], tokenizer: str) -> list[Problem]:
    """One problem for all packages that these files and this tokenizer need and this interpreter
    lacks.

    Call it only in the interpreter of the run: another interpreter has other packages.
    """
    needs: dict[str, str] = {}  # package → reason
    if tokenizer == "bpe":
        needs["tokenizers"] = "--tokenizer=bpe needs tokenizers"
    for name in [str(tokenizer), *map(str, files)]:
        for suffix, package, does in FORMS:
            if name.lower().endswith(suffix) and package not in needs:
                needs[package] = f"{name} needs {package} ({does})"
    lacking = {
        package: text
        for package, text in needs.items()
        if importlib.util.find_spec(package) is None
    }
    if not lacking:
        return []
    return [
        Problem(
            "package.missing",
            f"optional package not installed: {'; '.join(lacking.values())}",
            "",
            packages.add(lacking),
        )
    ]

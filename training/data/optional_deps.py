"""Optional packages that a file format or tokenizer needs, and the problem reported if one is
missing.

Nothing is imported here: a package counts as installed if the interpreter would find it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from training.core.errors import Problem
from training.core.messages import msg
from training.host import packages

# Suffix, package, its use.
FORMS = (
    (".parquet", "pyarrow", msg("data.deps.parquet")),
    (".zst", "zstandard", msg("data.deps.zst")),
    (".json", "tokenizers", msg("data.deps.json")),
    (".tiktoken", "tiktoken", msg("data.deps.tiktoken")),
)


def missing(files: Iterable[Path], tokenizer: str) -> list[Problem]:
    """One problem for all packages that these files and this tokenizer need and this interpreter
    lacks.

    Call it only in the interpreter of the run: another interpreter has other packages.
    """
    needs: dict[str, str] = {}  # package → reason
    if tokenizer == "bpe":
        needs["tokenizers"] = msg("data.deps.bpe")
    for name in [str(tokenizer), *map(str, files)]:
        for suffix, package, does in FORMS:
            if name.lower().endswith(suffix) and package not in needs:
                needs[package] = msg("data.deps.needs", name=name, package=package, does=does)
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
            msg("data.deps.missing", reasons=msg("data.deps.separator").join(lacking.values())),
            "",
            packages.add(lacking),
        )
    ]

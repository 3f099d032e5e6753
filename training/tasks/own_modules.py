"""Modules that a user's task imports from the folder of its file, as a script does. No torch."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import training

INSTALLED = {"site-packages", "dist-packages"}
MAIN = ("__main__", "__mp_main__")

_folder: Path | None = None  # of the task whose modules are in use


def use(folder: Path) -> None:
    """Imports find the modules in `folder`. Those of the task before are forgotten: modules of both
    tasks may have the same name."""
    global _folder
    if _folder is not None and folder != _folder:
        for name, _, _ in list(_loaded(_folder)):
            del sys.modules[name]
        if str(_folder) in sys.path:
            sys.path.remove(str(_folder))
    if folder != _folder or str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    _folder = folder


def files(file: Path) -> dict[Path, Path]:
    """The task's file and the modules below its folder that are imported: path in that folder →
    file."""
    found = {inner: place for _, inner, place in _loaded(file.parent) if place.is_file()}
    return {Path(file.name): file, **dict(sorted(found.items()))}


def inside(place: str | Path, folder: Path) -> Path | None:
    """The path in `folder`; None if it is elsewhere, or installed in that folder, as Duet may
    be."""
    whole = Path(os.path.abspath(place))  # without '..'
    for root in (folder, folder.resolve()):
        if whole.is_relative_to(root):
            inner = whole.relative_to(root)
            return None if INSTALLED & {*inner.parts} or _installed(whole, root) else inner
    return None


def package_of(kind: type) -> str:
    """The installed package that defines a class, or torch, wherever it is; "" for the user's own
    code, which may move, or a clone of a package."""
    package = kind.__module__.partition(".")[0]
    place = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return package if package == "torch" or INSTALLED & {*Path(place).parts} else ""


def _loaded(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Name of the module, its path in `folder`, its file; the folder of a package without
    __init__.py."""
    for name, module in list(sys.modules.items()):
        if name in MAIN:
            continue
        facts = getattr(module, "__dict__", {})  # getattr() of a lazy module may import others
        place = facts.get("__file__") or next(iter(facts.get("__path__") or ()), None)
        if isinstance(place, str) and (inner := inside(place, folder)):
            yield name, inner, Path(place)


def _installed(whole: Path, root: Path) -> bool:
    """Whether this belongs to a Python below `root` (conda in a home), or to Duet."""
    places = (sys.prefix, sys.base_prefix, sysconfig.get_paths()["stdlib"], *training.__path__)
    return any(
        whole.is_relative_to(place) and Path(place).is_relative_to(root) and Path(place) != root
        for place in places
    )

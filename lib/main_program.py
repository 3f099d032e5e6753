"""Executes a program inside this process as `python WORDS…` does: a file, a folder or zip archive
that contains a __main__.py, or a module (`-m NAME`).

The program sees the sys.argv, sys.path, sys.orig_argv and __main__ that it has under plain Python;
tests/e2e/test_conformance.py compares them. Standard library only, Python >= 3.8.
"""

import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
import typing

MODULE = "-m"


def name(words: "list[str]") -> str:
    """The program as a user calls it."""
    return " ".join(words[:2]) if words[0] == MODULE else words[0]


def execute(words: "list[str]") -> None:
    """Raises what the program raises."""
    sys.argv = list(words)
    if hasattr(sys, "orig_argv"):  # Python 3.10
        sys.orig_argv = [sys.executable, "-u", *words]
    module = types.ModuleType("__main__")
    module.__dict__.update(_born(), __doc__=None)
    # Pickled classes and spawned processes refer to the program by this name.
    sys.modules["__main__"] = module
    if words[0] == MODULE:
        _first_on_path(os.getcwd())
        sys.argv = [MODULE, *words[2:]]
        _as_main(words[1], True)
    elif pkgutil.get_importer(words[0]) is not None:  # a folder or an archive
        _first_on_path(_absolute(words[0]), always=True)
        _as_main("__main__", False)
    else:
        # symbolic links are resolved, as by Python
        _first_on_path(os.path.dirname(os.path.realpath(words[0])))
        _file(words[0], module)


def _born() -> "dict[str, object]":
    """What Python itself puts into `__main__`: it differs between versions."""
    own = vars(sys.modules["__main__"])  # of the runner, which has no such names of its own
    born = {name: value for name, value in own.items() if name.startswith("__")}
    return born if "__annotations__" not in born else {**born, "__annotations__": {}}


def _first_on_path(folder: str, always: bool = False) -> None:
    """Replaces the folder of the runner. Nothing is there with PYTHONSAFEPATH (`python -P`)."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


def _absolute(path: str) -> str:
    """As Python itself does from 3.9 on; `./` and `..` stay."""
    return os.path.join(os.getcwd(), path) if sys.version_info >= (3, 9) else path


def _as_main(module: str, alter_argv: bool) -> None:
    run = typing.cast(
        "typing.Callable[[str, bool], object]",
        runpy._run_module_as_main,  # type: ignore[attr-defined] # what `python -m` calls
    )
    run(module, alter_argv)


def _file(path: str, module: types.ModuleType) -> None:
    file = _absolute(path)
    kind = (
        importlib.machinery.SourcelessFileLoader
        if path.endswith(".pyc")
        else importlib.machinery.SourceFileLoader
    )
    loader = kind("__main__", file)
    module.__dict__.update(__file__=file, __loader__=loader)
    if isinstance(loader, importlib.machinery.SourcelessFileLoader):
        code = loader.get_code("__main__")
    else:  # not the loader's get_code, which writes a .pyc
        with io.open_code(path) as source:
            code = compile(source.read(), file, "exec", dont_inherit=True)
    assert code is not None
    exec(code, module.__dict__)

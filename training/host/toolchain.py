"""What torch.compile needs on this machine: it builds C code on a GPU too (Triton's launchers).
Triton and Inductor take the value of CC or CXX as one program, without arguments."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from training.core.messages import msg
from training.host import packages, torch_build
from training.host.gpus import Gpu
from training.host.torch_build import TorchBuild

INSTALL = "sudo apt-get install"
# device → variable that names the compiler, otherwise these, and the Debian package
_COMPILERS = {"cuda": ("CC", ("gcc", "clang"), "gcc"), "cpu": ("CXX", ("g++",), "g++")}
TRITON_CAPABILITY = (7, 0)  # the oldest that Inductor accepts (torch/_inductor/scheduler.py)
# a Python for which an older torch refuses to compile (torch.compile in torch/__init__.py)
NEW_PYTHON, TORCH_FOR_IT = (3, 14), (2, 10)
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Debian's compilers only recommend the package with the headers of the C library.
TRIAL, TRIAL_S = "#include <stdlib.h>\n#include <Python.h>\n", 30
NAMELESS = f"uid_{os.getuid()}"  # a user without a name, for torch's folder of compiled code
TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")  # of tempfile, after those of the environment


def missing(
    device: str,
    environ: Mapping[str, str],
    gpus: Iterable[Gpu] = (),
    torch: TorchBuild | None = None,
) -> dict[str, str]:
    """What is missing on this machine → a command that provides it, '' for none. `gpus`: those of
    the ranks; `torch`: the installed one."""
    variable, usual, package = _COMPILERS[device]
    asked = environ.get(variable)

    def known(*programs: str) -> str:
        """The path of the first one that exists; ''."""
        found = (shutil.which(program, path=environ.get("PATH")) for program in programs)
        return next(filter(None, found), "")

    lacks = dict(filter(None, (_newer_torch(torch, environ),)))
    compiler = known(asked) if asked else known(*usual)
    if asked and not compiler:
        named = f"{variable}={shlex.quote(asked)}"
        lacks[named] = f"unset {variable}" if known(*usual) else f"{INSTALL} {package}"
    elif not compiler:
        lacks[package] = f"{INSTALL} {package}"
    if not Path(_python_headers(), "Python.h").is_file():
        lacks["Python.h"] = f"{INSTALL} python3-dev"
    for gpu in gpus:
        if gpu.capability and tuple(gpu.capability) < TRITON_CAPABILITY:
            lacks[msg("host.toolchain.too_old", name=gpu.name)] = ""
    lacks |= dict(filter(None, (_cache(name, environ) for name in CACHES)))
    if not lacks and (error := _error_of(compiler)):
        other = known(*usual) if asked else ""
        text = msg("host.toolchain.fails", compiler=asked or Path(compiler).name, error=error)
        helps = other and not _error_of(other)
        lacks[text] = f"unset {variable}" if helps else f"{INSTALL} libc6-dev"
    return lacks


def _python_headers() -> str:
    """Where Triton looks for Python.h (triton/runtime/build.py): Debian's own scheme names a folder
    below /usr/local."""
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)


@functools.cache
def _error_of(compiler: str) -> str:
    """Its first error in the compilation of TRIAL; ''."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, headers = Path(folder, "trial.c"), _python_headers()
            source.write_text(TRIAL)
            done = subprocess.run(
                [compiler, source, f"-I{headers}", "-shared", "-fPIC", "-o", f"{folder}/trial.so"],
                check=False,
                env=os.environ | {"LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TRIAL_S,
            )
    except subprocess.TimeoutExpired:  # the machine may be slow
        return ""
    except OSError as error:
        return str(error)
    if not done.returncode:
        return ""
    named = re.search(r"(?:error|ld): *(.+)", done.stderr)
    return named[1] if named else done.stderr.partition("\n")[0] or str(done.returncode)


def _newer_torch(torch: TorchBuild | None, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """A torch that compiles under this Python, and a command unless a variable selects the
    torch."""
    if torch is None or torch.number is None or sys.version_info < NEW_PYTHON:
        return None
    if torch.number >= TORCH_FOR_IT:
        return None
    first, python = (".".join(map(str, one)) for one in (TORCH_FOR_IT, NEW_PYTHON))
    text = msg("host.toolchain.torch", first=first, python=python, version=torch.version)
    chosen = torch_build.chosen_by(torch, environ)
    return text, "" if chosen else packages.install([f"torch>={first}"])


def _cache(variable: str, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """A folder for compiled code that cannot be used, and a command. Libraries in it are loaded,
    which fails in the first step if its file system is mounted noexec, as /tmp of hardened
    machines."""
    asked = environ.get(variable)
    if not asked and variable != CACHES[0]:
        return None  # below the other one, or at home (see triton_folder)
    text = _unusable(_existing(Path(asked).absolute()) if asked else _temporary(environ))
    if not text:
        return None
    if asked:
        return text, f"unset {variable}"
    home = ".cache/torchinductor"
    return text, f"export {variable}=~/{home}" if _has_home(home) else ""


def triton_folder(environ: Mapping[str, str], user: str) -> str:
    """The folder for Triton's compiled code, '' for its own choice. Triton builds its driver below
    the home folder before Inductor sets TRITON_CACHE_DIR (CachingAutotuner.__init__); a user ID
    without an account has the home / or none."""
    if environ.get("TRITON_HOME"):
        return ""
    if _has_home(".triton/cache"):
        return ""
    # as default_cache_dir of torch/_inductor/runtime/cache_dir_utils.py
    own = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user or NAMELESS)
    return str(Path(environ.get(CACHES[0]) or _temporary(environ) / own) / "triton")


def _has_home(folder: str) -> bool:
    """Whether compiled code can be kept in this folder of the home."""
    try:
        return not _unusable(_existing(Path.home() / folder))
    except RuntimeError:  # no home at all
        return False


def _existing(folder: Path) -> Path:
    """It, or the folder in which it would be created."""
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def _unusable(folder: Path) -> str:
    if not _writable(folder):
        return msg("host.toolchain.not_writable", folder=folder)
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return msg("host.toolchain.noexec", folder=folder)
    return ""


def _temporary(environ: Mapping[str, str]) -> Path:
    """The folder that tempfile chooses for torch; without a usable one the first."""
    named = [folder for name in ("TMPDIR", "TEMP", "TMP") if (folder := environ.get(name))]
    folders = [Path(folder).absolute() for folder in (*named, *TEMPORARY)]
    return next(filter(_writable, folders), folders[0])


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK) and folder.is_dir()

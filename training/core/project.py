"""Paths of the project, as a checkout or as an installed package."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = "train.py"
LAUNCH_SCRIPT, SUBMIT_SCRIPT = "launch_train.sh", "submit_job.sh"
# Installed by pip into site-packages (lib/site/_duet.py).
INSTALLED = ROOT.name == "duet_home"
# The folder of experiments/, logs/ and data/: the checkout, or the working directory of an
# installed `duet`.
WORK = Path.cwd() if INSTALLED else ROOT
# Environments, results and prepared texts in ROOT: folders, or links to another disk, which git
# would take for code.
NO_CODE = {".venv", ".venv.old", ".tools", "experiments", "logs", "data"}
# Errors of a user who needs a copy of the project (own_copy).
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
# The path of the script that the user has started, unless the current directory is the project
# (lib/init.sh).
STARTED_AS = "DUET_STARTED_AS"
# The file into which a refused start writes the codes of its problems, for `duet sweep`.
PROBLEMS = "DUET_PROBLEMS"
PACKAGE = f"{ROOT}/training/"  # Duet's own code; a task is elsewhere
# Set for `duet doctor`, which is this script with this flag.
DOCTOR = "DUET_DOCTOR"
_DOCTOR = re.compile(
    r"(?<![\w./~-])\./train_dual_gpu_enhanced\.sh(?: --check(?![\w=-])|(?= --help(?![\w=-])))",
    re.ASCII,
)
_BY_DUET = {
    "train_dual_gpu_enhanced.sh": "duet train-enhanced",
    "train_dual_gpu.sh": "duet train",
    LAUNCH_SCRIPT: "duet launch",
    SUBMIT_SCRIPT: "duet submit",
    "monitor_training.sh": "duet monitor",
    "duet": "duet",
}
_SCRIPT = re.compile(
    rf"(?<![\w./~-])\./({'|'.join(map(re.escape, _BY_DUET))})(?![\w./-])", re.ASCII
)


def script(name: str) -> list[str]:
    """The command of a script of Duet. By bash: a noexec mount, exFAT or cloud drive has no execute
    permission."""
    return ["bash", str(ROOT / name)]


def own_copy(root: Path = ROOT) -> str:
    """The command with which a user who may not write to the project copies it."""
    git = root / ".git"
    there, copy = shlex.quote(str(root)), f"~/{shlex.quote(root.name)}"
    if not git.exists():
        # of a project that is read-only for its owner, too
        made = f"tar -C {there} --mode=u+w --exclude=./{{{','.join(sorted(NO_CODE))}}} -c ."
        return f"mkdir {copy} && {made} | tar -C {copy} -x"
    clone = f"git clone {there} {copy}"
    if git.stat().st_uid == os.getuid():
        return clone
    # otherwise git refuses another user's repository
    return f"git config --global --add safe.directory {shlex.quote(str(git))} && {clone}"


def typed(text: str) -> str:
    """`text` with its commands as they are typed in the user's current directory."""
    started_as = os.environ.get(STARTED_AS)
    if os.environ.get(DOCTOR):
        text = _DOCTOR.sub("./duet doctor", text)
    if by_name() or not started_as:
        return published(text, by_name())
    return _SCRIPT.sub(lambda found: _command(found[1], Path(started_as)), text)


def by_name() -> bool:
    """Whether the only script is `duet`: of a package, or of an editable installation outside its
    checkout."""
    return INSTALLED or bool(os.environ.get(STARTED_AS) and os.environ.get("DUET_PYTHON"))


def published(text: str, installed: bool = INSTALLED) -> str:
    """`text` for readers on other machines: without paths of this one."""
    return _SCRIPT.sub(lambda found: _BY_DUET[found[1]], text) if installed else text


def _command(script: str, started_as: Path) -> str:
    """How this script of the project is started from the current directory."""
    beside = str(started_as.with_name(script))
    ways = ((f"./{script}", script), (script, shutil.which(script)), (beside, beside))
    for way, file in ways:
        with contextlib.suppress(OSError):
            if file and Path(file).samefile(ROOT / script):
                return shlex.quote(way)
    return shlex.quote(str(ROOT / script))


def shipped(path: Path) -> Path:
    """`path`, or if it does not exist, the file of this name in the project's folders, such as
    configs/dual_gpu/quickstart.py."""
    # not train.py; os.path returns False for a name that is too long
    if len(path.parts) == 1 or os.path.exists(path):
        return path
    return ROOT / path if os.path.isfile(ROOT / path) else path  # noqa: PTH113

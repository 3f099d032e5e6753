"""What the options of a job request: on the command line, in SBATCH_… variables, in the header of
the script. sbatch takes the first of these."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.launcher.slurm import controller
from training.launcher.slurm.options import (
    BARE,
    NO_GRES,
    REFUSED,
    SCRIPT,
    SHORT,
    SplitArgs,
    signal_problem,
)

GPUS = ("gres", "gpus-per-node")
CONTRADICT = ("array", "gpus", "gpus-per-task")  # the one task on each node
# There is none for --nodes.
VARIABLES = {
    name: f"SBATCH_{name.upper().replace('-', '_')}"
    for name in (*GPUS, *CONTRADICT, "signal", "output", "error", "job-name")
} | {"array": "SBATCH_ARRAY_INX"}
OF_A_JOB = {  # set in a job if the option was given, or the site has a default
    "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT",
    "qos": "SLURM_JOB_QOS",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
    "cpus-per-gpu": "SLURM_CPUS_PER_GPU",
    "mem": "SLURM_MEM_PER_NODE",  # in MiB, as the two others
    "mem-per-cpu": "SLURM_MEM_PER_CPU",
    "mem-per-gpu": "SLURM_MEM_PER_GPU",
    "reservation": "SLURM_JOB_RESERVATION",
}
_LETTERS = SHORT | {"-a": "array", "-e": "error", "-D": "chdir", "-G": "gpus"}
# A job has the name of its run, and its log in the folder of the project, unless the user has
# chosen others than those of the header.
UNCHOSEN = {"job-name": "duet", "output": "logs/%x_%j.log"}


def header(script: Path) -> dict[str, str]:
    """Options with a value in the script itself: #SBATCH --name=value, --name value, or -N 2."""
    found, words = {}, _header_words(script)
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, equals, value = _LETTERS.get(word[:2], ""), word[2:], word[2:]
        if not equals and name not in BARE and words and not words[0].startswith("-"):
            equals = value = words.pop(0)
        if name and equals:
            found[name] = value
    return found


def _header_words(script: Path) -> list[str]:
    """Those of all #SBATCH lines; sbatch stops reading at the first command. Raises UserError."""
    words = []
    for line in script.read_text(encoding="utf-8").splitlines():
        if line.startswith("#SBATCH"):
            try:
                words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError as error:
                what = msg("launcher.slurm.options.header_quotes", line=line, error=error)
                allowed = msg("launcher.slurm.options.quotes_allowed")
                raise UserError(Problem("slurm.sbatch_quotes", what, allowed)) from None
        elif line.strip() and not line.startswith("#"):
            break
    return words


def beside(script: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Options that the user has chosen in variables and in the header."""
    chosen = {n: text for n, text in header(script).items() if text != UNCHOSEN.get(n)}
    return chosen | {n: environ[name] for n, name in VARIABLES.items() if environ.get(name)}


def given(line: SplitArgs, name: str, environ: Mapping[str, str]) -> str | None:
    """The value of an option that the user has chosen, which overrides the header."""
    typed = line.option(name)
    return environ.get(VARIABLES[name]) if typed is None else typed


def problems(line: SplitArgs, environ: Mapping[str, str]) -> list[Problem]:
    """Of options in variables and in the header."""
    found = []
    for name in CONTRADICT:
        if (text := line.beside.get(name)) is None:
            continue
        if environ.get(VARIABLES[name]):
            what = msg("launcher.slurm.options.variable", name=VARIABLES[name], text=text)
            fixes = [f"unset {VARIABLES[name]}"]
        else:
            what = msg("launcher.slurm.options.header", script=SCRIPT, name=name, text=text)
            fixes = []
        found.append(Problem("slurm.sbatch_own", what, REFUSED[name], fixes))
    if (text := line.beside.get("signal")) is not None and line.option("signal") is None:
        variable = VARIABLES["signal"]
        shown = f"{variable}={text}" if environ.get(variable) else f"#SBATCH --signal={text}"
        if problem := signal_problem(text, shown):
            found.append(problem)
    return found


def nodes(line: SplitArgs, script: Path) -> int:
    """Number of nodes requested; 0, and a problem, when that is not a single number."""
    text = line.option("nodes") or header(script).get("nodes", "1")
    if text.isdecimal() and len(text) < 6 and int(text):
        return int(text)
    line.problems.append(
        Problem(
            "flag.value",
            msg("launcher.slurm.options.nodes_value", text=text),
            msg("launcher.slurm.options.nodes_allowed"),
            ["--nodes=2"],
        )
    )
    return 0


def ranks(line: SplitArgs, script: Path, environ: Mapping[str, str]) -> int:
    """Ranks on each node, as requested at submission; 0 when unspecified."""
    return line.ranks or gpus(line, script, environ)


def gpus(line: SplitArgs, script: Path, environ: Mapping[str, str]) -> int:
    """GPUs on each node, as requested at submission; 0 without a request."""
    gres, per_node = (given(line, name, environ) for name in GPUS)
    if gres is None and per_node is None:
        gres, per_node = (header(script).get(name) for name in GPUS)
    if per_node is not None:
        return _gpus_by_node(per_node)
    return gpus_in_gres(gres or "")


def gpus_in_gres(text: str) -> int:
    """GPUs in a value of --gres, such as gpu:2, gpu:a100:4, shard:8; 0 when there are none."""
    return sum(_count(part) for part in _gres(text).split(",") if re.match(r"gpu\b", part))


def _gres(text: str) -> str:
    """The value of --gres; SLURM shows it with gres: or gres/ before each part."""
    return ",".join(re.sub(r"^gres[:/]", "", part) for part in text.split(","))


def _gpus_by_node(text: str) -> int:
    """GPUs in a value of --gpus-per-node, such as 4, a100:4."""
    return sum(_count(part) for part in text.split(","))


def _count(part: str) -> int:
    """The number at the end of [TYPE:]COUNT."""
    last = re.split("[:=]", re.sub(r"\(.*", "", part))[-1]
    return int(last) if last.isdecimal() else 1


def ranks_in_job(line: SplitArgs, environ: Mapping[str, str]) -> int:
    """The same inside a job, from the allocation; 0 when unspecified."""
    return line.ranks or gpus_in_job(environ)


def gpus_in_job(environ: Mapping[str, str]) -> int:
    """GPUs on each node that a step of this job gets."""
    return _gpus_of(_gpu_option(environ, _shown(environ)))


def _shown(environ: Mapping[str, str]) -> str:
    return controller.ask("show", "job", "-o", environ["SLURM_JOB_ID"]).out


def _gpu_option(environ: Mapping[str, str], shown: str) -> str:
    """With which this job has requested GPUs. Only if that is unknown, the allocated ones: all of a
    node with --exclusive."""
    by_node = environ.get("SLURM_GPUS_PER_NODE", "0")  # srun takes it first
    if _gpus_by_node(by_node):
        return f"--gpus-per-node={by_node}"
    if gres := re.search(r" TresPerNode=(\S+)", shown):
        return f"--gres={_gres(gres[1])}"
    allocated = environ.get("SLURM_GPUS_ON_NODE", "")
    some = allocated.isdecimal() and int(allocated)
    return f"--gres=gpu:{allocated}" if some else NO_GRES  # not those of the header


def _gpus_of(option: str) -> int:
    name, _, text = option.partition("=")
    return _gpus_by_node(text) if name == "--gpus-per-node" else gpus_in_gres(text)


def of_this_job(nodes: int, ranks: int, environ: Mapping[str, str]) -> list[str]:
    """Options of submit_job.sh that request what this job has."""
    shown = _shown(environ)
    gpus = _gpu_option(environ, shown)
    own = [f"--{n}={environ[name]}" for n, name in OF_A_JOB.items() if environ.get(name)]
    limit = re.search(r" TimeLimit=([\d:-]+|UNLIMITED) ", shown)
    wanted = re.search(r" Features=(?!\(null\))(\S+) ", shown)  # (null): none
    return [
        *(f"--nodes={nodes}", gpus, *own),
        *([f"--constraint={wanted[1]}"] if wanted else []),
        *([f"--time={limit[1]}"] if limit else []),
        *([f"--ranks_per_node={ranks}"] if ranks != _gpus_of(gpus) else []),
    ]

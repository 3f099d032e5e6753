"""Flags of the launchers of accelerate, DeepSpeed and torch that `duet run` does not have: the
counterpart of each, or the answer. docs/migrating.md has the same table; a test compares both with
the parsers.

Sources: accelerate/commands/launch.py of accelerate 1.15, deepspeed/launcher/runner.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from training.config import flags
from training.config.schema import FIELDS
from training.config.translate import RANKS, Changes
from training.core.errors import Problem
from training.core.messages import msg

ACCELERATE, DEEPSPEED, TORCHRUN = "accelerate launch", "deepspeed", "torchrun"
# the first is the one to write
COUNTS = {
    ACCELERATE: ("num_processes",),
    DEEPSPEED: ("num_gpus", "num_accelerators"),
    TORCHRUN: ("nproc_per_node",),
}
# Duet's flags → those of each launcher with the same meaning.
SHARED = {
    ACCELERATE: {
        "nnodes": "num_machines",
        "node_rank": "machine_rank",
        "master_addr": "main_process_ip",
        "master_port": "main_process_port",
        "retries": "max_restarts",
        "show_ranks": "tee",
        "log_dir": "log_dir",
    },
    DEEPSPEED: {
        "nnodes": "num_nodes",
        **{n: n for n in ("node_rank", "master_addr", "master_port", "hostfile", "launcher")},
    },
    TORCHRUN: {
        "retries": "max_restarts",
        "show_ranks": "tee",
        **{n: n for n in ("nnodes", "node_rank", "master_addr", "master_port", "log_dir")},
    },
}
# Flags of `duet watch`, for what the launcher has no flag for.
OF_WATCH = ("run_name", "out_dir", "log_dir", "hang_timeout", "report", "notify", "retries")
# of DeepSpeed; slurm is a value of Duet's --launcher as well
LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "mvapich")
SELECTED = {"include", "exclude"}  # DeepSpeed refuses them together with a count
VARIABLE, NOT_NEEDED, WATCH, NOT_SUPPORTED = "variable", "not_needed", "watch", "not_supported"


@dataclass(frozen=True)
class Flag:
    tool: str
    answer: str
    changes: Callable[[str], Changes] = lambda text: {}


def _to(name: str, upper: bool = False) -> Callable[[str], Changes]:
    return lambda text: {name: text.upper() if upper else text}


def _on(**changes: str) -> Callable[[str], Changes]:
    return lambda text: dict(changes)


def _selection(text: str) -> tuple[list[str], set[str]]:
    """The machines of DeepSpeed's --include, and the different GPU lists."""
    parts = [part.partition(":") for part in text.split("@")]
    return [name for name, _, _ in parts], {gpus for _, _, gpus in parts}


def _include(text: str) -> Changes:
    """`a:0,1@b:0,1`: the same GPUs of some machines."""
    names, slots = _selection(text)
    out: Changes = {} if names == ["localhost"] else {"hosts": ",".join(names)}
    if len(slots) == 1 and (gpus := slots.pop()):
        out |= {"CUDA_VISIBLE_DEVICES": gpus, RANKS: str(len(gpus.split(",")))}
    return out


def _all(tool: str, answer: str, names: str) -> dict[str, Flag]:
    return {name: Flag(tool, answer) for name in names.split()}


FLAGS: dict[str, Flag] = {
    "cpu": Flag(ACCELERATE, VARIABLE, _on(ACCELERATE_USE_CPU="true", device="cpu")),
    "num_cpu_threads_per_process": Flag(ACCELERATE, VARIABLE, _to("OMP_NUM_THREADS")),
    "enable_cpu_affinity": Flag(ACCELERATE, VARIABLE, _on(numa="auto")),
    **{
        name: Flag(
            ACCELERATE, VARIABLE, _to(f"ACCELERATE_{name.upper()}", name == "dynamo_backend")
        )
        for name in (
            "mixed_precision",
            "gradient_accumulation_steps",
            "dynamo_backend",
            "dynamo_mode",
        )
    },
    **{
        name: Flag(ACCELERATE, VARIABLE, _on(**{f"ACCELERATE_{name.upper()}": "true"}))
        for name in (
            "dynamo_use_fullgraph",
            "dynamo_use_dynamic",
            "dynamo_use_regional_compilation",
        )
    },
    **_all(ACCELERATE, NOT_NEEDED, "quiet multi_gpu same_network"),
    **_all(
        ACCELERATE,
        WATCH,
        "config_file use_fsdp use_deepspeed use_megatron_lm use_parallelism_config zero_stage"
        " gradient_clipping mpirun_hostfile",
    ),
    **_all(
        ACCELERATE,
        NOT_SUPPORTED,
        "tpu tpu_cluster no_tpu_cluster tpu_use_sudo vm env main_training_function downcast_bf16"
        " aws_access_key_id aws_secret_access_key",
    ),
    "virtual_local_rank": Flag(TORCHRUN, WATCH),
    "include": Flag(DEEPSPEED, VARIABLE, _include),
    "bind_cores_to_rank": Flag(DEEPSPEED, VARIABLE, _on(numa="auto")),
    "bind_core_list": Flag(DEEPSPEED, VARIABLE, _on(numa="auto")),
    "ssh_port": Flag(DEEPSPEED, VARIABLE, lambda text: {"ssh_args": f"-p {text}"}),
    "num_accelerators": Flag(DEEPSPEED, VARIABLE, _to(RANKS)),
    **_all(
        DEEPSPEED,
        NOT_NEEDED,
        "no_local_rank enable_each_rank_log save_pid force_multi no_ssh_check",
    ),
    **_all(
        DEEPSPEED,
        WATCH,
        "exclude launcher launcher_args no_ssh venv_script autotuning elastic_training"
        " min_elastic_nodes max_elastic_nodes",
    ),
}
# Each with many flags.
GROUPS = {
    name: Flag(ACCELERATE, WATCH)
    for name in (
        "fsdp",
        "deepspeed",
        "offload",
        "zero3",
        "megatron_lm",
        "parallelism_config",
        "fp8",
    )
}
SWITCHES = {
    *("cpu", "tpu", "quiet", "multi_gpu", "same_network", "downcast_bf16", "enable_cpu_affinity"),
    *(name for name in FLAGS if name.startswith(("use_", "dynamo_use_", "tpu_", "no_"))),
    *("bind_cores_to_rank", "save_pid", "force_multi", "elastic_training"),
    "fp8_use_autocast_during_eval",
    "virtual_local_rank",
}
SHORT = {"-H": "hostfile", "-i": "include", "-e": "exclude", "-q": "quiet"}


def separate(line: flags.CommandLine) -> None:
    """Make DeepSpeed's --launcher one of the unknown flags: Duet has a flag of this name."""
    if line.flags.get("launcher", ("", ""))[0].lower() not in LAUNCHERS:
        return
    text, typed = line.flags.pop("launcher")
    (_, start, stop), *_ = [place for place in line.places if place[0] == "launcher"]
    line.places = [place for place in line.places if place[0] != "launcher"]
    line.unknown = sorted(
        [*line.unknown, flags.Unknown(typed, text, start, stop)], key=lambda one: one.start
    )


def find(one: flags.Unknown) -> Flag | None:
    name = one.name
    if name == "include" and len(_selection(one.text or "")[1]) > 1:
        return Flag(DEEPSPEED, WATCH)  # CUDA_VISIBLE_DEVICES is the same on all machines
    groups = (flag for group, flag in GROUPS.items() if name.startswith(f"{group}_"))
    return FLAGS.get(name) or next(groups, None)


def launches(one: flags.Unknown) -> bool:
    """Whether this is a launch flag of torchrun, accelerate or DeepSpeed."""
    from training.config import foreign_names

    if find(one):
        return True
    row = foreign_names.row_of(one.name)
    launch = {RANKS, "nnodes", "node_rank", "master_addr", "master_port", "retries"}
    return (
        row is not None
        and (foreign_names.TORCHRUN in row.tools or foreign_names.ACCELERATE in row.tools)
        and set(row.to) <= launch
    )


def before(line: flags.CommandLine, at: int) -> tuple[set[int], Changes]:
    """The words of another launcher's flags before the program, which is the word `at`, and their
    counterparts except the number of processes."""
    from training.config import meant

    gone: set[int] = set()
    found: Changes = {}
    for one in line.unknown:
        if one.start < at and launches(one) and not find(one):
            gone |= {*range(one.start, one.stop)}
            found |= next(iter(meant.name(one.name, one.text, FIELDS).changes), {})
    return gone, {name: text for name, text in found.items() if name != RANKS}


def changes(one: flags.Unknown) -> Changes:
    """What replaces the flag."""
    found = find(one)
    return found.changes(one.text or "") if found else {}


def problem(one: flags.Unknown, flag: Flag, fix: str, allowed: str) -> Problem:
    """`fix`: the command with the counterparts; `allowed`: where arguments of the script belong,
    which may have the same name."""
    texts = {
        VARIABLE: msg("plan.launcher_flag.variable", typed=one.typed, tool=flag.tool),
        NOT_NEEDED: msg("plan.launcher_flag.not_needed", typed=one.typed, tool=flag.tool),
        WATCH: msg("plan.launcher_flag.watch", typed=one.typed, tool=flag.tool),
        NOT_SUPPORTED: msg("plan.launcher_flag.not_supported", typed=one.typed, tool=flag.tool),
    }
    fixes = [] if flag.answer == NOT_SUPPORTED else [fix]
    return Problem("flag.launcher", texts[flag.answer], allowed, fixes)


def program(line: flags.CommandLine, theirs: list[str]) -> list[str]:
    """The script and its arguments, as another launcher expects them."""
    path = line.flags["script"][0]
    switches = [f"--{name}" for name in ("module", "no_python") if line.on(name)]
    return [*switches, path, *theirs]


def tool_of(given: list[flags.Unknown]) -> str:
    """The launcher whose settings are needed; '' if none is."""
    known = [flag for one in given if (flag := find(one))]
    return next((flag.tool for flag in known if flag.answer == WATCH), "")


def _shared(name: str, text: str) -> str:
    """The value of Duet's flag as the other launchers write it."""
    if name != "show_ranks":
        return text
    return "3" if text == "all" else ",".join(f"{rank}:3" for rank in text.split(","))


def watched(
    tool: str, given: list[flags.Unknown], line: flags.CommandLine, ranks: int, program: list[str]
) -> str:
    """The command of another launcher with its own flags, under `duet watch`. `given`: flags of
    other launchers; `ranks`: as this launcher counts them, 0: its own default; `program`: the
    script with its arguments."""
    counts, shared = COUNTS[tool], SHARED[tool]
    names = {one.name for one in given}
    selected = tool == DEEPSPEED and names & SELECTED
    words = [f"--{counts[0]}={ranks}"] if ranks and not selected and not names & {*counts} else []
    own = ["--dry_run"] if line.on("dry_run") else []
    for name, (text, _) in line.flags.items():
        if name in shared:
            words.append(f"--{shared[name]}={_shared(name, text)}")
        elif name in OF_WATCH:
            own.append(f"--{name}={text}")
    for one in given:
        if selected and one.name in counts:
            continue
        found = find(one)
        if found is None or (found.tool == tool and found.answer != NOT_SUPPORTED):
            words.append(f"--{one.name}={one.text}" if one.text else f"--{one.name}")
    return f"{shlex.join(['./duet', 'watch', *own])} -- {tool} {shlex.join([*words, *program])}"

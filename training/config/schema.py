"""Configuration fields: default, unit, scope and range. Defaults are defined here only.

They match configs/dual_gpu/conservative.py, so that the enhanced script works without a config
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from training.core.messages import msg

NODE = "node of all ranks"
DURATION = "seconds, or 90m, 8h, 1d12h"
# 3 years: torch adds ten times --hang_timeout to a clock of nanoseconds in 64 bits.
LONGEST_S = 10**8
HIGHEST_RATE = 10**6  # of a learning rate: torch raises above the range of fp32
RATE = "at width 768, other widths × √(768/width)"
_UNITS = {
    "path": msg("config.unit.path"),
    "blocks": msg("config.unit.blocks"),
    "tokens per sequence": msg("config.unit.tokens_per_sequence"),
    "fraction": msg("config.unit.fraction"),
    "sequences per rank": msg("config.unit.sequences_per_rank"),
    "tokens (other tasks: samples), all ranks": msg("config.unit.tokens_or_samples"),
    "parts of a micro-batch": msg("config.unit.parts_of_a_micro_batch"),
    "steps": msg("config.unit.steps"),
    "epochs": msg("config.unit.epochs"),
    "tokens, all ranks": msg("config.unit.tokens_all_ranks"),
    "tokens": msg("config.unit.tokens"),
    "all ranks": msg("config.unit.all_ranks"),
    "per step": msg("config.unit.per_step"),
    "fraction of the peak": msg("config.unit.fraction_of_the_peak"),
    "name": msg("config.unit.name"),
    "processes per rank": msg("config.unit.processes_per_rank"),
    "checkpoints": msg("config.unit.checkpoints"),
    "seconds": msg("config.unit.seconds"),
    DURATION: msg("config.unit.duration"),
    "restarts": msg("config.unit.restarts"),
    "ranks": msg("config.unit.ranks"),
    "shell command": msg("config.unit.shell_command"),
    "this process": msg("config.unit.this_process"),
    "machines": msg("config.unit.machines"),
    "this machine": msg("config.unit.this_machine"),
    NODE: msg("config.unit.node_of_all_ranks"),
    "all machines": msg("config.unit.all_machines"),
    "TCP port": msg("config.unit.TCP_port"),
    "frames": msg("config.unit.frames"),
    "pixels": msg("config.unit.pixels"),
    "frames, comma-separated": msg("config.unit.frames_comma_separated"),
    "channels": msg("config.unit.channels"),
    "comma-separated": msg("config.unit.comma_separated"),
    "steps, comma-separated": msg("config.unit.steps_comma_separated"),
    "fractions of the peak, comma-separated": msg(
        "config.unit.fractions_of_the_peak_comma_separated"
    ),
    RATE: msg("config.unit.at_width"),
}
GROUPS = {
    "model": "Model",
    "batch": "Batch",
    "duration": "Duration",
    "optimizer": "Optimizer",
    "data": "Data",
    "distributed": "Distributed",
    "compute": "Device and precision",
    "run": "Run directory, checkpoints, recovery",
    "tracking": "Tracking",
    "launch": "Launch",
}


# Steps of a run that only the time ends: a number, so that the schedule needs no other case. Users
# write it too.
ENDLESS = 10**9
AUTO = ("auto",)
Known = Mapping[str, "Field[Any]"]  # fields by name: FIELDS, or those of another task


def option(
    default: Any,
    group: str,
    help: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    env: str = "",
    own: bool = False,
) -> Any:
    """A field. `unit`: unit and scope; `low`, `high`: inclusive range; `words`: allowed words
    besides the type (auto, none); `env`: environment variable of another tool that also sets it
    (besides DUET_<FIELD>); `own`: of the default task only."""
    meta = {"group": group, "help": help, "unit": unit, "low": low, "high": high, "own": own}
    return field(default=default, metadata={**meta, "choices": choices, "words": words, "env": env})


@dataclass
class Config:
    """A resolved configuration. Field names are the flags (`--depth=12`), the file keys and, as
    DUET_DEPTH, variables."""

    task: str = option(
        "gpt",
        "model",
        "gpt, video_restoration, or a .py file with your own task (docs/tasks.md)",
        unit="path",
    )
    depth: int = option(
        12,
        "model",
        "transformer blocks; the width is depth × 64",
        unit="blocks",
        low=1,
        high=256,
        own=True,
    )
    max_seq_len: int = option(
        1536, "model", "context length", unit="tokens per sequence", low=8, high=1 << 20, own=True
    )
    dropout: float = option(
        0.0,
        "model",
        "dropout of the output of each block",
        unit="fraction",
        low=0,
        high=0.9,
        own=True,
    )
    key_offset: bool = option(
        True,
        "model",
        "half of each key is that of the token before: copying from the context is learned sooner",
        own=True,
    )

    init_from: str = option(
        "",
        "model",
        "start from trained weights: a run, a checkpoint, a folder of ./duet export or a file of "
        "tensors; sets the fields of the model that are not set otherwise",
        unit="path",
    )
    init_weights: str = option(
        "auto",
        "model",
        "weights of init_from: their moving average (ema) or the trained ones (raw); auto: ema if "
        "there is one",
        choices=("auto", "ema", "raw"),
    )

    device_batch_size: int | str = option(
        8,
        "batch",
        "micro-batch of one rank; auto: the fastest that divides total_batch_size and fits into "
        "memory",
        unit="sequences per rank",
        low=1,
        high=1 << 20,
        words=AUTO,
    )
    total_batch_size: int = option(
        24576,
        "batch",
        "batch of one optimizer step, by gradient accumulation (default of tasks other than gpt: "
        "one micro-batch of all ranks)",
        unit="tokens (other tasks: samples), all ranks",
        low=1,
        high=1 << 40,
    )
    max_total_batch_size: int = option(
        0,
        "batch",
        "up to this, total_batch_size is doubled where GPUs would otherwise wait for their "
        "gradients; the amount of data stays. 0: never",
        unit="as total_batch_size",
        low=0,
        high=1 << 40,
    )
    activation_checkpointing: int | str = option(
        "auto",
        "batch",
        "blocks that are recomputed in the backward pass; selective: all, but without their matrix "
        "products and attention; auto: only as much as needed to fit into memory",
        unit="blocks",
        low=0,
        high=256,
        words=("auto", "selective", "none"),
        own=True,
    )
    loss_chunks: int | str = option(
        "auto",
        "batch",
        "parts in which logits and loss are computed; auto: only as many as needed to fit into "
        "memory",
        unit="parts of a micro-batch",
        low=1,
        high=1 << 12,
        words=AUTO,
        own=True,
    )

    num_iterations: int = option(
        0,
        "duration",
        "stop after this many optimizer steps; 0: no limit; auto (gpt): 20 tokens for each "
        "parameter of the model",
        unit="steps",
        low=0,
        high=ENDLESS,
        words=AUTO,  # replaced before the plan is made (training.plan.length)
    )
    tokens_per_param: float = option(
        0.0,
        "duration",
        "stop after this many tokens for each parameter of the model (sets num_iterations); 0: not "
        "used",
        unit="tokens",
        low=0,
        high=10**6,
        own=True,
    )
    num_epochs: int = option(
        0,
        "duration",
        "stop after this many passes over the data; 0: no limit, or one pass without another limit",
        unit="epochs",
        low=0,
        high=ENDLESS,
    )
    max_time: float = option(
        0.0,
        "duration",
        "end after this time, with the decay of the learning rate done: the schedule follows the "
        "time or the steps, whichever is further; restarts count the time already used; 0: no "
        "limit",
        unit=DURATION,
        low=0,
        high=LONGEST_S,
    )
    eval_every: int = option(
        250, "duration", "interval of evaluations (also at the end); 0: never", unit="steps", low=0
    )
    eval_tokens: int = option(
        131072,
        "duration",
        "maximum number of validation tokens per evaluation, spread over the text",
        unit="tokens, all ranks",
        low=1,
        own=True,
    )
    log_every: int = option(10, "duration", "interval of progress lines", unit="steps", low=1)
    sample_tokens: int = option(
        256,
        "duration",
        "length of the text generated at the end; 0: none",
        unit="tokens",
        low=0,
        own=True,
    )

    optimizer: str = option(
        "muon",
        "optimizer",
        "optimizer of the weight matrices of the blocks; other parameters use AdamW",
        choices=("muon", "adamw"),
        unit="all ranks",
        own=True,
    )
    matrix_lr: float | str = option(
        "auto",
        "optimizer",
        "peak learning rate of the weight matrices; auto: depends on the optimizer",
        unit="per step",
        low=0,
        high=HIGHEST_RATE,
        words=AUTO,
        own=True,
    )
    embedding_lr: float = option(
        0.2,
        "optimizer",
        "peak learning rate of the embedding",
        unit=RATE,
        low=0,
        high=HIGHEST_RATE,
        own=True,
    )
    unembedding_lr: float = option(
        0.008,
        "optimizer",
        "peak learning rate of the output head",
        unit=RATE,
        low=0,
        high=HIGHEST_RATE,
        own=True,
    )
    weight_decay: float = option(
        0.0, "optimizer", "decoupled weight decay of the weight matrices", low=0, high=1, own=True
    )
    grad_clip: float = option(
        1.0, "optimizer", "maximum global gradient norm; 0: no clipping", low=0
    )
    warmup_ratio: float = option(
        0.02, "optimizer", "share of steps for linear warm-up", unit="fraction", low=0, high=1
    )
    warmdown_ratio: float = option(
        0.7,
        "optimizer",
        "share of steps for linear decay at the end",
        unit="fraction",
        low=0,
        high=1,
    )
    final_lr_frac: float = option(
        0.05, "optimizer", "final learning rate", unit="fraction of the peak", low=0, high=1
    )
    ema: float = option(
        0.0,
        "optimizer",
        "decay of an exponential moving average of the weights, such as 0.999, which evaluation, "
        "samples and exports use; 0: off",
        unit="per step",
        low=0,
        high=0.999999,
    )

    data: str = option(
        "stdlib",
        "data",
        "a .txt, .jsonl or .parquet file (also .gz, .zst), a folder of them, another file of plain "
        "text, or stdlib: the source code of the Python standard library",
        unit="path",
        own=True,
    )
    text_field: str = option(
        "text",
        "data",
        "key or column of the text in .jsonl and .parquet files",
        unit="name",
        own=True,
    )
    encoding: str = option(
        "utf-8",
        "data",
        "encoding of text files that are not UTF-8: gbk, big5, latin-1, utf-16, …",
        unit="name",
        own=True,
    )
    tokenizer: str = option(
        "bytes",
        "data",
        "bytes, bpe (trained on the data), or a tokenizer.json or .tiktoken file to load",
        unit="path",
        own=True,
    )
    vocab_size: int = option(
        8192,
        "data",
        "size of a bpe tokenizer trained on the data",
        unit="tokens",
        low=258,
        high=1 << 20,
        own=True,
    )
    num_workers: int = option(
        0, "data", "data-loader processes", unit="processes per rank", low=0, high=256
    )
    persistent_workers: bool = option(False, "data", "keep the workers between epochs")

    find_unused_parameters: bool = option(
        False, "distributed", "DDP searches for parameters without gradients in each step"
    )
    debug_ddp: bool = option(
        False, "distributed", "show the data share of every rank and each inspected step"
    )
    inspect_every: int = option(
        100,
        "distributed",
        "interval of checks that all ranks have equal parameters; 0: never",
        unit="steps",
        low=0,
    )
    use_static_graph: bool = option(
        False, "distributed", "DDP may assume the same graph in each step"
    )

    gradient_compression: str = option(
        "none",
        "distributed",
        "gradients between the ranks in bf16: half of the bytes; auto: where the bandwidth between "
        "GPUs limits the speed",
        choices=("auto", "bf16", "none"),
    )

    device: str = option(
        "cuda",
        "compute",
        "auto: a GPU for every rank, else the CPU",
        choices=("auto", "cuda", "cpu"),
        unit="all ranks",
    )
    precision: str = option(
        "auto",
        "compute",
        "auto: bf16 if the hardware supports it, fp16 on GPUs with tensor cores for fp16 only "
        "(compute capability 7.0 to 7.5), fp32 on others; fp16: GPUs only; fp8: language models "
        "on GPUs from compute capability 8.9, with torchao",
        choices=("auto", "bf16", "fp16", "fp8", "fp32"),
    )
    compile: str = option(
        "auto",
        "compute",
        "torch.compile; auto: only on a GPU",
        choices=("auto", "1", "0"),
        env="TORCH_COMPILE",
    )
    deterministic: bool = option(
        False,
        "compute",
        "repeat a run bit for bit on GPUs too; slower, and operators without a deterministic "
        "variant end the run",
    )
    seed: int = option(1337, "compute", "initial weights and data order", low=0, high=(1 << 63) - 1)

    run_name: str = option("", "run", "name of the run directory; empty: config name and time")
    out_dir: str = option("experiments", "run", "folder of the run directories", unit="path")
    log_dir: str = option("logs", "run", "folder of the <script>_<time>.log files", unit="path")
    save_every: int = option(
        500,
        "run",
        "interval of checkpoints (also at the end); 0: only at the end",
        unit="steps",
        low=0,
    )
    keep_checkpoints: int = option(
        2, "run", "number of checkpoints to keep", unit="checkpoints", low=1
    )
    keep_best: bool = option(
        False,
        "run",
        "keep the checkpoint of the best evaluation too: each evaluation that is the best so far "
        "saves one",
    )
    resume: str = option(
        "",
        "run",
        "resume this run: a run directory, its name, latest (the newest unfinished one, of CONFIG "
        "if given), or auto (the run of --run_name, a new one at the first start)",
        unit="path",
    )
    hang_timeout: int = option(
        60,
        "run",
        "a phase that takes longer than this and 5 times longer than usual is a hang; 0: never",
        unit="seconds",
        low=0,
        high=LONGEST_S,
    )
    retries: int | str = option(
        "auto",
        "run",
        "maximum number of restarts from the last checkpoint after failures of the machine, in a "
        "row without progress; auto: 2 in train_dual_gpu_enhanced.sh and with --min_ranks, else 0",
        unit="restarts",
        low=0,
        high=100,
        words=AUTO,
    )

    min_ranks: int | str = option(
        "all",
        "run",
        "continue with the remaining ranks after the loss of a GPU or a machine, as long as there "
        "are this many; all: a loss ends the run",
        unit="ranks",
        low=1,
        words=("all",),
    )
    rejoin: bool = option(
        True,
        "run",
        "with --min_ranks: test lost GPUs after each checkpoint and use them again if they work; a "
        "lost machine whose launcher is started again joins at the next checkpoint",
    )

    use_dummy_wandb: bool = option(False, "tracking", "do not import W&B")
    wandb_mode: str = option(
        "auto",
        "tracking",
        "auto: online if logged in, else disabled",
        choices=("auto", "online", "offline", "disabled"),
        env="WANDB_MODE",
    )
    wandb_project: str = option("duet", "tracking", "W&B project", unit="name", env="WANDB_PROJECT")
    wandb_run: str = option(
        "",
        "tracking",
        "W&B run name; dummy is the same as --use_dummy_wandb",
        unit="name",
        env="WANDB_RUN",
    )
    tensorboard: bool = option(True, "tracking", "TensorBoard files in the run directory")
    report: bool = option(True, "tracking", "write report.html to the run directory at the end")
    notify: str = option(
        "",
        "tracking",
        "command to execute when the run ends or fails; it gets the result in DUET_TEXT and on "
        "standard input",
        unit="shell command",
    )

    launcher: str = option(
        "auto",
        "launch",
        "auto: detected from the environment, else spawn; spawn, torchrun: start ranks here; env, "
        "slurm: this process is a rank",
        choices=("auto", "spawn", "torchrun", "env", "slurm"),
        unit="this process",
    )
    nnodes: int = option(
        1,
        "launch",
        "number of machines, each started by hand",
        unit="machines",
        low=1,
        high=4096,
    )
    node_rank: int = option(
        0, "launch", "index of this machine, from 0", unit="this machine", low=0, high=4095
    )
    master_addr: str = option(
        "", "launch", "address or name of machine 0, reachable by the others", unit="all machines"
    )
    master_port: int = option(
        0,
        "launch",
        "rendezvous port of the ranks; 0: any free one, on several machines 12355; another one for "
        "each launch with --hosts, and for each job under SLURM and mpirun",
        unit="TCP port",
        low=0,
        high=65535,
    )
    hosts: str = option(
        "",
        "launch",
        "start the run on these machines over ssh, from this one command: a,b or user@a:2; the "
        "first one is node 0",
        unit="comma-separated",
    )
    hostfile: str = option(
        "",
        "launch",
        "the same from a file with `host slots=N` lines, as of deepspeed and Open MPI",
        unit="path",
    )
    ssh_args: str = option(
        "", "launch", "further arguments of ssh for --hosts, such as '-p 2222 -i KEY'"
    )
    rendezvous_timeout: int = option(
        300,
        "launch",
        "how long machines wait for each other, and ranks of another launcher; missing machines "
        "are reported after 5 s, missing ranks after 25 s",
        unit="seconds",
        low=1,
        high=LONGEST_S,
    )
    numa: int | str = option(
        "auto",
        "launch",
        "bind each rank to the cores and the memory of a NUMA node; auto: of its GPU, on machines "
        "with several nodes",
        unit=NODE,
        low=0,
        high=1023,
        words=("auto", "off"),
    )
    show_ranks: str = option(
        "0",
        "launch",
        "ranks of this machine whose output the console shows, each line with its rank, of a user "
        "script; by default lines of standard error that rank 0 does not print are shown too",
        unit="comma-separated, or all",
    )
    libuv: str = option(
        "auto",
        "launch",
        "TCPStore backend: 1 with, 0 without libuv; auto: libuv if the torch build supports it",
        choices=("auto", "1", "0"),
        unit="all ranks",
        env="USE_LIBUV",
    )
    communication_test: str = option(
        "auto",
        "launch",
        "test the communication between the GPUs before the ranks start; auto: once, at the first "
        "start on these GPUs",
        choices=("auto", "1", "0"),
    )
    debug: bool = option(
        False,
        "launch",
        "debug output of NCCL and torch.distributed; DUET_DEBUG=1 traces the shell too",
    )
    profile: int = option(
        0,
        "launch",
        "profile this many steps after 10 warm-up steps with torch.profiler: a Chrome trace of "
        "every rank in the run directory, a digest in the report; 0: none",
        unit="steps",
        low=0,
        high=50,
    )
    inject: str = option(
        "",
        "launch",
        "inject a fault (docs/faults.md); list: show all faults",
        unit="FAULT@key=value,…",
    )


FIELDS = {f.name: f for f in fields(Config)}


def shared(name: str) -> bool:
    """Whether every task has this field."""
    return not FIELDS[name].metadata["own"]


def of_the_run(name: str) -> bool:
    """Whether a resumed run keeps this field; folders and launch settings belong to each start."""
    return (
        name not in ("resume", "out_dir", "log_dir") and FIELDS[name].metadata["group"] != "launch"
    )


def kind(name: str, known: Known = FIELDS) -> str:
    """The type of a field: int, float, bool or str (additional words are in the metadata).
    `known`: fields, including those of the task."""
    return str(known[name].type).split(" ", 1)[0]


def unit_text(unit: str) -> str:
    """A unit in the user's language; as given if it is of a user's task."""
    return _UNITS.get(unit, unit)


def describe(name: str, known: Known = FIELDS) -> str:
    """Allowed values of a field: 'a whole number from 1, or auto (sequences per rank)'."""
    meta = known[name].metadata
    if meta["choices"]:
        choices = ", ".join(meta["choices"])
        text = msg("config.allowed.one_of", choices=choices)
    else:
        text = {
            "int": msg("config.allowed.int"),
            "float": msg("config.allowed.float"),
            "bool": msg("config.allowed.bool"),
            "str": msg("config.allowed.str"),
        }[kind(name, known)]
        low, high = meta["low"], meta["high"]
        if low is not None and high is not None:
            text += msg("config.allowed.from_to", low=low, high=high)
        elif low is not None:
            text += msg("config.allowed.from", low=low)
        text += "".join(msg("config.allowed.or_word", word=word) for word in meta["words"])
    unit = unit_text(meta["unit"])
    return text + (msg("config.allowed.unit", unit=unit) if unit else "")

"""Every configuration field: its default, unit, scope and range. Defaults stand here and nowhere
else.

The defaults are those of configs/dual_gpu/conservative.py, so that the enhanced script works
without a config file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

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


AUTO = ("auto",)
Known = Mapping[str, "Field[Any]"]  # fields by name: FIELDS, or those of another task
RATE = "at width 768, other widths × √(768/width)"


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
    """A field: `unit` says unit and scope, `low`/`high` are inclusive, `words` are allowed beside
    the type (auto, none), `env` is an environment variable of other tools that sets it too (besides
    DUET_<FIELD>); `own`: of the default task alone."""
    meta = {"group": group, "help": help, "unit": unit, "low": low, "high": high, "own": own}
    return field(default=default, metadata={**meta, "choices": choices, "words": words, "env": env})


@dataclass
class Config:
    """A resolved configuration. Field names are the flags (`--depth=12`), the file keys and, as
    DUET_DEPTH, variables."""

    task: str = option(
        "gpt",
        "model",
        "what is trained: gpt, video_restoration, or a .py file of your own (docs/tasks.md)",
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
        "share of each block's output that is dropped while training",
        unit="fraction",
        low=0,
        high=0.9,
        own=True,
    )

    device_batch_size: int | str = option(
        8,
        "batch",
        "micro-batch of one rank; auto: the largest that divides and fits",
        unit="sequences per rank",
        low=1,
        high=1 << 20,
        words=AUTO,
    )
    total_batch_size: int = option(
        24576,
        "batch",
        "batch of one optimizer step, reached by gradient accumulation (other tasks than gpt: one "
        "micro-batch of all ranks)",
        unit="tokens (other tasks: samples), all ranks",
        low=1,
        high=1 << 40,
    )
    activation_checkpointing: int | str = option(
        "auto",
        "batch",
        "blocks whose activations are computed again in the backward pass; auto: as many as the "
        "memory asks for",
        unit="blocks",
        low=0,
        high=256,
        words=("auto", "none"),
        own=True,
    )
    loss_chunks: int | str = option(
        "auto",
        "batch",
        "parts in which logits and loss are computed; auto: as many as the memory asks for",
        unit="parts of a micro-batch",
        low=1,
        high=1 << 12,
        words=AUTO,
        own=True,
    )

    num_iterations: int = option(
        0, "duration", "stop after this many optimizer steps; 0: by epochs", unit="steps", low=0
    )
    num_epochs: int = option(
        0,
        "duration",
        "stop after this many passes over the data; 0: by iterations, or one pass if both are 0",
        unit="epochs",
        low=0,
    )
    eval_every: int = option(
        250, "duration", "validation every so often, and at the end; 0: never", unit="steps", low=0
    )
    eval_tokens: int = option(
        131072,
        "duration",
        "validation tokens per evaluation, at most",
        unit="tokens, all ranks",
        low=1,
        own=True,
    )
    log_every: int = option(
        10, "duration", "print a progress line every so often", unit="steps", low=1
    )
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
        "of the blocks' matrices; everything else has AdamW",
        choices=("muon", "adamw"),
        unit="all ranks",
        own=True,
    )
    matrix_lr: float | str = option(
        "auto",
        "optimizer",
        "peak learning rate of the blocks' matrices; auto: by the optimizer",
        unit="per step",
        low=0,
        words=AUTO,
        own=True,
    )
    embedding_lr: float = option(
        0.2, "optimizer", "peak learning rate of the embedding", unit=RATE, low=0, own=True
    )
    unembedding_lr: float = option(
        0.008, "optimizer", "peak learning rate of the output head", unit=RATE, low=0, own=True
    )
    weight_decay: float = option(
        0.0, "optimizer", "decoupled weight decay of the blocks' matrices", low=0, high=1, own=True
    )
    grad_clip: float = option(
        1.0, "optimizer", "largest global gradient norm; 0: no clipping", low=0
    )
    warmup_ratio: float = option(
        0.02, "optimizer", "share of the steps for linear warm-up", unit="fraction", low=0, high=1
    )
    warmdown_ratio: float = option(
        0.7,
        "optimizer",
        "share of the steps for linear decay at the end",
        unit="fraction",
        low=0,
        high=1,
    )
    final_lr_frac: float = option(
        0.05, "optimizer", "learning rate at the end", unit="fraction of the peak", low=0, high=1
    )

    data: str = option(
        "stdlib",
        "data",
        "a .txt, .jsonl or .parquet file (also .gz, .zst), a folder of them, or stdlib: the Python "
        "standard library's sources",
        unit="path",
        own=True,
    )
    text_field: str = option(
        "text",
        "data",
        "the key or column that holds the text in .jsonl and .parquet",
        unit="name",
        own=True,
    )
    encoding: str = option(
        "utf-8",
        "data",
        "of the text files that are not UTF-8: gbk, big5, latin-1, utf-16, …",
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
        "tokens of a bpe tokenizer that is trained",
        unit="tokens",
        low=258,
        high=1 << 20,
        own=True,
    )
    num_workers: int = option(
        0, "data", "data-loader processes", unit="processes per rank", low=0, high=256
    )
    persistent_workers: bool = option(False, "data", "keep the workers from one epoch to the next")

    find_unused_parameters: bool = option(
        False, "distributed", "DDP looks for parameters without gradient at each step"
    )
    debug_ddp: bool = option(
        False, "distributed", "every rank's part of the data and of each inspected step is shown"
    )
    inspect_every: int = option(
        100,
        "distributed",
        "parameters are proven equal on all ranks every so often; 0: never",
        unit="steps",
        low=0,
    )
    use_static_graph: bool = option(
        False, "distributed", "DDP may assume the same graph at each step"
    )

    device: str = option(
        "cuda",
        "compute",
        "auto: a GPU for every rank, else the CPU",
        choices=("auto", "cuda", "cpu"),
        unit="all ranks",
    )
    precision: str = option(
        "auto", "compute", "auto: bf16 where the hardware has it", choices=("auto", "bf16", "fp32")
    )
    compile: str = option(
        "auto",
        "compute",
        "torch.compile; auto: on a GPU only",
        choices=("auto", "1", "0"),
        env="TORCH_COMPILE",
    )
    seed: int = option(1337, "compute", "initial weights and data order", low=0, high=(1 << 63) - 1)

    run_name: str = option("", "run", "name of the run directory; empty: config name and time")
    out_dir: str = option("experiments", "run", "where run directories are made", unit="path")
    log_dir: str = option("logs", "run", "where <script>_<time>.log files are made", unit="path")
    save_every: int = option(
        500,
        "run",
        "checkpoint every so often, and at the end; 0: only at the end",
        unit="steps",
        low=0,
    )
    keep_checkpoints: int = option(
        2, "run", "older checkpoints are removed", unit="checkpoints", low=1
    )
    resume: str = option(
        "",
        "run",
        "continue this run: a run directory, its name, or latest (the newest unfinished one, of "
        "CONFIG if given)",
        unit="path",
    )
    hang_timeout: int = option(
        60,
        "run",
        "a phase that takes longer than this, and 5 times longer than usual, is a hang; 0: never",
        unit="seconds",
        low=0,
    )
    retries: int | str = option(
        "auto",
        "run",
        "after a failure of the machine, start again from the last checkpoint, so many times in a "
        "row without progress; "
        "auto: 2 in train_dual_gpu_enhanced.sh, else 0",
        unit="restarts",
        low=0,
        high=100,
        words=AUTO,
    )

    use_dummy_wandb: bool = option(False, "tracking", "W&B is not imported at all")
    wandb_mode: str = option(
        "auto",
        "tracking",
        "auto: online when logged in, else disabled",
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
    report: bool = option(True, "tracking", "report.html in the run directory at the end")
    notify: str = option(
        "",
        "tracking",
        "run at the end of the run, however it has ended; what happened is in DUET_TEXT and on "
        "standard input",
        unit="shell command",
    )

    launcher: str = option(
        "auto",
        "launch",
        "auto: what the environment says, else spawn; spawn, torchrun: start ranks here; env, "
        "slurm: this process is a rank",
        choices=("auto", "spawn", "torchrun", "env", "slurm"),
        unit="this process",
    )
    nnodes: int = option(
        1,
        "launch",
        "machines that train together, each started by hand",
        unit="machines",
        low=1,
        high=4096,
    )
    node_rank: int = option(
        0, "launch", "which of them this one is", unit="this machine", low=0, high=4095
    )
    master_addr: str = option(
        "", "launch", "address or name of machine 0, as the others reach it", unit="all machines"
    )
    master_port: int = option(
        0,
        "launch",
        "port of the ranks' meeting point; 0: any free one, on several machines 12355",
        unit="TCP port",
        low=0,
        high=65535,
    )
    rendezvous_timeout: int = option(
        300,
        "launch",
        "how long machines wait for each other; who is missing is said after 5 s",
        unit="seconds",
        low=1,
    )
    libuv: str = option(
        "auto",
        "launch",
        "server of the ranks' meeting point; auto: torch's own answer, so that a build without "
        "libuv trains too",
        choices=("auto", "1", "0"),
        unit="all ranks",
        env="USE_LIBUV",
    )
    debug: bool = option(
        False,
        "launch",
        "NCCL and torch.distributed debug output for this run; DUET_DEBUG=1 traces the shell too",
    )
    inject: str = option(
        "",
        "launch",
        "inject a fault (CONTRIBUTING.md); list shows every fault",
        unit="FAULT@key=value,…",
    )


FIELDS = {f.name: f for f in fields(Config)}


def shared(name: str) -> bool:
    """Does every task have this field, and not the default one alone?"""
    return not FIELDS[name].metadata["own"]


def of_the_run(name: str) -> bool:
    """Does a resumed run keep this? Where its folders are and how it is launched belongs to each
    start."""
    return (
        name not in ("resume", "out_dir", "log_dir") and FIELDS[name].metadata["group"] != "launch"
    )


def kind(name: str, known: Known = FIELDS) -> str:
    """The type of a field as a word: int, float, bool or str (words beside it are in the metadata).
    `known`: with a task's own."""
    return str(known[name].type).split(" ", 1)[0]


def describe(name: str, known: Known = FIELDS) -> str:
    """What a field accepts, for people: 'a whole number from 1, or auto (sequences per rank)'."""
    meta = known[name].metadata
    if meta["choices"]:
        text = "one of " + ", ".join(meta["choices"])
    else:
        text = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "str": "text",
        }[kind(name, known)]
        if meta["low"] is not None and meta["high"] is not None:
            text += f" from {meta['low']} to {meta['high']}"
        elif meta["low"] is not None:
            text += f" from {meta['low']}"
        text += "".join(f", or {word}" for word in meta["words"])
    return text + (f" ({meta['unit']})" if meta["unit"] else "")

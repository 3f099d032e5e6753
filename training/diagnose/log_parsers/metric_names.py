"""Names of metrics in training logs, and patterns that identify the lines of known frameworks."""

from __future__ import annotations

import re

from training.core.metric_units import NATS

BAR = "tqdm"  # any program may use it
# If a line has several losses, the earlier name is preferred.
NAMES = {
    "step": (
        "step",
        "steps",
        "global_step",
        "iter",
        "iteration",
        "iters",
        "it",
        "update",
        "num_updates",
        "train_step",
        "global step",
        "global_step/max_steps",
    ),
    "epoch": ("epoch", "ep", "train epoch"),
    "loss": (
        "loss",
        "train_loss",
        "train loss",
        "training loss",
        "total_loss",
        "total loss",
        "lm loss",
        "loss/train",
        "train/loss",
        "train_loss_step",
        "g_loss",
        "loss_g",
        "g loss",
        "l_total",
        "l_g_total",
        "l_pix",
        "l_g_pix",
        "avg_loss",
        "avg loss",
        "running loss",
        "mean loss",
        "batch loss",
        "loss train",
        "train_loss_epoch",
    ),
    "lr": (
        "lr",
        "learning_rate",
        "learning rate",
        "lr-adamw",
        "lr-adam",
        "lr-sgd",
        "lr_0",
        "optim0_lr0",
    ),
    "grad_norm": (
        "grad_norm",
        "grad norm",
        "gnorm",
        "gradnorm",
        "norm",
        "gradient_norm",
        "gradient norm",
    ),
    "tokens_per_s": (
        "tps",
        "tok/sec",
        "tok/s",
        "tokens/s",
        "tokens/sec",
        "tokens_per_s",
        "tokens_per_second",
        "tokens_per_sec",
        "wps",
        "tok_per_sec",
    ),
    "samples_per_s": (
        "samples/s",
        "samples/sec",
        "samples_per_s",
        "samples_per_sec",
        "samples_per_second",
        "currsamplespersec",
    ),
    "dt": (
        "dt",
        "time",
        "step_time",
        "step time",
        "step_avg",
        "iter_time",
        "iter time",
        "elapsed time per iteration (ms)",
        "time (data)",
        "iter time (s)",
    ),
    "mfu": ("mfu", "bf16_mfu"),
    "memory": (
        "memory",
        "mem",
        "max mem",
        "max_mem",
        "peak_mem",
        "maxmemallocated",
        "gpu_mem",
        "max_memory",
        "peak memory usage",
    ),
    "tokens": ("tokens", "n_tokens", "tokens_seen", "ntokens_seen"),
    "elapsed": ("total time", "elapsed", "elapsed_time"),
    "left": ("eta", "remaining", "remaining_time"),
}
FIELD = {name: field for field, names in NAMES.items() for name in names}
LOSSES = {name: place for place, name in enumerate(NAMES["loss"])}
# Framework that prints such a line; the first match counts.
_SOURCES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("torchtitan", r"\bstep: +\d+  loss: .*\b(?:memory|tps): |\[titan\]"),
        ("nanochat", r"\| lrm: |Validation bpb: |CORE metric: "),
        (
            "nanoGPT",
            r"^iter \d+: loss [\d.naif]+, time [\d.]+ms|^step \d+: train loss \S+, val loss ",
        ),
        (
            "Megatron",
            r"elapsed time per iteration \(ms\): |validation loss at (?:iteration|the end of "
            r"training)",
        ),
        ("Hugging Face Trainer", r"\{'(?:loss|eval_\w+|train_runtime)': "),
        ("KAIR", r"<epoch: *\d+, iter: *[\d,]+,"),
        ("BasicSR", r"\]\[epoch: *\d+, iter: *[\d,]+,"),
        ("Duet", r"^Epoch: \d+, Iter: \d+, (?:Loss|Validation): "),
        ("DeepSpeed", r"log_dist\] \[Rank \d+\]|RunningAvgSamplesPerSec"),
        ("Lightning", r"v_num=|^Epoch \d+/-?\d+ +[━╸╺]|`?Trainer\.fit`? stopped"),
        ("YOLO", r"^\d+/\d+ +[\d.]+G +(?:\S+ +){3,}\d+: *\d+%"),
        ("Keras", r"ms/step - |s/step - |=\] - .*loss: "),
    )
)
# Lines before or after the progress lines.
_SIGNS = (
    (
        "Lightning",
        re.compile(
            r"^(?:GPU|TPU) available: |^LOCAL_RANK: \d+ - CUDA_VISIBLE|`Trainer\.fit` stopped: ",
            re.M,
        ),
    ),
)
_UNITS = {"nanochat": NATS, "nanoGPT": NATS, "Megatron": NATS}


def unit_of(source: str | None) -> str | None:
    """Unit of the loss, for frameworks that train only language models."""
    return _UNITS.get(source or "")


def source_of(text: str) -> str | None:
    return next((name for name, pattern in _SOURCES if pattern.search(text)), None)


def source_around(text: str) -> str | None:
    return next((name for name, pattern in _SIGNS if pattern.search(text)), None)

"""Table of other tools' argument names and the matching Duet fields, used by
training/config/meant.py.

Sources: the argument parsers of Hugging Face Trainer (TrainingArguments), Accelerate, Lightning
(Trainer), nanoGPT, nanochat, LitGPT, DeepSpeed, torchrun, and KAIR's option files, whose keys are
typed as flags too (tasks/video_restoration/kair/keys.py; a test compares them).
docs/reference/names.md has the table; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.config.translate import (
    FALSE,
    RANKS,
    TRUE,
    Translate,
    all_blocks,
    count,
    endpoint,
    existing,
    gpu_list,
    none,
    nothing,
    one_rate,
    ranks,
    resume,
    same,
    steps,
    steps_of_tokens,
    switch,
    times,
    warmup,
    words,
)
from training.core.messages import msg


@dataclass(frozen=True)
class Foreign:
    """One row: `names` with the same meaning. `to`: the Duet fields shown to the user, empty
    without an equivalent."""

    names: tuple[str, ...]
    tools: str
    to: tuple[str, ...]
    translate: Translate
    note: str = ""  # difference
    example: str = ""  # a value in those tools; empty for a switch
    sized: bool = False  # the translation depends on Sizes, which other flags may change


# Common words, which mean something else in a config file.
ONLY_FLAGS = ("include",)
_BF16, _FP16 = {"precision": "bf16"}, {"precision": "fp16"}
# Values of Duet fields as spelled by other tools, in lower case.
VALUES: dict[str, dict[str, str]] = {
    "precision": {
        **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true", "bf16_mixed", "amp_bf16"), "bf16"),
        **dict.fromkeys(
            ("float16", "half", "16", "16-mixed", "16-true", "16_mixed", "amp_fp16"), "fp16"
        ),
        **dict.fromkeys(("float8", "float8_e4m3fn"), "fp8"),
        **dict.fromkeys(("amp", "tf32"), "auto"),
        **dict.fromkeys(("float32", "32", "32-true", "float", "full", *FALSE), "fp32"),
    },
    "device": {
        **dict.fromkeys(("gpu", "gpus", "nvidia"), "cuda"),
        **dict.fromkeys(("", "none"), "auto"),
    },
    "compile": {"inductor": "1"},
    "optimizer": dict.fromkeys(
        ("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "fusedadam"), "adamw"
    ),
    "tokenizer": dict.fromkeys(("byte", "char", "character", "none"), "bytes"),
    "wandb_mode": {**dict.fromkeys((*TRUE, "enabled", "run"), "online"), "dryrun": "offline"},
    "activation_checkpointing": {"full": "auto"},
    "resume": dict.fromkeys((*TRUE, "last", "newest"), "latest"),
    "retries": dict.fromkeys((*FALSE, "never"), "0"),
}
_PRECISION = words(
    {
        w: {"precision": v}
        for w, v in (VALUES["precision"] | {n: n for n in ("bf16", "fp16", "fp8", "fp32")}).items()
    }
)
_DDP = msg("config.foreign.ddp")
_FIXED = msg("config.foreign.no_field")
_WIDTH = msg("config.foreign.width")

HF, ACCELERATE, LIGHTNING, NANOGPT, NANOCHAT = (
    "Hugging Face Trainer",
    "Accelerate",
    "Lightning",
    "nanoGPT",
    "nanochat",
)
LITGPT, DEEPSPEED, TORCHRUN, COMMON = "LitGPT", "DeepSpeed", "torchrun", "many scripts"
EARLIER, KAIR = "Duet, early 0.1", "KAIR"


def _row(
    names: str,
    tools: str,
    to: str,
    translate: Translate,
    example: str = "",
    note: str = "",
    sized: bool = False,
) -> Foreign:
    return Foreign(tuple(names.split()), tools, tuple(to.split()), translate, note, example, sized)


_EACH = ("device_batch_size", "max_seq_len", "all_ranks")
ROWS = (
    # Batch and model
    _row(
        "per_device_train_batch_size batch_size micro_batch_size train_micro_batch_size_per_gpu "
        "dataloader_batch_size",
        f"{HF}, {NANOGPT}, {LITGPT}, {DEEPSPEED}, {KAIR}",
        "device_batch_size",
        same("device_batch_size"),
        "16",
    ),
    _row(
        "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps",
        f"{HF}, {ACCELERATE}, {DEEPSPEED}, {LIGHTNING}",
        "total_batch_size",
        times("total_batch_size", *_EACH),
        "4",
        msg("config.foreign.accumulation"),
        True,
    ),
    _row(
        "global_batch_size train_batch_size",
        f"{LITGPT}, {DEEPSPEED}",
        "total_batch_size",
        times("total_batch_size", "max_seq_len"),
        "64",
        msg("config.foreign.in_tokens"),
        True,
    ),
    _row("auto_find_batch_size", HF, "device_batch_size", switch({"device_batch_size": "auto"})),
    _row(
        "block_size max_seq_length seq_length seq_len sequence_length context_length n_positions",
        f"{NANOGPT}, {LITGPT}, {COMMON}",
        "max_seq_len",
        same("max_seq_len"),
        "64",
    ),
    _row(
        "n_layer n_layers num_layers num_hidden_layers",
        f"{NANOGPT}, {LITGPT}, {COMMON}",
        "depth",
        same("depth"),
        "6",
    ),
    _row(
        "n_head n_embd num_heads num_attention_heads hidden_size aspect_ratio head_dim n_kv_head",
        f"{NANOGPT}, {NANOCHAT}, {LITGPT}",
        "depth",
        none,
        "768",
        _WIDTH,
    ),
    _row(
        "gradient_checkpointing use_gradient_checkpointing",
        HF,
        "activation_checkpointing",
        all_blocks,
        note=msg("config.foreign.blocks"),
        sized=True,
    ),
    # Duration
    _row(
        "max_steps max_iters max_iterations train_steps total_steps train_iters total_iter",
        f"{HF}, {LIGHTNING}, {LITGPT}, {NANOGPT}, {KAIR}",
        "num_iterations",
        count("num_iterations"),
        "100",
    ),
    _row(
        "num_train_epochs max_epochs epochs n_epochs",
        f"{HF}, {LIGHTNING}, {LITGPT}",
        "num_epochs",
        count("num_epochs"),
        "3",
    ),
    _row(
        "max_tokens",
        LITGPT,
        "num_iterations",
        steps_of_tokens,
        "1000000",
        msg("config.foreign.in_steps"),
        True,
    ),
    _row(
        "time_limit max_train_time",
        f"{LIGHTNING}, {LITGPT}",
        "max_time",
        same("max_time"),
        "01:00:00",
    ),
    _row(
        "target_param_data_ratio",
        NANOCHAT,
        "tokens_per_param",
        same("tokens_per_param"),
        "20",
    ),
    _row(
        "target_flops",
        NANOCHAT,
        "num_iterations",
        none,
        "12",
        msg("config.foreign.duration"),
    ),
    _row(
        "eval_interval checkpoint_test",
        f"{NANOGPT}, {LITGPT}, {KAIR}",
        "eval_every",
        count("eval_every"),
        "50",
    ),
    _row(
        "eval_steps",
        HF,
        "eval_every",
        steps("eval_every"),
        "50",
        msg("config.foreign.part_of_training"),
    ),
    _row(
        "val_check_interval",
        LIGHTNING,
        "eval_every",
        steps("eval_every"),
        "50",
        msg("config.foreign.part_of_epoch"),
    ),
    _row(
        "eval_iters limit_val_batches",
        f"{NANOGPT}, {LIGHTNING}",
        "eval_tokens",
        times("eval_tokens", *_EACH),
        "20",
        msg("config.foreign.all_ranks"),
        True,
    ),
    _row(
        "logging_steps log_interval log_every_n_steps checkpoint_print",
        f"{HF}, {NANOGPT}, {LITGPT}, {LIGHTNING}, {KAIR}",
        "log_every",
        same("log_every"),
        "5",
    ),
    _row(
        "save_steps save_interval every_n_train_steps checkpointing_steps checkpoint_save",
        f"{HF}, {LITGPT}, {LIGHTNING}, {KAIR}",
        "save_every",
        count("save_every"),
        "100",
    ),
    _row(
        "save_total_limit save_top_k",
        f"{HF}, {LIGHTNING}",
        "keep_checkpoints",
        same("keep_checkpoints"),
        "3",
    ),
    _row("load_best_model_at_end", HF, "keep_best", same("keep_best"), "true"),
    _row("ema_decay model_ema_decay E_decay", f"{COMMON}, {KAIR}", "ema", same("ema"), "0.999"),
    _row(
        "eval_strategy evaluation_strategy save_strategy logging_strategy",
        HF,
        "eval_every save_every log_every",
        none,
        "steps",
        msg("config.foreign.intervals"),
    ),
    # Optimizer
    _row(
        "learning_rate lr max_lr base_lr",
        f"{HF}, {NANOGPT}, {LITGPT}, {COMMON}",
        "matrix_lr embedding_lr unembedding_lr",
        one_rate,
        "3e-4",
        msg("config.foreign.three_rates"),
    ),
    _row(
        "optim",
        HF,
        "optimizer",
        words({w: {"optimizer": v} for w, v in VALUES["optimizer"].items()}, same("optimizer")),
        "adamw_torch",
    ),
    _row(
        "max_grad_norm gradient_clip_val gradient_clipping clip_grad max_norm G_optimizer_clipgrad",
        f"{HF}, {LIGHTNING}, {ACCELERATE}, {DEEPSPEED}, {LITGPT}, {KAIR}",
        "grad_clip",
        same("grad_clip"),
        "0.5",
    ),
    _row(
        "warmup_steps warmup_iters lr_warmup_steps num_warmup_steps",
        f"{HF}, {NANOGPT}, {NANOCHAT}, {LITGPT}",
        "warmup_ratio",
        warmup,
        "40",
        msg("config.foreign.of_iterations"),
        True,
    ),
    _row(
        "lr_warmup_fraction warmup_fraction", LITGPT, "warmup_ratio", same("warmup_ratio"), "0.05"
    ),
    _row(
        "min_lr",
        f"{NANOGPT}, {LITGPT}",
        "final_lr_frac",
        none,
        "6e-5",
        msg("config.foreign.of_peak"),
    ),
    _row(
        "lr_scheduler_type lr_scheduler decay_lr lr_decay_iters",
        f"{HF}, {NANOGPT}",
        "warmup_ratio warmdown_ratio final_lr_frac",
        none,
        "cosine",
        msg("config.foreign.schedule"),
    ),
    _row(
        "beta1 beta2 adam_beta1 adam_beta2 adam_epsilon scalar_lr",
        f"{HF}, {NANOGPT}, {NANOCHAT}",
        "",
        none,
        "0.95",
        _FIXED,
    ),
    # Data
    _row(
        "dataset train_file data_path data_dir train_data dataset_path data_root dataset_name",
        f"{NANOGPT}, {HF}, {COMMON}",
        "data",
        existing("data"),
        ".",
        msg("config.foreign.local_data"),
    ),
    _row(
        "dataloader_num_workers workers", f"{HF}, {KAIR}", "num_workers", same("num_workers"), "2"
    ),
    _row(
        "dataloader_persistent_workers",
        f"{HF}, {KAIR}",
        "persistent_workers",
        same("persistent_workers"),
        "true",
    ),
    _row("text_column text_column_name", HF, "text_field", same("text_field"), "content"),
    _row(
        "tokenizer_name tokenizer_path",
        HF,
        "tokenizer",
        existing("tokenizer"),
        "tokenizer.json",
        msg("config.foreign.local_tokenizer"),
    ),
    # Launch
    _row(
        "nproc_per_node num_processes devices gpus num_gpus n_gpus ngpus np n",
        f"{TORCHRUN}, {ACCELERATE}, {LIGHTNING}, {DEEPSPEED}",
        RANKS,
        ranks,
        "2",
        msg("config.foreign.first_argument"),
    ),
    _row(
        "gpu_ids gpu_id device_ids cuda_visible_devices include",
        f"{ACCELERATE}, {COMMON}",
        RANKS,
        gpu_list,
        "0,1",
        msg("config.foreign.select_gpus"),
    ),
    _row(
        "num_nodes num_machines",
        f"{LIGHTNING}, {DEEPSPEED}, {ACCELERATE}",
        "nnodes",
        same("nnodes"),
        "1",
    ),
    _row("machine_rank", ACCELERATE, "node_rank", same("node_rank"), "0"),
    _row("main_process_ip", ACCELERATE, "master_addr", same("master_addr"), "10.0.0.1"),
    _row("main_process_port", ACCELERATE, "master_port", same("master_port"), "29500"),
    _row("rdzv_endpoint", TORCHRUN, "master_addr master_port", endpoint, "10.0.0.1:29500"),
    _row("meeting_timeout", EARLIER, "rendezvous_timeout", same("rendezvous_timeout"), "300"),
    _row(
        "rdzv_backend rdzv_id rdzv_conf local_rank",
        TORCHRUN,
        "",
        nothing,
        "c10d",
        msg("config.foreign.by_launcher"),
    ),
    _row(
        "standalone multi_gpu same_network",
        f"{TORCHRUN}, {ACCELERATE}",
        "",
        nothing,
        note=msg("config.foreign.by_launcher"),
    ),
    _row(
        "ddp_backend dist_backend backend",
        f"{HF}, {NANOGPT}",
        "",
        nothing,
        "nccl",
        msg("config.foreign.backend"),
    ),
    _row("max_restarts", f"{TORCHRUN}, {ACCELERATE}", "retries", same("retries"), "3"),
    _row(
        "ddp_timeout",
        HF,
        "hang_timeout",
        same("hang_timeout"),
        "1800",
        msg("config.foreign.per_phase"),
    ),
    _row(
        "ddp_find_unused_parameters",
        HF,
        "find_unused_parameters",
        same("find_unused_parameters"),
        "true",
    ),
    _row(
        "strategy",
        LIGHTNING,
        "find_unused_parameters",
        words(
            {
                "ddp": {},
                "auto": {},
                "ddp_spawn": {},
                "ddp_find_unused_parameters_true": {"find_unused_parameters": "true"},
            }
        ),
        "ddp",
        _DDP,
    ),
    _row(
        "fsdp use_fsdp deepspeed use_deepspeed zero_stage tensor_parallel tp_size use_megatron_lm",
        HF,
        "",
        none,
        "1",
        _DDP,
    ),
    # Device and precision
    _row("fp16", HF, "precision", switch(_FP16, {"precision": "auto"})),
    _row("bf16", HF, "precision", switch(_BF16, {"precision": "auto"})),
    _row("tf32", HF, "", nothing, note=msg("config.foreign.tf32")),
    _row("amp use_amp", COMMON, "precision", switch({"precision": "auto"}, {"precision": "fp32"})),
    _row("fp8", NANOCHAT, "precision", switch({"precision": "fp8"})),
    _row(
        "fp8_recipe",
        NANOCHAT,
        "",
        words({"tensorwise": {}}),
        "tensorwise",
        msg("config.foreign.fp8_recipe"),
    ),
    _row(
        "mixed_precision dtype torch_dtype",
        f"{ACCELERATE}, {NANOGPT}",
        "precision",
        _PRECISION,
        "bf16",
    ),
    _row(
        "accelerator device_type",
        f"{LIGHTNING}, {NANOCHAT}",
        "device",
        words({w: {"device": v} for w, v in VALUES["device"].items()}, same("device")),
        "cpu",
    ),
    _row("use_cpu cpu no_cuda", f"{HF}, {ACCELERATE}", "device", switch({"device": "cpu"})),
    _row("cuda gpu", COMMON, "device", switch({"device": "cuda"})),
    _row(
        "torch_compile dynamo_backend",
        f"{HF}, {ACCELERATE}",
        "compile",
        words({"true": {"compile": "1"}, "inductor": {"compile": "1"}, "false": {"compile": "0"}}),
    ),
    _row(
        "random_seed manual_seed seed_everything data_seed",
        f"{LIGHTNING}, {HF}, {KAIR}",
        "seed",
        same("seed"),
        "42",
    ),
    _row("pretrained_netG", KAIR, "init_from", same("init_from"), "net.pth"),
    # Run directory and tracking
    _row(
        "output_dir default_root_dir save_dir checkpoint_dir ckpt_dir work_dir",
        f"{HF}, {LIGHTNING}, {COMMON}",
        "out_dir",
        same("out_dir"),
        "out",
        msg("config.foreign.run_folder"),
    ),
    _row(
        "resume_from_checkpoint ckpt_path resume_from resume_path resume_from_step checkpoint "
        "restore auto_resume",
        f"{HF}, {LIGHTNING}, {NANOCHAT}",
        "resume",
        resume,
        "latest",
        msg("config.foreign.resume"),
    ),
    _row(
        "experiment_name exp_name name model_tag",
        f"{NANOCHAT}, {COMMON}",
        "run_name",
        same("run_name"),
        "demo",
    ),
    _row(
        "overwrite_output_dir do_train do_eval",
        HF,
        "",
        nothing,
        note=msg("config.foreign.every_run"),
    ),
    _row("logging_dir", HF, "log_dir", same("log_dir"), "logs"),
    _row(
        "report_to",
        HF,
        "wandb_mode use_dummy_wandb",
        words(
            {
                "wandb": {"wandb_mode": "online"},
                "false": {"use_dummy_wandb": "true"},
                "tensorboard": {"tensorboard": "true"},
            }
        ),
        "wandb",
    ),
    _row(
        "wandb wandb_log use_wandb",
        f"{NANOGPT}, {COMMON}",
        "wandb_mode",
        switch({"wandb_mode": "online"}, {"use_dummy_wandb": "true"}),
    ),
    _row("no_wandb disable_wandb", COMMON, "use_dummy_wandb", switch({"use_dummy_wandb": "true"})),
    _row("wandb_run_name wandb_name", NANOGPT, "wandb_run", same("wandb_run"), "first try"),
    _row("run", NANOCHAT, "wandb_run", same("wandb_run"), "first", msg("config.foreign.run_name")),
    _row("use_tensorboard", KAIR, "tensorboard", same("tensorboard"), "true"),
    _row("project", HF, "wandb_project", same("wandb_project"), "demo"),
    _row("debug_mode verbose", COMMON, "debug", switch({"debug": "true"})),
)
NAMES = {name.lower(): row for row in ROWS for name in row.names}
SECTIONS = (
    "train",
    "trainer",
    "training",
    "eval",
    "model",
    "optimizer",
    "log",
    "data",
    "metrics",
    "checkpoint",
    "job",
)


def row_of(name: str) -> Foreign | None:
    """The row of a name typed without leading dashes. LitGPT, Lightning and torchtitan prefix a
    section: --train.max_steps."""
    section, dot, last = name.replace("-", "_").lower().rpartition(".")
    if dot and section not in SECTIONS:
        return None
    if (section, last) == ("eval", "interval"):
        last = "eval_interval"
    return NAMES.get(last)


def is_switch(name: str) -> bool:
    """Whether the name is a switch without a value in the other tool."""
    row = row_of(name)
    return row is not None and not row.example


def table() -> list[str]:
    """The table in docs/reference/names.md."""
    lines = ["| name elsewhere | used by | Duet | |", "|---|---|---|---|"]
    for row in ROWS:
        to = (
            "first argument of `launch_train.sh`"
            if RANKS in row.to
            else ", ".join(f"`--{n}`" for n in row.to) or "–"
        )
        lines.append(
            f"| {', '.join(f'`{n}`' for n in row.names)} | {row.tools} | {to} | {row.note} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(table()))

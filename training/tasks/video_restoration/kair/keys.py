"""Keys of KAIR's option files, such as datasets.train.gt_size, and their treatment. Includes keys
of KAIR forks that train with spikes. docs/option_files.md contains this table."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from training.config.jsonc import is_number
from training.config.schema import Config, shared
from training.core.messages import msg
from training.core.suggest import suggest
from training.tasks.video_restoration.options import VideoOptions

# Section for Duet's own fields; KAIR's program ignores it.
OWN_SECTION = "duet"
KINDS = {f.name: str(f.type).split(" ", 1)[0] for f in (*fields(Config), *fields(VideoOptions))}
NETWORK = "recurrent"
# KAIR's other training programs, by the model named in an option file.
PROGRAMS = {
    "plain": "main_train_psnr.py",
    "plain2": "main_train_psnr.py",
    "plain4": "main_train_psnr.py",
    "gan": "main_train_gan.py",
}


@dataclass(frozen=True)
class Key:
    """Treatment of a key: it sets `field`; or `why` gives its special meaning or why it is not
    supported; an empty Key is not used."""

    field: str = ""
    absent: Any = None  # KAIR's default for a missing key, if it differs from Duet's
    why: str = ""
    harmless: tuple[Any, ...] | None = (
        # for an unsupported key, the values with no effect (besides null, false, 0 and empty)
        None
    )


def to(field: str, absent: Any = None, why: str = "") -> Key:
    return Key(field, absent, why)


def special(why: str) -> Key:
    """A key with its own method in training.tasks.video_restoration.kair.reader."""
    return Key(why=why)


def lacks(why: str, *harmless: Any) -> Key:
    return Key(why=why, harmless=harmless)


UNUSED = Key()
AGREE = "1, 2 or 4, the same in all places"
SPIKES = msg("tasks.kair.why.spikes")
AS_THEY_ARE = msg("tasks.kair.why.as_they_are")
NOISE = msg("tasks.kair.why.noise")
WEIGHTS = msg("tasks.kair.why.weights")
FREEZING = msg("tasks.kair.why.freezing")
EXTRA_LOSS = msg("tasks.kair.why.extra_loss")
SAME_AS_TRAIN = "must equal the value in datasets.train"

_TOP: dict[str, Key] = {
    "task": special(msg("tasks.kair.why.run_prefix")),
    "model": special('"vrt": video. KAIR\'s other models restore single pictures'),
    "gpu_ids": special("GPU indices; single-process runs only"),
    "dist": special("ignored: the number of ranks is detected"),
    "find_unused_parameters": to("find_unused_parameters"),
    "use_static_graph": to("use_static_graph"),
    "scale": to("scale", why=AGREE),
    "n_channels": special("3"),
    **dict.fromkeys(("merge_bn", "merge_bn_startpoint", "opt_path", "is_train"), UNUSED),
}
_PATH: dict[str, Key] = {
    "root": to("out_dir", why='"experiments" is Duet\'s default, in the project folder'),
    "pretrained_netG": to("init_from"),
    "pretrained_optimizerG": lacks(WEIGHTS),
    **dict.fromkeys(
        ("pretrained_netE", "pretrained_netD", "task", "models", "log", "options", "images"), UNUSED
    ),
}
_BOTH: dict[str, Key] = {
    "io_backend.type": special(msg("tasks.kair.why.disk")),
    "scale": to("scale", why=AGREE),
    "spike_h": to("spike_h"),
    "spike_w": to("spike_w"),
    "spike_channels": to("spike_channels"),
    "spike_flipud": to("spike_flipud"),
    "pad_sequence": lacks(msg("tasks.kair.why.padding")),
    "temporal_scale": lacks(msg("tasks.kair.why.interpolation"), 1),
    "color_jitter": lacks(msg("tasks.kair.why.jitter")),
    "sigma": lacks(NOISE),
    "sigma_min": lacks(NOISE),
    "sigma_max": lacks(NOISE),
    **dict.fromkeys(
        ("spike", "spike_reconstruction", "spike_flow", "input_pack_mode"), lacks(SPIKES)
    ),
    **dict.fromkeys(("rgb_normalize", "spike_normalize"), lacks(AS_THEY_ARE)),
    **dict.fromkeys(
        (
            "name",
            "dataset_type",
            "filename_tmpl",
            "filename_ext",
            "cache_data",
            "phase",
            "n_channels",
        ),
        UNUSED,
    ),
    **dict.fromkeys(
        ("dataloader_prefetch_factor", "dataloader_pin_memory", "pin_memory", "prefetch_factor"),
        UNUSED,
    ),
    **dict.fromkeys(
        ("spike_config", "spike_folder_name", "spike_filename_ext", "compat", "keep_legacy_l"),
        UNUSED,
    ),
    **dict.fromkeys(("tfp_half_win_length", "tfp_device", "tfp_devices"), UNUSED),
}
_TRAIN_DATA: dict[str, Key] = {
    **_BOTH,
    "dataroot_gt": to("dataroot_gt"),
    "dataroot_lq": to("dataroot_lq"),
    "dataroot_spike": to("dataroot_spike"),
    "meta_info_file": to("meta_info_file"),
    "num_frame": to("num_frame"),
    "gt_size": to("gt_size", 256),
    "interval_list": to("interval_list"),
    "random_reverse": to("random_reverse"),
    "use_hflip": to("use_hflip", False),
    "use_rot": to("use_rot", False),
    "dataloader_batch_size": to(
        "device_batch_size", why="per rank; KAIR divides it by the number of gpu_ids"
    ),
    "dataloader_num_workers": to(
        "num_workers", why="per rank; KAIR divides it by the number of gpu_ids"
    ),
    "dataloader_shuffle": special(msg("tasks.kair.why.shuffled")),
    "dataloader_persistent_workers": to("persistent_workers"),
    "persistent_workers": to("persistent_workers"),
    "mirror_sequence": lacks(msg("tasks.kair.why.mirrored")),
    "test_mode": lacks(msg("tasks.kair.why.train_frames")),
    "val_partition": special(msg("tasks.kair.why.partition")),
}
_TEST_DATA: dict[str, Key] = {
    **_BOTH,
    **{
        name: to(name, why=SAME_AS_TRAIN)
        for name in ("spike_h", "spike_w", "spike_channels", "spike_flipud")
    },
    "dataroot_gt": to("test_dataroot_gt"),
    "dataroot_lq": to("test_dataroot_lq"),
    "dataroot_spike": to("test_dataroot_spike"),
    "num_frame": to("test_num_frame"),
    **dict.fromkeys(
        (
            "meta_info_file",
            "val_partition",
            "test_mode",
            "dataloader_shuffle",
            "dataloader_num_workers",
        ),
        UNUSED,
    ),
    **dict.fromkeys(
        ("dataloader_batch_size", "dataloader_persistent_workers", "persistent_workers"), UNUSED
    ),
}
_NETWORK: dict[str, Key] = {
    "net_type": to("net_type", why=f'"{NETWORK}"'),
    "embed_dim": to("embed_dim"),
    "num_blocks": to("num_blocks"),
    "upscale": to("scale", why=AGREE),
    "scale": to("scale", why=AGREE),
    "in_chans": special("3, or 3 + spike_channels if dataroot_spike is set"),
    **dict.fromkeys(
        (
            "out_chans",
            "img_size",
            "window_size",
            "depths",
            "embed_dims",
            "num_heads",
            "indep_reconsts",
            "mul_attn_ratio",
        ),
        UNUSED,
    ),
    **dict.fromkeys(
        (
            "clip_size",
            "inputconv_groups",
            "spynet_path",
            "deformable_groups",
            "attention_heads",
            "attention_window",
        ),
        UNUSED,
    ),
    **dict.fromkeys(
        (
            "pa_frames",
            "nonblind_denoising",
            "cpu_cache_length",
            "recal_all_flows",
            "optical_flow",
            "dcn_type",
        ),
        UNUSED,
    ),
    **dict.fromkeys(
        (
            "use_checkpoint_attn",
            "use_checkpoint_ffn",
            "no_checkpoint_attn_blocks",
            "no_checkpoint_ffn_blocks",
        ),
        UNUSED,
    ),
    **dict.fromkeys(("init_type", "init_bn_type", "init_gain"), UNUSED),
}
_TRAIN: dict[str, Key] = {
    "total_iter": to("num_iterations"),
    "manual_seed": to("seed"),
    "checkpoint_test": to("eval_every"),
    "checkpoint_save": to("save_every"),
    "checkpoint_print": to("log_every"),
    "G_optimizer_clipgrad": to("grad_clip", 0.0),
    "G_optimizer_betas": to("G_optimizer_betas", [0.9, 0.999]),
    **{name: to(name) for name in ("G_lossfn_type", "G_lossfn_weight", "G_charbonnier_eps")},
    **{name: to(name) for name in ("G_optimizer_type", "G_optimizer_lr", "G_optimizer_wd")},
    **{
        f"G_scheduler_{name}": to(f"G_scheduler_{name}")
        for name in ("type", "periods", "eta_min", "milestones", "gamma")
    },
    "G_scheduler_restart_weights": to(
        "G_scheduler_restart_weights", why=msg("tasks.kair.why.restart_weights")
    ),
    "E_decay": to("ema", why=msg("tasks.kair.why.average")),
    "fix_keys": special(f"{FREEZING}; spynet and deform exist only in VRT"),
    **dict.fromkeys(("G_regularizer_orthstep", "G_regularizer_clipstep"), lacks(EXTRA_LOSS)),
    **dict.fromkeys(("freeze_backbone", "use_lora", "phase2_lora_mode"), lacks(FREEZING)),
    **dict.fromkeys(("lora_rank", "lora_alpha", "lora_target_modules", "partial_load"), UNUSED),
    **dict.fromkeys(
        ("G_optimizer_reuse", "G_param_strict", "E_param_strict", "fix_iter", "fix_lr_mul"), UNUSED
    ),
    **dict.fromkeys(
        ("F_feature_layer", "F_weights", "F_lossfn_type", "F_use_input_norm", "F_use_range_norm"),
        UNUSED,
    ),
    **dict.fromkeys(("pad_seq", "flip_seq", "center_frame_only"), UNUSED),
}
_VAL: dict[str, Key] = {
    **{
        name: to(name)
        for name in ("num_frame_testing", "num_frame_overlapping", "size_patch_testing")
    },
    **dict.fromkeys(
        (
            "save_img",
            "pad_seq",
            "flip_seq",
            "center_frame_only",
            "size_patch_overlapping",
            "patch_batch_size",
        ),
        UNUSED,
    ),
}
_LOGGING: dict[str, Key] = {
    "use_tensorboard": to("tensorboard"),
    "use_wandb": special(
        "false: use_dummy_wandb; true: wandb_mode online, or offline without a login"
    ),
    "wandb_api_key": special(
        "W&B login, never written; WANDB_API_KEY in the environment takes precedence"
    ),
    "wandb_mode": to("wandb_mode"),
    "wandb_project": to("wandb_project"),
    "wandb_name": to("wandb_run"),
    "wandb_run_name": to("wandb_run"),
    **dict.fromkeys(("wandb_entity", "use_swanlab", "use_logfire"), UNUSED),
    **{
        f"swanlab_{name}": UNUSED
        for name in ("api_key", "project", "workspace", "name", "description", "mode")
    },
    **{
        f"logfire_{name}": UNUSED
        for name in ("token", "project_name", "service_name", "environment", "log_text")
    },
    **{f"logfire_{name}": UNUSED for name in ("log_metrics", "log_timings")},
}
_PARTS: dict[str, dict[str, Key]] = {
    "": _TOP,
    "path": _PATH,
    "datasets.train": _TRAIN_DATA,
    "datasets.test": _TEST_DATA,
    "netG": _NETWORK,
    "train": _TRAIN,
    "val": _VAL,
    "logging": _LOGGING,
    OWN_SECTION: {},
}
KEYS: dict[str, Key] = {
    f"{part}.{name}".lstrip("."): key for part, keys in _PARTS.items() for name, key in keys.items()
}
# Objects that contain keys.
SECTIONS = {
    *(part for part in _PARTS if part),
    "datasets",
    "datasets.train.io_backend",
    "datasets.test.io_backend",
}
# Keys of which a flat Duet configuration has none, so that one of them marks an option file.
MARKS = {*SECTIONS, "gpu_ids", "n_channels", "dist"}


def leaf(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def meant(dotted: str) -> list[str]:
    """Suggestions for an unknown key: the same word in another section or Duet's name for it; else
    the nearest words, in its own section first."""
    section, _, word = dotted.rpartition(".")
    known = [*KEYS, *SECTIONS, *(f"{OWN_SECTION}.{name}" for name in own_fields())]
    same = [key for key in known if leaf(key) == word] + [
        key for key in KEYS if KEYS[key].field == word
    ]
    here = [key for key in known if key.rpartition(".")[0] == section]
    near: list[str] = []
    for where in (here, known):
        words = suggest(word, sorted({leaf(key) for key in where}))
        near += [key for near_word in words for key in where if leaf(key) == near_word and not near]
    return list(dict.fromkeys(same or near))[:2]


def own_fields() -> list[str]:
    """Common fields that no KAIR key sets."""
    set_already = {key.field for key in KEYS.values()} | {"use_dummy_wandb", "task"}
    return [f.name for f in fields(Config) if shared(f.name) and f.name not in set_already]


def converted(name: str, value: Any) -> Any:
    """The value in the field's type: a list as comma-separated text, 3e5 as an integer."""
    if KINDS[name] == "str" and (is_number(value) or isinstance(value, list)):
        return ",".join(
            str(int(one) if one == int(one) else one)
            for one in (value if isinstance(value, list) else [value])
        )
    if KINDS[name] == "int" and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def nothing(dotted: str, value: Any) -> str:
    """A value of an unsupported key that has no effect."""
    if harmless := KEYS[dotted].harmless:
        return json.dumps(harmless[0])
    return "false" if isinstance(value, bool) else "0" if is_number(value) else "null"

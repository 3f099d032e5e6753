"""Options of video restoration, named as in KAIR's option files: datasets.train.X is X,
datasets.test.X is test_X. Lists are comma-separated text."""

from __future__ import annotations

from dataclasses import dataclass

from training.config.schema import HIGHEST_RATE, option

NAME = "video_restoration"


@dataclass
class VideoOptions:
    """Checked by training.tasks.video_restoration.folders before anything starts."""

    dataroot_gt: str = option(
        "",
        "data",
        "folder of the sharp frames: one folder per clip, or the GoPro layout (CLIP/sharp)",
        unit="path",
    )
    dataroot_lq: str = option(
        "",
        "data",
        "folder of the blurred frames; empty: CLIP/blur beside CLIP/sharp in dataroot_gt",
        unit="path",
    )
    dataroot_spike: str = option(
        "",
        "data",
        "folder of a spike or event channel, one file per frame; empty: none",
        unit="path",
    )
    test_dataroot_gt: str = option(
        "", "data", "sharp frames for validation; empty: no validation", unit="path"
    )
    test_dataroot_lq: str = option(
        "",
        "data",
        "blurred frames for validation; empty: CLIP/blur in test_dataroot_gt",
        unit="path",
    )
    test_dataroot_spike: str = option("", "data", "the spike channel for validation", unit="path")
    meta_info_file: str = option(
        "", "data", "file that lists the training clips, one per line; empty: all", unit="path"
    )
    num_frame: int = option(
        6, "data", "frames per training sample", unit="frames", low=2, high=1000
    )
    test_num_frame: int = option(
        -1, "data", "frames per validation clip; -1: all", unit="frames", low=-1
    )
    gt_size: int = option(
        128, "data", "side of a training crop; 0: whole frames", unit="pixels", low=0, high=8192
    )
    interval_list: str = option(
        "1",
        "data",
        "steps between the frames of a sample; one is drawn at random",
        unit="frames, comma-separated",
    )
    random_reverse: bool = option(False, "data", "reverse random samples in time")
    use_hflip: bool = option(True, "data", "mirror random samples")
    use_rot: bool = option(True, "data", "rotate random samples by 90 degrees")
    spike_channels: int = option(
        1, "data", "channels that dataroot_spike adds to the input", unit="channels", low=1, high=64
    )
    spike_h: int = option(
        0, "data", "height of a raw .dat spike frame; 0: pictures or .npy", unit="pixels", low=0
    )
    spike_w: int = option(0, "data", "width of a raw .dat spike frame", unit="pixels", low=0)
    spike_flipud: bool = option(True, "data", "raw .dat spike frames are upside down")

    net_type: str = option(
        "recurrent", "network", "a bidirectional recurrent network", choices=("recurrent",)
    )
    embed_dim: int = option(32, "network", "feature channels", unit="channels", low=4, high=1024)
    num_blocks: int = option(
        3, "network", "residual blocks per direction", unit="blocks", low=1, high=100
    )
    scale: str = option(
        "1", "network", "size ratio of sharp to blurred frames", choices=("1", "2", "4")
    )

    G_lossfn_type: str = option(
        "charbonnier", "optimizer", "loss", choices=("charbonnier", "l1", "l2")
    )
    G_lossfn_weight: float = option(1.0, "optimizer", "loss weight", low=0)
    G_charbonnier_eps: float = option(
        # without it, the gradient of equal pixels is NaN
        1e-9,
        "optimizer",
        "constant under the root of the Charbonnier loss",
        low=1e-12,
    )
    G_optimizer_type: str = option("adam", "optimizer", "optimizer", choices=("adam", "adamw"))
    G_optimizer_lr: float = option(
        4e-4, "optimizer", "peak learning rate", unit="per step", low=0, high=HIGHEST_RATE
    )
    G_optimizer_betas: str = option("0.9,0.99", "optimizer", "Adam's betas", unit="comma-separated")
    G_optimizer_wd: float = option(0.0, "optimizer", "weight decay", low=0)
    G_scheduler_type: str = option(
        "CosineAnnealingWarmRestarts",
        "optimizer",
        "learning-rate schedule",
        choices=("CosineAnnealingWarmRestarts", "MultiStepLR", "none"),
    )
    G_scheduler_periods: str = option(
        "",
        "optimizer",
        "lengths of the cosine periods; empty: the whole run",
        unit="steps, comma-separated",
    )
    G_scheduler_restart_weights: str = option(
        "1",
        "optimizer",
        "height of each cosine period",
        unit="fractions of the peak, comma-separated",
    )
    G_scheduler_eta_min: float = option(
        1e-7, "optimizer", "lowest learning rate of the cosine", unit="per step", low=0
    )
    G_scheduler_milestones: str = option(
        "", "optimizer", "steps at which MultiStepLR lowers the rate", unit="steps, comma-separated"
    )
    G_scheduler_gamma: float = option(0.5, "optimizer", "MultiStepLR's factor", low=0, high=1)

    num_frame_testing: int = option(
        0,
        "validation",
        "frames per piece in which a long clip is restored; 0: whole",
        unit="frames",
        low=0,
    )
    num_frame_overlapping: int = option(
        2, "validation", "frames shared by two pieces", unit="frames", low=0
    )
    size_patch_testing: int = option(
        0,
        "validation",
        "side of the squares in which a large frame is restored; 0: whole",
        unit="pixels",
        low=0,
    )

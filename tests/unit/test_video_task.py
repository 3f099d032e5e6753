"""Video restoration: network, loss, metrics, schedule, result pictures, and that it learns."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.unit.video_data import gopro, rendered, smeared
from training.config.schema import Config
from training.tasks.base import Samples
from training.tasks.video_restoration import folders, inference, metrics, schedule
from training.tasks.video_restoration.network import Recurrent, enlarged
from training.tasks.video_restoration.options import VideoOptions
from training.tasks.video_restoration.task import VideoRestoration

CPU = torch.device("cpu")


def task(options: VideoOptions) -> VideoRestoration:
    return VideoRestoration(options, Config(), CPU)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rendered(tmp_path_factory.mktemp("video") / "blur", "--spikes")


def shaken(model: nn.Module) -> nn.Module:
    """The model with weights in the last layer too, as after some training."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


# ── the network
# ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scale", [1, 2, 4])
@pytest.mark.parametrize("channels", [3, 5])
def test_frames_in_frames_out(scale: int, channels: int) -> None:
    torch.manual_seed(1)
    model, frames = Recurrent(channels, 8, 1, scale), torch.rand(2, 3, channels, 9, 14)
    out = model(frames)
    assert out.shape == (2, 3, 3, 9 * scale, 14 * scale)
    assert torch.equal(out, enlarged(frames, scale))  # before the first step: the input
    out.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_every_frame_uses_all_others() -> None:
    torch.manual_seed(1)
    model, frames = shaken(Recurrent(3, 8, 1, 1)), torch.rand(1, 5, 3, 8, 8, requires_grad=True)
    for step in range(5):
        (grad,) = torch.autograd.grad(model(frames)[0, step].sum(), frames)
        assert (grad.abs().amax((0, 2, 3, 4)) > 0).all()


def test_a_clip_of_one_frame_and_bf16() -> None:
    model = shaken(Recurrent(3, 8, 1, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.rand(1, 1, 3, 8, 8))
    assert out.dtype == torch.float32 and out.shape == (1, 1, 3, 16, 16)


def test_operations_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    work = task(VideoOptions(gt_size=16, num_frame=4, embed_dim=8, num_blocks=2))
    model = work.model()
    with FlopCounterMode(display=False) as counter:
        model(torch.rand(1, 4, 3, 16, 16))
    # the backward pass takes twice as many as the forward pass
    assert work.flops(model) == 3 * counter.get_total_flops()
    assert task(VideoOptions(gt_size=0)).flops(model) is None


# ── losses and metrics
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_losses() -> None:
    a, b = torch.tensor([0.0, 0.3, 1.0]), torch.tensor([0.0, 0.7, 1.0])
    assert metrics.loss("l1", a, b, 0).item() == pytest.approx(0.4 / 3)
    assert metrics.loss("l2", a, b, 0).item() == pytest.approx(0.16 / 3)
    assert metrics.loss("charbonnier", a, b, 0.09).item() == pytest.approx((0.3 + 0.5 + 0.3) / 3)


def test_equal_frames_have_a_finite_gradient() -> None:
    least = next(f for f in fields(VideoOptions) if f.name == "G_charbonnier_eps").metadata["low"]
    found = torch.zeros(3, requires_grad=True)
    metrics.loss("charbonnier", found, torch.zeros(3), least).backward()
    assert found.grad is not None and found.grad.tolist() == [0, 0, 0]
    assert least <= 1e-9  # of KAIR's files


def test_psnr_is_the_mean_over_frames() -> None:
    wanted = torch.full((2, 2, 3, 4, 4), 51 / 255)
    found = wanted.clone()
    found[0, 0] += 26 / 255
    found[0, 1] += 0.6 / 255  # rounded to 1 of 255
    found[1] = 7.0  # clamped to 1: an error of 0.8
    errors = [[26 / 255, 1 / 255], [0.8, 0.8]]
    assert metrics.psnr(found, wanted).tolist() == pytest.approx(
        [np.mean([-20 * np.log10(error) for error in clip]) for clip in errors], abs=1e-3
    )
    assert metrics.psnr(wanted + 0.4 / 255, wanted).tolist() == [100.0, 100.0]


def slow_ssim(a: Any, b: Any) -> float:
    """Wang 2004, literally: every position, every weight."""
    place = np.arange(11) - 5
    weights = np.exp(-(place[:, None] ** 2 + place[None, :] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    first, second, found = 0.01**2, 0.03**2, []
    for y in range(a.shape[0] - 10):
        for x in range(a.shape[1] - 10):
            p, q = a[y : y + 11, x : x + 11], b[y : y + 11, x : x + 11]
            mean_p, mean_q = (weights * p).sum(), (weights * q).sum()
            var_p, var_q = (weights * (p - mean_p) ** 2).sum(), (weights * (q - mean_q) ** 2).sum()
            both = (weights * (p - mean_p) * (q - mean_q)).sum()
            top = (2 * mean_p * mean_q + first) * (2 * both + second)
            found.append(top / ((mean_p**2 + mean_q**2 + first) * (var_p + var_q + second)))
    return float(np.mean(found))


def test_ssim() -> None:
    random = np.random.default_rng(0)
    a = (random.integers(0, 256, (2, 2, 3, 14, 16)) / 255).astype(np.float32)
    b = (a + random.normal(0, 0.1, a.shape)).astype(np.float32)
    written = np.round(np.clip(b, 0, 1) * 255) / 255
    wanted = [
        np.mean([slow_ssim(a[i, t, c], written[i, t, c]) for t in range(2) for c in range(3)])
        for i in range(2)
    ]
    assert metrics.ssim(torch.from_numpy(b), torch.from_numpy(a)).tolist() == pytest.approx(
        wanted, abs=1e-6
    )
    assert metrics.ssim(torch.from_numpy(a), torch.from_numpy(a)).tolist() == [1.0, 1.0]


# ── the learning rate
# ────────────────────────────────────────────────────────────────────────────────────────────────


def rates(total: int, **options: Any) -> list[float]:
    return [schedule.share(VideoOptions(**options), step, total) for step in range(total)]


def test_cosine_as_in_torch() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    torchs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10, eta_min=0.1)
    wanted = []
    for _ in range(25):
        wanted.append(optimizer.param_groups[0]["lr"] / 0.5)
        optimizer.step()
        torchs.step()
    assert rates(
        25, G_scheduler_periods="10", G_scheduler_eta_min=0.1, G_optimizer_lr=0.5
    ) == pytest.approx(wanted)


def test_periods_and_weights() -> None:
    found = rates(
        40,
        G_scheduler_periods="10,20",
        G_scheduler_restart_weights="1,0.5",
        G_scheduler_eta_min=0.0,
    )
    assert [found[step] for step in (0, 5, 10, 20, 30)] == pytest.approx([1, 0.5, 0.5, 0.25, 0.5])
    whole = rates(8, G_scheduler_eta_min=0.0)
    assert whole[0] == 1 and whole[4] == pytest.approx(0.5) and 0 < whole[7] < 0.05


def test_steps_and_none() -> None:
    found = rates(
        6, G_scheduler_type="MultiStepLR", G_scheduler_milestones="2,4", G_scheduler_gamma=0.1
    )
    assert found == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert set(rates(3, G_scheduler_type="none")) == {1.0}


# ── piecewise restoration
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class Counting(nn.Module):
    """Doubles its input and records the sizes of its pieces."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale, self.shapes = scale, set[tuple[int, ...]]()

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        self.shapes.add(tuple(frames.shape[1:]))
        return 2 * enlarged(frames, self.scale).repeat_interleave(1, 0)


@pytest.mark.parametrize(
    ("steps", "overlap", "side"),
    [(0, 0, 0), (4, 2, 0), (4, 0, 0), (0, 0, 40), (4, 2, 40), (50, 2, 500), (1, 0, 41)],
)
@pytest.mark.parametrize("scale", [1, 2])
def test_pieces_cover_everything_once(steps: int, overlap: int, side: int, scale: int) -> None:
    frames = torch.rand(1, 9, 4, 67, 90).round(decimals=1)
    # enlarging uses neighbouring pixels
    frames = torch.full_like(frames, 0.25) if scale == 2 else frames
    model = Counting(scale)
    out = inference.restored(model, frames, scale=scale, steps=steps, overlap=overlap, side=side)
    assert torch.allclose(out, 2 * enlarged(frames, scale))
    height, width = (min(side, 67), min(side, 90)) if side else (67, 90)
    assert model.shapes == {(min(steps, 9) if steps else 9, 4, height, width)}


# ── the task
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_optimizer_of_the_options() -> None:
    work = task(
        VideoOptions(
            G_optimizer_lr=0.1,
            G_optimizer_betas="0.8,0.95",
            G_optimizer_wd=0.2,
            embed_dim=8,
            num_blocks=1,
        )
    )
    found = work.optimizer(work.model())
    assert type(found) is torch.optim.Adam
    assert {name: found.defaults[name] for name in ("lr", "betas", "weight_decay")} == {
        "lr": 0.1,
        "betas": (0.8, 0.95),
        "weight_decay": 0.2,
    }
    assert (
        type(task(VideoOptions(G_optimizer_type="adamw")).optimizer(work.model()))
        is torch.optim.AdamW
    )


def test_facts_of_a_checkpoint(clips: Path) -> None:
    options = gopro(
        clips,
        embed_dim=8,
        num_blocks=1,
        dataroot_spike=f"{clips}/train",
        test_dataroot_spike=f"{clips}/test",
        spike_channels=2,
    )
    facts = task(options).facts()
    assert facts["shape"] == {"scale": 1, "embed_dim": 8, "num_blocks": 1, "channels": 5}
    assert facts == task(replace(options, gt_size=8)).facts()
    assert facts["data"] != task(gopro(clips)).facts()["data"]


def test_the_position_in_the_data_is_that_of_the_training_clips(clips: Path) -> None:
    own = gopro(clips)
    other = replace(own, test_dataroot_gt=f"{clips}/train")
    saved = task(own).facts()
    changed = task(other).facts()
    assert saved["data"]["train"] == changed["data"]["train"]
    assert saved["data"]["val"] != changed["data"]["val"]
    early: Any = {"data": folders.content(own)}  # of all parts
    for facts, options, same in (
        (saved, own, True),
        (saved, other, True),
        (saved, replace(own, dataroot_gt=f"{clips}/test"), False),
        (early, own, True),
        (early, other, False),
    ):
        assert task(options).same_data(facts) == same


def test_the_files_are_examined_once(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[str] = []
    real = folders.content

    def content(options: VideoOptions, *parts: str) -> str:
        examined.extend(parts)
        return real(options, *parts)

    monkeypatch.setattr(folders, "content", content)
    work = task(gopro(clips))
    assert work.same_data(work.facts()) and work.facts() == work.facts()
    assert sorted(examined) == ["train", "val"]


def test_a_score_is_of_the_first_frames_of_each_clip(clips: Path) -> None:
    assert task(gopro(clips, test_num_frame=2)).measured(3) == {"samples": 3, "frames": 2}


def test_the_metrics_of_a_clip(clips: Path) -> None:
    work = task(gopro(clips, embed_dim=8, num_blocks=1, num_frame_testing=4, size_patch_testing=0))
    rows = work.rows("val")
    assert rows is not None
    batch = rows.rows([0], 0)
    found = work.metrics(work.model(), batch)
    assert {name: values.shape for name, values in found.items()} == dict.fromkeys(
        ("psnr", "ssim", "psnr_input"), (1,)
    )
    # the initial weights change nothing
    assert found["psnr"].item() == pytest.approx(found["psnr_input"].item())
    assert 15 < found["psnr_input"].item() < 45 and 0.3 < found["ssim"].item() < 1
    assert (
        work.shown({"psnr": 28.0, "psnr_input": 26.5, "ssim": 0.9})
        == "PSNR 28.00 dB (+1.50 over the input), SSIM 0.9000"
    )
    assert task(replace(work.options, test_dataroot_gt="")).rows("val") is None


def trained(options: VideoOptions, steps: int) -> tuple[VideoRestoration, nn.Module, list[float]]:
    work = task(options)
    torch.manual_seed(0)
    model, data = work.model(), Samples(work.train_data(), 5, drawn=True)
    optimizer, losses = work.optimizer(model), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = options.G_optimizer_lr * work.rate(step, steps)
        loss = work.loss(model, data.rows([(4 * step + i) % len(data) for i in range(4)], step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return work, model, losses


@pytest.mark.slow
def test_it_learns_and_shows_it(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    clips = tmp_path_factory.mktemp("smeared")
    options = smeared(clips, embed_dim=8, num_blocks=1, G_charbonnier_eps=1e-3, G_optimizer_lr=2e-3)
    work, model, losses = trained(options, 80)
    least = options.G_charbonnier_eps**0.5  # the loss of a perfect result
    assert np.mean(losses[-10:]) - least < 0.9 * (np.mean(losses[:10]) - least)
    rows = work.rows("val")
    assert rows is not None
    found = work.metrics(model, rows.rows([0], 0))  # of a validation clip
    assert (found["psnr"] - found["psnr_input"]).item() > 0.4

    text = work.sample(model, tmp_path)
    assert (
        text is not None
        and text.startswith("clip_000: ")
        and " → " in text
        and text.endswith(" dB")
    )
    with Image.open(tmp_path / "restored_clip_000.png") as picture:
        picture.load()
        assert picture.mode == "RGB" and picture.size == (3 * 288 + 8, 288 + 18)
        panels = np.asarray(picture).astype(int)[18:]
    sharp = np.asarray(Image.open(clips / "test" / "clip_000" / "sharp" / "000002.png")).astype(int)
    assert (panels[::6, 584:872:6] == sharp).all()
    assert [f.name for f in tmp_path.iterdir()] == ["restored_clip_000.png"]


def test_each_clip_has_a_picture_of_its_name(clips: Path, tmp_path: Path) -> None:
    """Without special characters."""
    root = tmp_path / "data"
    root.mkdir()
    for name in ("a b;c", "a_b_c", "场景一"):
        (root / name).symlink_to(clips / "test" / "clip_000")
    work = task(replace(gopro(clips, embed_dim=8, num_blocks=1), test_dataroot_gt=str(root)))
    out = tmp_path / "out"
    out.mkdir()
    assert work.sample(work.model(), out) is not None
    assert {f.name for f in out.iterdir()} == {
        "restored_a_b_c.png", "restored_a_b_c_.png", "restored_场景一.png"
    }  # fmt: skip


def test_spikes_are_part_of_the_input(clips: Path) -> None:
    size: dict[str, Any] = {"spike_h": 32, "spike_w": 32, "spike_channels": 4}
    options = gopro(
        clips,
        dataroot_spike=f"{clips}/train",
        test_dataroot_spike=f"{clips}/test",
        embed_dim=8,
        num_blocks=1,
        **size,
    )
    _, _, losses = trained(options, 3)
    assert len(losses) == 3 and task(options).channels == 7

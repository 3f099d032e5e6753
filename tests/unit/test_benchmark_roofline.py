"""Estimates of what each measure for speed gains."""

from __future__ import annotations

import pytest

from benchmarks import roofline

GPU = roofline.Machine(peak=1e15, bandwidth=1e12)


def test_the_estimates_follow_from_the_sizes_of_the_model() -> None:
    # 24,576 tokens; 12 blocks of width 768 with 4 × 768² and 3 × 768 × 2048 weights
    step = roofline.step_of("conservative")
    per_token = 6 * (12 * 7_077_888 + 320 * 768) + 12 * 12 * 768 * 1536
    assert roofline.at_peak_ms(step, GPU) == pytest.approx(24_576 * per_token / 1e12)
    assert roofline.stream_ms(step, GPU) == pytest.approx(10 * 2 * 768 * 24_576 * 12 / 1e9)
    launches = 2858 - 70  # optimizers of depth 12, docs/gpus.md
    assert roofline.muon_gpu_ms(step, GPU) == pytest.approx(launches * 1.3e-3)
    square, oblong = 2 * 768**3, 768**2 * 2048 + 768**3
    saved = 5 * 12 * (4 * square + 3 * oblong)
    assert roofline.symmetric_ms(step, GPU) == pytest.approx(saved / 1e12)
    shared = 9 * 12 * 3 * (768**2 * 2048 - 768**3)
    assert roofline.shared_gram_ms(step, GPU) == pytest.approx(shared / 1e12)
    # 13 1/3 bytes written and 20 2/3 read
    assert roofline.selective_ms(step, GPU) == pytest.approx(34 * 768 * 24_576 * 12 / 1e9)


def test_estimates_from_measured_launches_and_times() -> None:
    one, *others = map(roofline.step_of, roofline.CONFIGS)
    assert roofline.joined_ms(one, GPU) == pytest.approx(456 * 1.3e-3)
    assert roofline.one_micro_batch_ms(one, GPU) == pytest.approx(594 * 1.3e-3)
    assert {roofline.joined_ms(step, GPU) for step in others} == {None}, "not counted"
    assert roofline.graphs_ms(one, GPU) == pytest.approx(60 - 40.6)
    assert [roofline.graphs_ms(step, GPU) for step in others] == [0.0, 0.0]
    waits = [roofline.longest_wait_ms(step, GPU) for step in (one, *others)]
    assert waits == pytest.approx([36.0, 48.0, 60.0])


def test_selective_recomputation_costs_less_than_whole_blocks() -> None:
    assert roofline.recomputation(roofline.step_of("balanced")) == (0.0, 0.0)
    chosen, whole = roofline.recomputation(roofline.step_of("aggressive"))
    assert 0 < chosen < whole / 2

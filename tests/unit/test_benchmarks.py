"""Arithmetic of the benchmarks."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import launches, muon, null_gpus, peers
from benchmarks.contenders import gpt2, loop, parts
from benchmarks.flags import NANOCHAT_DIR
from benchmarks.gpu import __main__ as gpu
from benchmarks.target import runs
from tests.cases import each
from tests.conftest import ROOT
from training.core.rundir import read_records
from training.host import decisions, packages
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims


def job(shard: Path, **changes: object) -> parts.Job:
    facts = {
        "depth": 1,
        "seq_len": 8,
        "batch": 2,
        "precision": "fp32",
        "steps": 3,
        "vocab": 320,
        "shard": str(shard),
    }
    return parts.Job(**(facts | changes))  # type: ignore[arg-type]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    return tmp_path / "train.bin"


def test_warm_up_steps_are_skipped() -> None:
    stamps = [float(n) for n in range(peers.WARM_STEPS)] + [9.1, 9.2, 9.6]
    found = peers.sample(stamps, 300.0, 2.5)
    assert found.median_ms == pytest.approx(100) and found.mean_ms == pytest.approx(200)


def test_ratios_are_within_a_round() -> None:
    samples = {peers.BARE: [peers.Sample(10, 10, 100, 1), peers.Sample(20, 20, 100, 1)]}
    samples[peers.DUET] = [peers.Sample(11, 12, 110, 1), peers.Sample(22, 24, 110, 1)]
    *_, bare, duet = peers.table(samples)
    assert bare.removeprefix(peers.BARE).split()[3:6] == ["1.000", "1.00–1.00", "1.000"]
    assert duet.removeprefix(peers.DUET).split() == [
        "16.50",
        "11.00",
        "22.00",
        "1.100",
        "1.10–1.10",
        "1.200",
        "+1.50",
        "ms",
        "110",
        "1.100",
    ]


def test_different_losses_are_reported() -> None:
    samples = {peers.BARE: [peers.Sample(1, 1, 1, 3.0)], peers.DUET: [peers.Sample(1, 1, 1, 9.0)]}
    assert "3.0000" in peers.same_work(samples)
    assert peers.same_work(samples | {"accelerate": [peers.Sample(1, 1, 1, 3.1)]}).startswith(
        "NOT THE SAME WORK"
    )


@each("arguments", [launches.arguments, gpu.arguments])
def test_a_checkout_of_nanochat_is_found_from_any_folder(
    arguments: Callable[[list[str]], argparse.Namespace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own/nanochat").mkdir(parents=True)
    (tmp_path / "own/nanochat/gpt.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for given in ("own", str(tmp_path / "own")):
        assert arguments([f"--nanochat={given}"]).nanochat == tmp_path / "own"
        monkeypatch.setenv(NANOCHAT_DIR, given)
        assert arguments([]).nanochat == tmp_path / "own"
    monkeypatch.setenv(NANOCHAT_DIR, "")
    assert arguments([]).nanochat is None
    with pytest.raises(SystemExit):
        arguments(["--nanochat=."])


@each(
    ("program", "word", "problem"),
    [
        (launches.arguments, "--depths=", "'' is not a number from 1 to 100"),
        (launches.arguments, "--ranks=1,3", "'3' is not a number from 1 to 2"),
        (launches.arguments, "--compiled=yes", "'yes' is not a number from 0 to 1"),
        (muon.arguments, "--shapes=huge", "'huge' is not one of small, big, probe"),
        (muon.arguments, "--rounds=0", "'0' is not a number from 1 to 1000"),
    ],
)
def test_a_wrong_value_is_an_error_of_its_flag(
    program: Callable[[list[str]], argparse.Namespace],
    word: str,
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        program([word])
    assert f"argument {word.partition('=')[0]}: {problem}\n" in capsys.readouterr().err


@each("kind", [RuntimeError, statistics.StatisticsError])  # the second: too few steps
def test_launches_are_printed_as_they_are_counted(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = {"LAUNCH kernel": 7}
    step = {"other": part, "optimizer": part, "optimizer_cpu_ms": 1.0, "step_cpu_ms": 2.0}

    def bare(environ: dict[str, str], depth: int, *_: int) -> list[dict[str, object]]:
        assert f"| depth {depth}, eager: Duet, 1 rank | 7 |" in capsys.readouterr().out
        if depth == 2:
            raise kind("no module named tiktoken")
        return [step]

    monkeypatch.setattr(sys, "argv", ["launches", "--depths=3,2", "--ranks=1", "--compiled=0"])
    monkeypatch.delenv(NANOCHAT_DIR, raising=False)
    monkeypatch.setattr(null_gpus, "environment", lambda: nullcontext({}))
    monkeypatch.setattr(launches, "duet", lambda *_: [step])
    monkeypatch.setattr(launches, "bare", bare)
    with pytest.raises(SystemExit) as ended:
        launches.main()
    out, err = capsys.readouterr()
    assert ended.value.code and err == "no module named tiktoken\n"
    assert out == "| depth 2, eager: bare loop, 1 rank | failed | | | | |\n"


def test_variants_of_muon_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 Duet has a Gram matrix for each step itself."""
    monkeypatch.setattr(decisions, "cpu_bf16", lambda: True)
    for fp32, differs in ((True, True), (False, False)):
        asked = muon.arguments(["--fp32"] if fp32 else [])
        assert ("own Gram" in muon.variants(1, asked)) == differs


def test_missing_peers_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    (tmp_path / "accelerate").mkdir()
    monkeypatch.setattr(sys, "argv", ["peers"])
    with pytest.raises(
        SystemExit, match=r"not installed: lightning, transformers\n    try:     make peers"
    ):
        peers.arguments()


def test_every_contender_has_a_file_and_a_pin() -> None:
    pins = packages.locked("peers")
    for module, package in peers.CONTENDERS.values():
        assert not module or (ROOT / f"benchmarks/contenders/{module}.py").exists()
        assert not package or [pin for pin in pins if pin.startswith(f"{package}==")]
    assert not [line for line in pins if line.startswith(("torch==", "triton==", "nvidia-"))], (
        "torch comes from .venv"
    )


def test_batches_are_complete_sequences_with_their_next_tokens(shard: Path) -> None:
    batches = list(parts.Steps(job(shard)))
    assert len(batches) == 3
    for inputs, targets in batches:
        assert inputs.shape == (2, 8) and inputs.dtype == torch.int64
        assert torch.equal(targets, inputs + 1) and not (inputs[:, 0] % 8).any()
    assert all(
        torch.equal(a[0], b[0]) for a, b in zip(batches, parts.loader(job(shard)), strict=True)
    )


@pytest.mark.slow
def test_the_bare_loop_trains(shard: Path) -> None:
    from benchmarks.contenders import bare

    torch.manual_seed(0)
    trace = bare.run(job(shard, steps=20))
    # ln 320 = 5.77
    assert len(trace.stamps) == 20 and sorted(trace.stamps) == trace.stamps and trace.loss < 5.7


def test_the_baseline_has_the_size_of_duets_model() -> None:
    sizes = [
        sum(p.numel() for p in m.parameters())
        for m in (gpt2.GPT2(4, 256, 320, 256), GPT(ModelDims(4, 320, 256)))
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.025), "SwiGLU's width is a multiple of 64"
    assert [gpt2.share(step, 600) for step in (0, 29, 599)] == pytest.approx([1 / 30, 1, 0.1])


def contender_run(shard: Path, out: Path, **changes: object) -> gpt2.Run:
    sizes = {"depth": 1, "seq_len": 8, "batch": 2, "steps": 3, "rate": 1e-3, "seed": 1}
    corpus = {
        "bf16": False,
        "device": "cpu",
        "vocab": 320,
        "bos": 256,
        "train": str(shard),
        "val": str(shard),
    }
    writing = {"eval_every": 2, "eval_tokens": 32, "save_every": 3, "out": str(out)}
    return gpt2.Run(**(sizes | corpus | writing | changes))  # type: ignore[arg-type]


def test_the_records_of_the_baseline_can_be_read(shard: Path, tmp_path: Path) -> None:
    gpt2.train(contender_run(shard, tmp_path / "records.jsonl"), gpt2.make)
    curve = runs.read(tmp_path / "records.jsonl")
    assert list(curve.loss) == [1, 2, 3] and set(curve.val_bpb) == {2, 3}


def test_an_interrupted_baseline_continues_exactly(shard: Path, tmp_path: Path) -> None:
    whole, parted = (
        contender_run(shard, tmp_path / f"{name}.jsonl", steps=16) for name in ("whole", "parted")
    )
    gpt2.train(whole, gpt2.make)  # more than an epoch of six batches

    def interrupted(run: gpt2.Run) -> loop.Contender:
        contender = gpt2.make(run)

        def update(step: int) -> None:
            if step == 8:
                raise KeyboardInterrupt
            contender.update(step)

        return replace(contender, update=update)

    with pytest.raises(KeyboardInterrupt):
        gpt2.train(parted, interrupted)
    assert list(runs.read(Path(parted.out)).loss)[-1] == 8, "two more than were saved"
    gpt2.train(parted, gpt2.make)
    records = [
        [
            {k: v for k, v in record.items() if k not in ("step_ms", "time")}
            for record in read_records(Path(r.out))
        ]
        for r in (whole, parted)
    ]
    assert records[0] == records[1] and len(records[0]) == 24

"""The predicted exchange of gradients, and what a plan decides by it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import ask
from training.config.batch import Batch
from training.core.messages import msg
from training.core.rundir import RunDir
from training.host import placement
from training.host.decisions import Decision
from training.host.gpus import Gpu
from training.plan import exchange, gradients, tuning
from training.plan.exchange import Exchange
from training.plan.preflight import gpu_state
from training.plan.preflight.gpu_state import Pair
from training.tasks.gpt.memory import StepWorkload
from training.tasks.gpt.step import GptStep
from training.tasks.planning import Decided, Situation

AUTO = Decision("auto", "")
CARD = "NVIDIA GeForce RTX 4090"
ONE = Exchange(
    ranks=2,
    gradient_bytes=1_000_000_000,
    update_bytes=0,
    bytes_per_s=10e9,
    latency_s=0.0,
    compute_s=0.3,
)
NODE = placement.Topology(placement.NODE, "", "", nnodes=2).record()
# possibly of several machines: the number of ranks on this one is unknown
RANK = placement.Topology(placement.RANK, "", "", world_size=2, local_world_size=0).record()


def test_the_backward_pass_hides_the_exchange() -> None:
    last = 0.1 * 25 * (1 << 20) / 1e9
    assert ONE.total_s == pytest.approx(0.1)
    assert ONE.exposed_s == pytest.approx(last), "all but the last bucket"
    slow = replace(ONE, bytes_per_s=2e9)
    assert slow.exposed_s == pytest.approx(0.5 - 0.2)
    assert slow.share == pytest.approx(0.5) and slow.speed_up == pytest.approx(1.0)
    # Only the backward pass of the last micro-batch overlaps.
    assert replace(slow, accumulation=4).exposed_s == pytest.approx(0.5 - 0.05)
    assert slow.accumulated(4).share == pytest.approx(0.3 / 1.5)
    half = replace(slow, compressed=True)
    assert half.gradients_s == pytest.approx(0.25) and half.exposed_s == pytest.approx(0.05)


def test_updates_and_latency_count() -> None:
    assert replace(ONE, update_bytes=2 * 10**9).exposed_s == pytest.approx(ONE.exposed_s + 0.1)
    buckets = math.ceil(1e9 / (25 << 20))
    assert replace(ONE, latency_s=1e-3).gradients_s == pytest.approx(0.1 + buckets * 1e-3)


@each(
    ("name", "rate", "sequences", "count"),
    [
        ("NVIDIA H100 80GB HBM3", 300.0, 8, 4),  # the host is slower than the GPUs
        ("NVIDIA H100 80GB HBM3", 20.0, 10, 1),  # but a later exchange costs more
        ("NVIDIA H100 80GB HBM3", 300.0, 64, 1),  # enough arithmetic to hide the launches
        (CARD, 20.0, 8, 1),
    ],
)
def test_graphs_of_several_blocks_where_the_host_is_the_limit(
    name: str, rate: float, sequences: int, count: int
) -> None:
    plan = decide("none", begun(rate, name=name), decided(sequences))
    found = plan.fields["blocks_per_graph"]
    assert found["value"] == count and found["reason"]
    assert len(plan.text) == (2 if count > 1 else 1)


def test_a_graph_delays_the_exchange_of_its_gradients() -> None:
    single, several = (exchange.in_graphs(ONE, 10, 100_000_000, count) for count in (1, 4))
    assert single.exposed_s == pytest.approx(0.01) and several.exposed_s == pytest.approx(0.04)
    assert single.launches_s == pytest.approx(10 * exchange.LAUNCHES_S)
    assert several.launches_s == pytest.approx(6 * exchange.LAUNCHES_S)
    slow = replace(several, bytes_per_s=2e9)
    assert slow.exposed_s == pytest.approx(0.5 - 0.6 * 0.2), "nothing is sent before the first ends"


def test_unknown_arithmetic() -> None:
    one = replace(ONE, compute_s=None)
    assert (one.share, one.speed_up, one.exposed_s) == (None, None, one.total_s)
    assert exchange.saved(one, one) is None
    assert tuning.enough_accumulation(one, lambda one: tuning.choose(AUTO, one, None)) is None


@pytest.mark.parametrize(
    ("latency_us", "rate", "size"),
    [(70, 10e9, 25), (1000, 10e9, 100), (500, 20e9, 100), (2, 5e9, 4), (20, 1e9, 4)],
)
def test_the_bucket_balances_latency_and_the_last_one(
    latency_us: float, rate: float, size: int
) -> None:
    one = replace(ONE, latency_s=latency_us * 1e-6, bytes_per_s=rate)
    found, optimum = exchange.best_bucket(one)
    assert found == size
    times = {
        mib: replace(one, bucket_mib=mib, compute_s=10.0).exposed_s
        + replace(one, bucket_mib=mib).gradients_s
        for mib in exchange.BUCKETS_MIB
    }
    assert times[found] <= 1.1 * min(times.values()), (times, optimum)


def begun(
    rate: float | None,
    *,
    p2p: bool = True,
    name: str = CARD,
    small_ms: float = 0.03,
    **other: Any,
) -> Any:
    known = {"gb_per_s": rate, "small_ms": small_ms, "time": 0.0, "p2p": p2p}
    return {
        "ranks": 2,
        "local_ranks": 2,
        "place": placement.Topology(placement.LOCAL, "", "").record(),
        "device": {"value": "cuda", "reason": ""},
        "gpus": [{"name": name, "index": n, "uuid": f"GPU-{n}"} for n in range(2)],
        "variables": [{"name": "CUDA_VISIBLE_DEVICES", "value": "1,3"}],
        **({"communication": known} if rate else {}),
        **other,
    }


def decided(sequences: int = 8, accumulation: int = 1) -> Decided:
    load = StepWorkload(
        depth=16, sequences=sequences, seq_len=1024, vocab=32768, bf16=True, compiled=True, ranks=2
    )
    load = replace(load, total_tokens=2 * sequences * 1024 * accumulation)
    return Decided(Batch(sequences, 1024, 2, accumulation), [], step=GptStep(load))


def decide(
    wish: str,
    start: Any,
    done: Decided | None = None,
    precision: str = "bf16",
    resumed: RunDir | None = None,
    place: placement.Topology | None = None,
    was: str = "none",
) -> gradients.GradientPlan:
    request = ask("configs/dual_gpu/quickstart.py", f"--gradient_compression={wish}")
    request.resume_from = resumed
    request.resumed = {"gradient_compression": (was, "")} if resumed else {}
    request.place = place or request.place
    cards = [Gpu(i, f"GPU-{i}", CARD, None, None, None, None, None) for i in range(2)]
    machine = Situation("cuda", Decision(precision, ""), Decision(True, ""), None)
    return gradients.decide(request, cards, start, done or decided(), machine)


def test_a_gpt_is_predicted() -> None:
    found = decide("none", begun(20.0)).fields["exchange"]
    shape = StepWorkload(16, 8, 1024, 32768, bf16=True, compiled=True).shape
    assert found["bytes"] == 4 * shape.weights
    flops = GptStep(decided().step.load).flops(1)  # type: ignore[union-attr]
    assert found["compute_ms"] == pytest.approx(1e3 * flops / 2 / (165.2e12 * 0.45))
    assert found["total_ms"] > 1e3 * 4 * shape.weights / 20e9
    assert found["share"] is not None and 0 < found["share"] < 0.2


@pytest.mark.parametrize(
    ("rate", "done", "value"),
    [
        (20.0, decided(), "none"),
        (1.5, decided(), "bf16"),
        (1.5, decided(accumulation=64), "none"),
        (None, decided(), "none"),
    ],
)
def test_auto_compresses_where_it_pays(rate: float | None, done: Decided, value: str) -> None:
    plan = decide("auto", begun(rate), done)
    assert plan.fields["gradient_compression"]["value"] == value
    assert len(plan.text) == 1


def test_auto_compares_each_with_its_own_buckets() -> None:
    """With a large latency, larger buckets save most of what compression would."""
    start, done = begun(7.74, small_ms=3.9), decided(16)
    plain, half = (decide(wish, start, done).fields["exchange"] for wish in ("none", "bf16"))
    assert plain["compute_ms"] is not None
    step = plain["compute_ms"] + plain["exposed_ms"]
    assert (plain["exposed_ms"] - half["exposed_ms"]) / step < exchange.PAYS
    found = decide("auto", start, done).fields
    assert found["gradient_compression"]["value"] == "none" and found["exchange"] == plain


@each("wish", ["none", "bf16", "auto"])
def test_the_memory_has_room_for_compressed_gradients(wish: str) -> None:
    request = ask("configs/dual_gpu/quickstart.py", f"--gradient_compression={wish}")
    machine = Situation("cuda", Decision("bf16", ""), Decision(True, ""), None)
    step = request.kind.decide(request, machine).step
    assert isinstance(step, GptStep) and step.load.compressed is (wish != "none")


def test_an_explicit_value_is_never_overridden() -> None:
    for wish, rate in (("bf16", 50.0), ("bf16", None), ("none", 1.0)):
        found = decide(wish, begun(rate)).fields["gradient_compression"]
        assert found["value"] == wish
    assert decide("none", begun(None)).text == []


@each("asked", [True, False])
def test_no_compression_is_the_default_or_asked_for(asked: bool) -> None:
    request = ask("configs/dual_gpu/quickstart.py", *["--gradient_compression=none"] * asked)
    machine = Situation("cuda", Decision("bf16", ""), Decision(True, ""), None)
    (text,) = gradients.decide(request, [], begun(20.0), decided(), machine).text
    assert text.endswith("compression none: as asked" if asked else "compression none: the default")


@pytest.mark.parametrize(
    "start",
    [
        begun(1.0, device={"value": "cpu", "reason": ""}) | {"communication": None},
        begun(1.0, ranks=4, place=NODE),
        begun(1.0, place=RANK),
        begun(1.0, name="NVIDIA GeForce RTX 2080"),
    ],
)
def test_auto_needs_to_know_bandwidth_and_arithmetic(start: Any) -> None:
    if start["communication"] is None:
        del start["communication"]
    plan = decide("auto", start)
    found = plan.fields["gradient_compression"]
    assert found["value"] == "none" and found["reason"] and plan.notes == []


def test_the_reason_names_what_is_unknown() -> None:
    of_a_user = Decided(Batch(8, 1024, 2, 1), [])
    unmeasured, unknown = (
        decide("auto", start, of_a_user).fields["gradient_compression"]["reason"]
        for start in (begun(None), begun(1.0))
    )
    assert "CUDA_VISIBLE_DEVICES=1,3 ./duet communication 2 --device=cuda" in unmeasured
    assert "arithmetic" in unknown


@pytest.mark.parametrize(("ranks", "rate", "size"), [(2, 20.0, 8), (2, None, 8), (4, 20.0, 25)])
def test_a_resumed_run_keeps_its_buckets_and_graphs(
    ranks: int, rate: float | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They determine the order of sums."""
    decision = {"value": 8, "reason": ""}
    before = {"ranks": ranks, "bucket_mib": decision, "blocks_per_graph": decision}
    monkeypatch.setattr(gradients.standing, "read_plan", lambda run: before)
    fields = decide("none", begun(rate), resumed=RunDir(Path("run"))).fields
    assert fields["bucket_mib"]["value"] == size
    assert fields["blocks_per_graph"]["value"] == (8 if ranks == 2 else 1)


@each(
    ("ranks", "was", "rate", "value"),
    [
        (2, "auto", 20.0, "bf16"),
        (2, "auto", None, "bf16"),
        (2, "none", 20.0, "none"),  # auto is new: it decides
        (4, "auto", 20.0, "none"),
    ],
)
def test_a_resumed_run_keeps_the_compression_that_auto_has_chosen(
    ranks: int, was: str, rate: float | None, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rounds every gradient, and the bandwidth may have been measured since."""
    before = {"ranks": ranks, "gradient_compression": {"value": "bf16", "reason": ""}}
    monkeypatch.setattr(gradients.standing, "read_plan", lambda run: before)
    found = decide("auto", begun(rate), resumed=RunDir(Path("run")), was=was).fields
    assert found["gradient_compression"]["value"] == value


@each(("precision", "tera"), [("fp16", 125), ("bf16", None)])
def test_the_arithmetic_is_that_of_the_precision(precision: str, tera: float | None) -> None:
    found = decide("none", begun(20.0, name="Tesla V100-SXM2-32GB"), precision=precision)
    flops = GptStep(decided().step.load).flops(1)  # type: ignore[union-attr]
    expected = tera and pytest.approx(1e3 * flops / 2 / (tera * 1e12 * 0.45))
    assert found.fields["exchange"]["compute_ms"] == expected


def test_fp32_has_no_listed_peak() -> None:
    plan = decide("auto", begun(1.0), precision="fp32")
    assert plan.fields["exchange"]["compute_ms"] is None
    assert plan.fields["gradient_compression"]["value"] == "none"


def test_one_rank() -> None:
    plan = decide("auto", begun(None, ranks=1, local_ranks=1))
    assert set(plan.fields) == {"gradient_compression"} and plan.text == []


def test_little_gain_is_explained_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    state = gpu_state.State(1, None, None, None, None, 4, 16, 4, 4, None, None)
    pair = Pair(0, 1, None, None, False)
    monkeypatch.setattr(gpu_state, "read_state", lambda gpus: ([state], [pair]))
    assert decide("none", begun(20.0)).notes == []
    (note,) = decide("none", begun(3.0, p2p=False)).notes
    for part in ("3 GB/s", "peer-to-peer", "GPU 1 has 4 PCIe lanes", "--gradient_compression=bf16"):
        assert part in note
    value = int(note.split("--max_total_batch_size=")[1].split()[0])  # as many times fewer steps
    assert value % decided().batch.total_tokens == 0
    after = decide("none", begun(3.0), decided(accumulation=value // 16384))
    speed = after.fields["exchange"]["speed_up"]
    assert speed is not None and speed >= exchange.LITTLE * 2 and after.notes == []
    (note,) = decide("none", begun(300.0, small_ms=20.0)).notes
    assert "GB/s" not in note and "PCIe" not in note, "the latency is the reason, not the bandwidth"
    assert "--gradient_compression" not in note, "it would save nothing"
    (note,) = decide("bf16", begun(0.5)).notes
    assert "--gradient_compression" not in note and "one GPU alone" in note


@each("fast", [0, 1])
def test_unequal_gpus_are_as_fast_as_the_slowest(fast: int) -> None:
    start = begun(10.0)
    start["gpus"][1 - fast]["name"] = "NVIDIA GeForce RTX 3090"
    plan, equal = decide("none", start), decide("none", begun(10.0, name="NVIDIA GeForce RTX 3090"))
    found, same = plan.fields["exchange"], equal.fields["exchange"]
    assert found["compute_ms"] == same["compute_ms"] and found["share"] == same["share"]
    assert found["speed_up"] is not None and same["speed_up"] is not None
    assert found["speed_up"] == pytest.approx(same["speed_up"] * 71.0 / 165.2) and not equal.notes
    (note,) = plan.notes
    card = msg(
        "plan.gradients.unequal",
        index=1 - fast,
        name="NVIDIA GeForce RTX 3090",
        part=71 / 165.2,
        other=fast,
    )
    assert card in note and "GB/s" not in note and "total_batch_size" not in note
    assert f"CUDA_VISIBLE_DEVICES=GPU-{fast} ./launch_train.sh 1 " in note


def test_the_gpu_that_another_launcher_starts_alone_has_no_command() -> None:
    start = begun(10.0)
    start["gpus"][0]["name"] = "NVIDIA GeForce RTX 3090"
    (note,) = decide("none", start, place=placement.Topology(placement.RANK, "", "")).notes
    assert msg("plan.gradients.help_one_gpu") in note and "CUDA_VISIBLE_DEVICES" not in note


def test_slow_and_unequal_gpus_have_two_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_why", lambda *facts: ["3 GB/s"])
    start = begun(3.0)
    start["gpus"][1]["name"] = "NVIDIA GeForce RTX 4090 D"
    plan = decide("none", start)
    (note,) = plan.notes
    share = plan.fields["exchange"]["share"]
    assert (
        share is not None and msg("plan.gradients.waits", share=100 * share, why="3 GB/s") in note
    )
    assert "GPU 1" in note and "--max_total_batch_size=" in note


@each(
    ("p2p", "direct", "translated", "named"),
    [
        (False, [True, True], True, True),
        (False, [True, True], False, False),
        (False, [None], True, True),  # unknown to the driver
        (False, [], True, True),
        (False, [False, True], True, True),
        (False, [False, False], True, False),  # the driver has no such copies at all
        (True, [False], True, False),
        (True, [True], True, False),
    ],
)
def test_the_iommu_is_a_reason_only_where_the_driver_has_copies(
    p2p: bool,
    direct: list[bool | None],
    translated: bool,
    named: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [Pair(0, n, None, None, one) for n, one in enumerate(direct)]
    monkeypatch.setattr(gpu_state, "read_state", lambda gpus: ([], pairs))
    iommu = "DMA-FQ" if translated else "identity"
    monkeypatch.setattr(gradients.p2p_cache, "machine", lambda: f"Linux 6, IOMMU {iommu}")
    found = gradients._why([], begun(3.0, p2p=p2p), ONE)
    assert (msg("plan.gradients.iommu") in found) == named
    assert (msg("plan.gradients.no_p2p") in found) == (not p2p or False in direct)


def test_a_speed_up_of_nearly_nothing_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_why", lambda *facts: ["-"])
    plan = decide("none", begun(0.001))
    speed = plan.fields["exchange"]["speed_up"]
    assert speed is not None and speed < gradients.LEAST_SHOWN
    below = msg("core.units.below", bound=gradients.LEAST_SHOWN)
    for text in (*plan.text[:1], *plan.notes):
        assert below in text and "0.00 ×" not in text

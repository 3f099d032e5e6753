"""Decisions about the exchange of gradients: compression, bucket size and the size of compiled
graphs, by the predicted step (training.plan.tuning), and their text in the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from training.core import standing, units
from training.core.messages import msg
from training.host import flops, p2p_cache, visible_devices
from training.host.decisions import Decision
from training.host.gpus import VISIBLE, Gpu
from training.host.placement import LOCAL, on_one_machine
from training.plan import communication, exchange, tuning
from training.plan.exchange import Exchange
from training.plan.request import Request
from training.plan.tuning import AUTO, BF16, NONE, Choice
from training.tasks.planning import Decided, Situation

if TYPE_CHECKING:
    from training.core.contracts.plan import (
        ExchangeRecord,
        GpuRecord,
        GradientFields,
        PlanStart,
    )

LEAST_SHOWN = 0.1  # of a speed-up


@dataclass(frozen=True)
class GradientPlan:
    fields: GradientFields
    text: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def decide(
    request: Request,
    gpus: Sequence[Gpu],
    begun: PlanStart,
    decided: Decided,
    situation: Situation,
) -> GradientPlan:
    """`gpus`: those of the ranks."""
    precision, compiled = situation.precision, situation.compiled
    wish = wished(request)
    if begun["ranks"] == 1:
        return GradientPlan(_fields(Decision(NONE, msg("plan.gradients.one_rank"))))
    if wish.value == AUTO == request.resumed.get("gradient_compression", ("", ""))[0]:
        wish = _kept(request, begun, "gradient_compression") or wish
    one = predicted(begun, decided, precision, compiled)
    kept = _kept(request, begun, "bucket_mib")
    blocks = decided.step.compiled_blocks if decided.step else None
    kept_graphs = _kept(request, begun, "blocks_per_graph") if blocks else None
    if one is None:
        compression = Decision(NONE, unknown(begun, precision)) if wish.value == AUTO else wish
        text = msg(
            "plan.gradients.alone",
            compression=compression.value,
            compression_reason=compression.reason,
        )
        fields = _fields(compression, kept, kept_graphs)
        return GradientPlan(
            fields, [*([] if wish.value == NONE else [text]), *_together(kept_graphs)]
        )
    choice_for = partial(tuning.choose, wish, blocks=blocks, bucket=kept, graphs=kept_graphs)
    choice = choice_for(one)
    tuned, found = choice.tuned, choice.exchange
    compression = choice.compression or Decision(NONE, unknown(begun, precision))
    fields = _fields(compression, tuned.bucket, tuned.graphs)
    fields["exchange"] = _record(found)
    text = _sentence(found, compression, tuned.bucket, _mfu(compiled))
    notes = _little_gain(request, gpus, begun, decided, situation, choice, choice_for)
    return GradientPlan(fields, [text, *_together(tuned.graphs)], notes)


def wished(request: Request) -> Decision:
    """That of --gradient_compression; `auto` is yet to be decided."""
    name = "gradient_compression"
    return Decision(request.config.gradient_compression, request.reason(name))


def _fields(
    compression: Decision, bucket: Decision | None = None, graphs: Decision | None = None
) -> GradientFields:
    fields: GradientFields = {"gradient_compression": compression.record()}
    if bucket:
        fields["bucket_mib"] = bucket.record()
    if graphs:
        fields["blocks_per_graph"] = graphs.record()
    return fields


def _together(graphs: Decision | None) -> list[str]:
    """A sentence on graphs of several blocks."""
    if graphs is None or graphs.value == 1:
        return []
    return [msg("plan.gradients.graphs", count=graphs.value, reason=graphs.reason)]


def _kept(
    request: Request,
    begun: PlanStart,
    name: Literal["gradient_compression", "bucket_mib", "blocks_per_graph"],
) -> Decision | None:
    """That of the run to resume: compression rounds gradients, buckets determine the order in which
    more than two ranks add them, and another graph may round differently. None for a new run, an
    undecided one, and another number of ranks."""
    before = standing.read_plan(request.resume_from) if request.resume_from else None
    if before is None or before.get("ranks") != begun["ranks"] or name not in before:
        return None
    assert request.resume_from
    origin = msg("plan.resume.origin", name=request.resume_from.name)
    return Decision(before[name]["value"], origin)


def predicted(
    begun: PlanStart, decided: Decided, precision: Decision, compiled: Decision
) -> Exchange | None:
    """The uncompressed exchange of a step. None if the bandwidth between the ranks or the size of
    the gradients is unknown."""
    step = decided.step
    if not on_one_machine(begun["place"]) or "communication" not in begun or step is None:
        return None
    if not step.gradient_bytes:
        return None
    peaks = _peaks([gpu["name"] for gpu in begun["gpus"]], precision.value)
    work = step.flops(1)
    compute = work / begun["ranks"] / (min(peaks) * _mfu(compiled)) if peaks and work else None
    measured = begun["communication"]
    return Exchange(
        ranks=begun["ranks"],
        gradient_bytes=step.gradient_bytes,
        update_bytes=step.update_bytes,
        bytes_per_s=measured["gb_per_s"] * 1e9,
        latency_s=measured["small_ms"] / 1e3,
        compute_s=compute,
        fastest=max(peaks) / min(peaks) if peaks else 1.0,
        accumulation=decided.batch.accumulation,
    )


def _peaks(names: Sequence[str], precision: str) -> list[float]:
    """Operations per s of these GPUs; [] if one is unknown, as for fp8, whose products are faster
    than their peak in bf16."""
    if precision == "fp8":
        return []
    known = [peak for name in names if (peak := flops.peak(name, precision))]
    return known if len(known) == len(names) else []


def _mfu(compiled: Decision) -> float:
    return exchange.MFU_COMPILED if compiled.value else exchange.MFU_EAGER


def unknown(begun: PlanStart, precision: Decision) -> str:
    """Why the duration of a step cannot be predicted."""
    if begun["device"]["value"] != "cuda":
        return msg("plan.gradients.cpu")
    if not on_one_machine(begun["place"]):
        return msg("plan.gradients.machines")
    if "communication" not in begun:
        return msg("plan.gradients.unmeasured", command=communication.command_for(begun))
    name = begun["gpus"][0]["name"]
    return msg("plan.gradients.arithmetic", name=name, precision=precision.value)


def _record(one: Exchange) -> ExchangeRecord:
    return {
        "bytes": one.gradient_bytes,
        "total_ms": one.total_s * 1e3,
        "exposed_ms": one.exposed_s * 1e3,
        "compute_ms": None if one.compute_s is None else one.compute_s * 1e3,
        "share": one.share,
        "speed_up": one.speed_up,
    }


def _sentence(one: Exchange, compression: Decision, bucket: Decision, mfu: float) -> str:
    if one.compute_s is None or one.share is None:
        return msg(
            "plan.gradients.unpredicted",
            size=units.size(one.sent_bytes),
            total=one.total_s * 1e3,
            rate=one.bytes_per_s / 1e9,
            bucket=bucket.value,
            bucket_reason=bucket.reason,
            compression=compression.value,
            compression_reason=compression.reason,
        )
    return msg(
        "plan.gradients.predicted",
        size=units.size(one.sent_bytes),
        total=one.total_s * 1e3,
        rate=one.bytes_per_s / 1e9,
        exposed=one.exposed_s * 1e3,
        share=100 * one.share,
        speed=times(one.speed_up),
        ranks=one.ranks,
        compute=one.compute_s * 1e3,
        mfu=100 * mfu,
        bucket=bucket.value,
        bucket_reason=bucket.reason,
        compression=compression.value,
        compression_reason=compression.reason,
    )


def times(speed: float | None) -> str:
    """A predicted speed-up as text; small ones as a bound, since they would round to nothing."""
    if speed is not None and speed < LEAST_SHOWN:
        return units.below(str(LEAST_SHOWN))
    return "-" if speed is None else f"{speed:.2f}"


def _little_gain(
    request: Request,
    gpus: Sequence[Gpu],
    begun: PlanStart,
    decided: Decided,
    situation: Situation,
    choice: Choice,
    choice_for: Callable[[Exchange], Choice],
) -> list[str]:
    """A note where communication or a slower GPU takes most of what the further GPUs bring: why,
    and what helps."""
    one, half = choice.exchange, choice.half
    if one.share is None or one.speed_up is None or one.speed_up >= exchange.LITTLE * one.ranks:
        return []
    reasons, helps, precision = [], [], situation.precision.value
    if not one.waits_little:
        why = msg("plan.word.comma").join(_why(gpus, begun, one))
        reasons.append(msg("plan.gradients.waits", share=100 * one.share, why=why))
    slowest, fastest = (
        end(begun["gpus"], key=lambda gpu: flops.peak(gpu["name"], precision) or 0.0)
        for end in (min, max)
    )
    if one.fastest > 1:
        reasons.append(
            msg(
                "plan.gradients.unequal",
                index=slowest["index"],
                name=slowest["name"],
                part=1 / one.fastest,
                other=fastest["index"],
            )
        )
    enough = None if one.waits_little else tuning.enough_accumulation(one, choice_for)
    if enough:
        factor, then = enough
        total = decided.batch.total_tokens * factor
        # the plan then divides the number of steps: the amount of data stays
        fewer = request.config.num_iterations and not standing.plan_of_start(request.resume_from)
        if _fits(request, situation, total_batch_size=total):
            helps.append(
                msg(
                    "plan.gradients.help_more",
                    name="max_total_batch_size" if fewer else "total_batch_size",
                    value=total,
                    factor=factor,
                    speed=times(then.speed_up),
                )
            )
    pays = not one.compressed and (exchange.saved(one, half) or 0.0) >= exchange.PAYS
    if pays and _fits(request, situation, gradient_compression=BF16):
        helps.append(msg("plan.gradients.help_compression", speed=times(half.speed_up)))
    if one.speed_up <= 1 and _fits(request, situation, ranks=1):
        unequal = one.fastest > 1
        alone = _fastest_alone(request, fastest) if unequal else msg("plan.gradients.help_one_gpu")
        helps.append(alone)
    text = msg(
        "plan.gradients.little_gain",
        speed=times(one.speed_up),
        ranks=one.ranks,
        reasons=msg("plan.word.semicolon").join(reasons),
    )
    if helps:
        text = msg("plan.gradients.with_helps", text=text, helps=msg("plan.word.comma").join(helps))
    return [text]


def _fits(request: Request, situation: Situation, ranks: int = 0, **changes: int | str) -> bool:
    """Whether the run with these values fits: each holds gradients twice, and one rank has the
    whole state of the optimizer. `ranks`: 0 for those of the request."""
    if situation.room is None:
        return True
    other = replace(request, config=replace(request.config, **changes))  # type: ignore[arg-type]
    if ranks:
        other.ranks = other.local_ranks = other.gpu_ranks = ranks
    return request.kind.decide(other, situation).fits(situation.room)


def _fastest_alone(request: Request, fastest: GpuRecord) -> str:
    if request.place.kind != LOCAL:
        return msg("plan.gradients.help_one_gpu")
    (named,) = visible_devices.naming([(fastest["uuid"], fastest["index"])])
    command = f"{VISIBLE}={named} {request.command_with(1)}"
    return msg("plan.gradients.help_fastest", index=fastest["index"], command=command)


def _why(gpus: Sequence[Gpu], begun: PlanStart, one: Exchange) -> list[str]:
    """The latency, or what limits the bandwidth as far as the driver and the kernel report it."""
    if one.small:
        return [msg("plan.gradients.latency", latency=one.latencies_s * 1e3)]
    # slow driver queries, for this case only
    from training.plan.preflight import gpu_health, gpu_state

    measured = begun["communication"]
    states, pairs = gpu_state.read_state(gpus)
    refused = [p for p in pairs if p.direct is False]  # by the driver, whatever the IOMMU does
    no_copies = refused or not measured["p2p"]
    broken = not measured["p2p"] and (not pairs or len(refused) < len(pairs))
    found = [msg("plan.gradients.bandwidth", rate=measured["gb_per_s"])]
    found += [msg("plan.gradients.no_p2p")] if no_copies else []
    translated = "DMA" in p2p_cache.machine()
    found += [msg("plan.gradients.iommu")] if broken and translated else []
    found += [
        msg("plan.gradients.lanes", index=s.index, lanes=s.link_width)
        for s in states
        if s.link_width is not None and s.link_width < gpu_health.FEW_LANES
    ]
    return found

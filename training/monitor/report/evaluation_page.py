"""Page of ./duet evaluate: scores of trained models on the same data, their course over the steps
of a run, clips with pictures, passages of text."""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import training
from training.core import metric_units, units
from training.core.messages import msg
from training.core.units import count, plural
from training.monitor.report import chart_types, charts
from training.monitor.report.chart_types import DOTS, LINE, Chart, Series
from training.monitor.report.curve import PointPosition, not_finite_name, score_text
from training.monitor.report.html import Html, join, table, tag
from training.monitor.report.page import ReportPage, folded, tiles
from training.tasks import weights
from training.tasks.evaluation import SIZES, Evaluation, Kind, Part, Picture

MODELS = 4  # whose pictures are shown
LETTER, ROOM = 7, 260  # width of a letter and of the longest name of a bar, pixels
CLIPS = 30  # rows of the table that is not folded


def page(found: Sequence[Evaluation], data: str, device: str, when: float) -> ReportPage:
    """`found`: at least one; `data`: its name; `when`: Unix time."""
    labels = _labels(found)
    facts = [data, device, units.clock(when, "%Y-%m-%d %H:%M"), f"Duet {training.__version__}"]
    title = (
        msg("monitor.report.evaluation.one", title=labels[0])
        if len(found) == 1
        else msg("monitor.report.evaluation.several", models=plural(len(found), "model"))
    )
    head = [tag("h1", title), tag("p", " · ".join(filter(None, facts)), class_="sub")]
    out = ReportPage(title, join([*head, _tiles(found[0]) if len(found) == 1 else None]))
    out.counted, out.timed = None, False
    if len(found) > 1:
        drawn = out.figures(_charts(found, labels))
        curves = any(len(each) > 1 for each in _runs(found).values())
        below = None if curves else drawn
        out.add("scores", msg("monitor.report.evaluation.scores"), _scores(found, labels), below)
        out.add("curves", msg("monitor.report.title.curves"), drawn if curves else None)
    best = found[_best(found)]
    if any(part.text for part in best.parts):
        name = labels[_best(found)] if len(found) > 1 else ""
        out.add("passages", msg("monitor.report.evaluation.passages"), _passages(best, name))
    if any(not part.text for one in found for part in one.parts):
        out.add("clips", msg("monitor.report.evaluation.clips"), _clips(found, labels))
    if clips := pictured(found):
        out.add("pictures", msg("monitor.report.evaluation.pictures"), _pictures(clips, found))
    return out


def pictured(found: Sequence[Evaluation]) -> list[Evaluation]:
    """The models whose pictures are shown: the best one and the last others, in their order."""
    some = [i for i, one in enumerate(found) if any(part.pictures for part in one.parts)]
    others = [i for i in some if i != _best(found)]
    return [found[i] for i in some if i not in others[: 1 - MODELS]]


def _labels(found: Sequence[Evaluation]) -> list[str]:
    """'RUN, step 200', with the names of the runs that are different."""
    names = {one.folder: name for name, each in _runs(found).items() for one in each}
    return [weights.title(names[one.folder], one.step, one.weights) for one in found]


def _runs(found: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """The evaluations of each run, by step. A run has the name of its folder's path if another one
    has the same name."""
    folders = {one.folder: one.run for one in found}
    names = list(folders.values())
    runs: dict[str, list[Evaluation]] = {}
    for one in found:
        name = one.folder if names.count(one.run) > 1 else one.run
        runs.setdefault(name, []).append(one)
    return {name: sorted(each, key=lambda one: one.step) for name, each in runs.items()}


def _colour(found: Sequence[Evaluation], one: Evaluation) -> int:
    return list(dict.fromkeys(other.folder for other in found)).index(one.folder) + 1


def score_name(key: str) -> str:
    """The name of a score for people."""
    names = {
        "loss": msg("monitor.report.evaluation.loss"),
        "bpb": msg("monitor.report.evaluation.bpb"),
        "perplexity": msg("monitor.report.evaluation.perplexity"),
        "tokens": msg("monitor.report.evaluation.tokens"),
        "bytes": msg("monitor.report.evaluation.bytes"),
        "psnr": "PSNR",
        "ssim": "SSIM",
        "psnr_input": msg("monitor.report.evaluation.psnr_input"),
    }
    return names.get(key, key.replace("_", " "))


def _unit(key: str, keys: Collection[str]) -> str:
    """A loss is in nats per token only where bits per byte are known too; others are of user
    tasks."""
    if key == "loss":
        return metric_units.NATS if "bpb" in keys else ""
    return "" if key == "bpb" else metric_units.score_unit(key) or ""


def _keys(found: Sequence[Evaluation]) -> list[str]:
    return list(dict.fromkeys(key for one in found for key in one.scores))


def _ranked(found: Sequence[Evaluation]) -> list[str]:
    """The scores in which models can be better than others."""
    keys = _keys(found)
    return [k for k in keys if k not in SIZES and not metric_units.of_the_input(k, keys)]


def _first(found: Sequence[Evaluation]) -> str:
    """The score that models are compared by: bits per byte, or the first one."""
    ranked = _ranked(found)
    return "bpb" if "bpb" in ranked else next(iter(ranked), "")


def _best(found: Sequence[Evaluation]) -> int:
    """The index of the best model."""
    key = _first(found)
    sign = -1.0 if metric_units.higher_is_better(key) else 1.0
    values = [sign * one.scores.get(key, math.nan) for one in found]
    known = [(value, i) for i, value in enumerate(values) if math.isfinite(value)]
    return min(known)[1] if known else 0


def _shown(key: str, value: float | None) -> str:
    if key in SIZES:
        return count(value)
    return score_text(value, ".2f" if metric_units.score_unit(key) == "dB" else "")


def _tiles(one: Evaluation) -> Html:
    return tiles(
        [
            (score_name(key), _shown(key, value), _unit(key, one.scores))
            for key, value in one.scores.items()
        ][:6]
    )


def _scores(found: Sequence[Evaluation], labels: Sequence[str]) -> Html:
    """The best value of each score is marked, unless all are equal, or per token of different
    tokenizers."""
    keys, ranked = _keys(found), _ranked(found)
    head: list[object] = [msg("monitor.report.evaluation.model")]
    head += [{"": _titled(key, keys), "class_": "n"} for key in keys]
    best: dict[str, float] = {}
    alike = len({_density(one) for one in found}) == 1
    for key in ranked:
        if metric_units.is_per_token(key) and not alike:
            continue
        values = {v for one in found if math.isfinite(v := one.scores.get(key, math.nan))}
        if len(values) > 1:
            best[key] = (max if metric_units.higher_is_better(key) else min)(values)
    rows = []
    for one, label in zip(found, labels, strict=True):
        mark = tag("i", class_="key", style=f"background:{chart_types.swatch(_colour(found, one))}")
        row: list[object] = [join([mark, label])]
        for key in keys:
            value = one.scores.get(key)
            marked = value is not None and value == best.get(key)
            row.append({"": _shown(key, value), "class_": "n best" if marked else "n"})
        rows.append(row)
    return table(head, rows)


def _density(one: Evaluation) -> float | None:
    """Bytes per token: of the tokenizer, since all models are measured on the same data."""
    size, tokens = one.scores.get("bytes"), one.scores.get("tokens")
    return size / tokens if size and tokens else None


def _titled(key: str, keys: Collection[str]) -> str:
    unit = _unit(key, keys)
    return f"{score_name(key)}, {unit}" if unit else score_name(key)


def _charts(found: Sequence[Evaluation], labels: Sequence[str]) -> list[Chart | None]:
    """Curves over the steps where a run has several checkpoints, else bars."""
    runs, keys = _runs(found), _ranked(found)
    keys = [key for key in keys if not (key in ("loss", "perplexity") and "bpb" in keys)]
    if all(len(each) == 1 for each in runs.values()):
        return [_bars(key, found, labels) for key in keys]
    out = []
    for i, key in enumerate(keys):
        series = [
            Series(name, n, DOTS, _points(each, key), _marks(each, key))
            for n, (name, each) in enumerate(runs.items(), 1)
        ]
        given = next((p for each in runs.values() if (p := _points(each, f"{key}_input"))), [])
        if len(given) > 1:
            series.append(Series(msg("monitor.report.evaluation.input"), 0, LINE, given))
        unit = _unit(key, keys)
        wide = i == 0 or len(keys) == 2
        out.append(charts.lines(key, score_name(key), series, unit=unit, wide=wide))
    return out


def _points(each: Sequence[Evaluation], key: str) -> list[tuple[PointPosition, float]]:
    values = [(one.step, one.scores.get(key, math.nan)) for one in each]
    return [(PointPosition(step, 0.0, None), v) for step, v in values if math.isfinite(v)]


def _marks(each: Sequence[Evaluation], key: str) -> list[tuple[PointPosition, str]]:
    values = [(one.step, one.scores.get(key, 0.0)) for one in each]
    return [
        (PointPosition(step, 0.0, None), not_finite_name(v))
        for step, v in values
        if not math.isfinite(v)
    ]


def _bars(key: str, found: Sequence[Evaluation], labels: Sequence[str]) -> Chart | None:
    rows = [
        (label, label, value)
        for one, label in zip(found, labels, strict=True)
        if math.isfinite(value := one.scores.get(key, math.nan))
    ]
    if not rows:
        return None
    parts = [label for label, _, _ in rows]
    unit = _unit(key, found[0].scores)
    chart = charts.stacked(key, score_name(key), rows, parts, unit=unit, note="")
    room = LETTER * max(map(len, parts))
    chart.spec["encoding"]["y"]["axis"] |= {"minExtent": min(room, ROOM), "labelLimit": ROOM}
    return replace(chart, named=False)


def _passages(one: Evaluation, name: str) -> Html:
    half = (len(one.parts) + 1) // 2
    groups = (
        (msg("monitor.report.evaluation.highest"), one.parts[:half]),
        (msg("monitor.report.evaluation.lowest"), one.parts[half:][::-1]),
    )
    shown = [
        join([tag("h3", title), *(_passage(part) for part in parts)])
        for title, parts in groups
        if parts
    ]
    hint = msg("monitor.report.evaluation.passage_hint")
    return join([tag("p", f"{name}. {hint}" if name else hint, class_="sub"), *shown])


def _passage(part: Part) -> Html:
    bits = f"{score_text(part.scores['bpb'])} {metric_units.BITS}"
    text = tag("pre", part.text, class_="sample")
    return tag("div", tag("p", f"{bits} · {part.name}", class_="sub"), text, class_="passage")


def _clips(found: Sequence[Evaluation], labels: Sequence[str]) -> Html:
    """A row for each clip: the scores of a single model, or the first score of several."""
    names = list(dict.fromkeys(part.name for one in found for part in one.parts))
    known = [{part.name: part.scores for part in one.parts} for one in found]
    if len(found) == 1:
        keys = _keys(found)
        head = [_titled(key, keys) for key in keys]
        values = [[known[0][name].get(key) for key in keys] for name in names]
    else:
        keys = [_first(found)] * len(found)
        base = f"{keys[0]}_input"
        of_input = [next((k[n][base] for k in known if base in k.get(n, {})), None) for n in names]
        head = [_titled(base, keys), *labels]
        values = [
            [given, *(each.get(name, {}).get(keys[0]) for each in known)]
            for name, given in zip(names, of_input, strict=True)
        ]
        keys = [base, *keys]
        if all(given is None for given in of_input):
            head, keys, values = head[1:], keys[1:], [row[1:] for row in values]
    rows: list[list[object]] = [
        [name, *({"": _shown(k, v), "class_": "n"} for k, v in zip(keys, row, strict=True))]
        for name, row in zip(names, values, strict=True)
    ]
    first = msg("monitor.report.evaluation.clip")
    shown = table([first, *({"": one, "class_": "n"} for one in head)], rows)
    note = tag("p", _titled(_first(found), _keys(found)), class_="sub") if len(found) > 1 else None
    if len(rows) > CLIPS:
        shown = folded(plural(len(rows), "clip"), shown)
    return join([note, shown])


def _pictures(shown: Sequence[Evaluation], found: Sequence[Evaluation]) -> Html:
    """Input, restored by each model, target of each clip that has pictures."""
    labels = dict(zip(map(id, found), _labels(found), strict=True))
    out = []
    for name in dict.fromkeys(part.name for one in shown for part in one.parts if part.pictures):
        each = [(one, part) for one in shown for part in one.parts if part.name == name]
        figures = [_figure(_of(each[0][1], "input"), msg("monitor.report.evaluation.input"))]
        for one, part in each:
            word = labels[id(one)] if len(found) > 1 else msg("monitor.report.evaluation.output")
            figures.append(_figure(_of(part, "output"), word))
        figures.append(_figure(_of(each[0][1], "target"), msg("monitor.report.evaluation.target")))
        out += [tag("h3", name), tag("div", *figures, class_="pictures clips")]
    hint = msg("monitor.report.evaluation.picture_hint")
    return join([tag("p", hint, class_="sub"), *out])


def _of(part: Part, kind: Kind) -> Picture | None:
    return next((one for one in part.pictures if one.kind == kind), None)


def _figure(picture: Picture | None, word: str) -> Html | None:
    if picture is None:
        return None
    text = word if picture.psnr is None else f"{word}: {score_text(picture.psnr, '.2f')} dB"
    address = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"
    return tag("figure", tag("img", src=address, alt=text), tag("figcaption", text))

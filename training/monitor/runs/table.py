"""The table of runs as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from training.core import metric_units, units
from training.core.cells import cells, pad
from training.core.messages import msg
from training.monitor import run_settings, term_text
from training.monitor.runs import facts
from training.monitor.runs.facts import RunFacts
from training.monitor.term_text import Line

# Fields that name a run rather than describe it.
NAMING = {
    "run_name",
    "out_dir",
    "log_dir",
    "resume",
    "master_addr",
    "master_port",
    "notify",
    "args_file",
    "config",
}
SHORTEST_NAME, LONGEST_NAME = 12, 40
BADGES = {
    "running": "good",
    "starting": "info",
    "finished": "",
    "stopped": "warn",
    "failed": "bad",
    "died": "bad",
    "damaged": "warn",
    "empty": "dim",
    "foreign": "dim",
}


def differences(runs: Sequence[RunFacts]) -> list[str]:
    """Fields of the configuration that differ among the runs: those with the most values first,
    since a row may be cut, else in the order of the first plan that has them."""
    planned = [run.config for run in runs if run.config]
    names = dict.fromkeys(name for config in planned for name in config if name not in NAMING)
    found = [name for name in names if run_settings.differ(name, planned)]
    return sorted(found, key=lambda name: -len({str(config.get(name)) for config in planned}))


def shown(value: object) -> str:
    """A value as it is typed; floats without rounding errors."""
    return (
        "-"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else f"{value:.6g}"
        if isinstance(value, float)
        else str(value)
    )


def age(seconds: float | None) -> str:
    """The largest unit only: '12 s', '5 m', '3 h', '9 d'."""
    if seconds is None:
        return "-"
    for unit, one in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= one:
            return f"{seconds // one:.0f} {unit}"
    return f"{seconds:.0f} s"


def lines(runs: Sequence[RunFacts], width: int | None) -> list[Line]:
    """A row for each run, below a heading. `width`: cells of the terminal; None: nothing is cut
    (for a pipe). Differences that do not fit beside a row are below it."""
    differ = differences(runs)
    rows = [_cells(run) for run in runs]
    titles = [
        msg("monitor.column.run"),
        msg("monitor.column.state"),
        msg("monitor.column.step"),
        loss_title(run.loss_name for run in runs),
        msg("monitor.column.speed"),
        msg("monitor.column.age"),
        msg("monitor.column.time"),
        msg("monitor.column.size"),
    ]
    widths = [max(map(cells, column)) for column in zip(titles, *rows, strict=True)]
    if width is not None:
        others = sum(widths[1:]) + len(widths) - 1
        widths[0] = min(widths[0], LONGEST_NAME, max(SHORTEST_NAME, width - others))
    texts = [_differences(run, differ) for run in runs]
    used = sum(widths) + len(widths) - 1
    longest = max(map(cells, texts), default=0)
    beside = width is None or used + 2 + longest <= width
    title = _row(titles, widths)
    out: list[Line] = [[(title.rstrip() if not beside or not differ else title, "dim")]]
    if beside and differ:
        out[0].append((f"  {msg('monitor.column.differences')}", "dim"))
    for run, row, text in zip(runs, rows, texts, strict=True):
        name = pad(term_text.cut_middle(row[0], widths[0]), widths[0])
        line: Line = [
            (f"{name} ", ""),
            (f"{pad(row[1], widths[1])} ", BADGES[run.state]),
            (_row(row[2:], widths[2:], first_left=False), ""),
        ]
        if text and beside:
            line.append((f"  {text}", "dim"))
        out.append(line)
        if text and not beside:
            assert width is not None
            out.append([("  " + term_text.cut(text, width - 2), "dim")])
    return out


def scores(names: Iterable[str | None]) -> list[str]:
    """The evaluations that are not a loss, such as an accuracy, as they are shown."""
    return _shown_names(n for n in names if n and metric_units.higher_is_better(n))


def _shown_names(names: Iterable[str]) -> list[str]:
    shown = (name.removeprefix(metric_units.EVALUATION) for name in dict.fromkeys(names))
    return list(map(term_text.clean, shown))


def loss_title(names: Iterable[str | None]) -> str:
    """Title of a column with the best evaluations of these names, or training losses."""
    return msg("monitor.column.evaluation") if scores(names) else msg("monitor.column.loss")


def footer(runs: Sequence[RunFacts], there: int) -> str:
    """How many runs, their size, what the evaluations are, and what the star means."""
    size = units.size(sum(run.bytes for run in runs))
    words = msg("monitor.runs.total", runs=units.plural(len(runs), "run"), size=size)
    if there > len(runs):
        words += msg("monitor.runs.of", count=there)
    names = dict.fromkeys(run.loss_name for run in runs if run.loss_name)
    words += _evaluations(names)
    if "loss" in names:
        words += msg("monitor.runs.star")
    return words


def _evaluations(names: Collection[str]) -> str:
    """The evaluations in the column, if one of them is not a loss; a training loss is starred."""
    highest = scores(names)
    losses = [n for n in names if n != "loss" and not metric_units.higher_is_better(n)]
    if not highest:
        return ""
    if not losses:
        return msg("monitor.runs.scores", scores=", ".join(highest))
    return msg(
        "monitor.runs.scores_mixed",
        highest=", ".join(highest),
        lowest=", ".join(_shown_names(losses)),
    )


def _cells(run: RunFacts) -> list[str]:
    star = "*" if run.loss_name == "loss" else " "
    return [
        term_text.clean(run.name),
        facts.word(run.state),
        "-" if run.step is None else f"{run.step:,}",
        f"{units.decimal(run.loss)}{star}",
        units.count(run.speed),
        age(run.age_s),
        units.duration(run.seconds) if run.config or run.task else "-",
        units.size(run.bytes) if run.bytes >= 1000 else "0",
    ]


def _differences(run: RunFacts, names: Sequence[str]) -> str:
    if not run.config:
        return term_text.clean(run.reason or "")
    return term_text.clean(
        " ".join(
            f"{name}={shown(value)}"
            for name in names
            if (value := run.config.get(name, "")) != ""  # such as `inject`: not set
        )
    )


def _row(texts: Sequence[str], widths: Sequence[int], *, first_left: bool = True) -> str:
    """Names and states at the left, numbers at the right."""
    return " ".join(
        pad(text, width, right=not first_left or at > 1)
        for at, (text, width) in enumerate(zip(texts, widths, strict=True))
    )

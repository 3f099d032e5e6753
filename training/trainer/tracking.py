"""TensorBoard and W&B as receivers of rank 0's records; tracker_threads calls them."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from training.config import flags
from training.config.schema import Config
from training.core import log, redact, rundir
from training.core.errors import Exit
from training.core.jsonl import Record, parse, whole
from training.core.messages import msg
from training.core.metric_units import EVALUATION

if TYPE_CHECKING:
    from training.core.contracts.metrics import Figures

# begin of a record: a long run has too many to parse all of them at its start
STEP = re.compile(rb'\{"time": [\d.]+, "step": (\d+)')
# in wandb.json: the folder of the run and, until everything is sent or in an offline part, the
# first step that W&B may lack
FOLDER, LACKS_FROM = "folder", "lacks_from"
PRIVATE = ("notify",)  # not for W&B
WANDB_INIT_S = 10.0  # unless set by WANDB_INIT_TIMEOUT


@dataclass(frozen=True)
class End:
    """End of this start of the training, with the content of summary.json."""

    code: int
    summary: Figures = field(default_factory=dict)


class Tracker(Protocol):
    def write(self, record: Figures) -> None: ...
    def note(self, text: str, step: int) -> None: ...  # an event: a restart
    def flush(self) -> None: ...  # what was written survives a kill of this process
    def close(self, end: End) -> None: ...


def figures(record: Figures) -> Iterator[tuple[str, float]]:
    """Every number of a record with a unique name; lists have one number per rank:
    compute_ms/rank0."""
    for name, value in record.items():
        if isinstance(value, list):
            yield from figures({f"{name}/rank{rank}": one for rank, one in enumerate(value)})
        elif isinstance(value, (int, float)) and name not in ("step", "time"):
            yield name, value


def of_evaluation(record: Figures) -> bool:
    return any(name.startswith(EVALUATION) for name in record)


class TensorBoard:
    """experiments/<run>/tb_logger/: one scalar per number. `first`: the first step of this start;
    later steps of an earlier start are hidden."""

    def __init__(self, run: rundir.RunDir, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        again = first > 1 or any(run.tensorboard.glob("events*"))
        self.writer: Any = SummaryWriter(str(run.tensorboard), purge_step=first if again else None)  # type: ignore[no-untyped-call]

    def write(self, record: Figures) -> None:
        group = "eval" if of_evaluation(record) else "train"
        for name, value in figures(record):
            self.writer.add_scalar(f"{group}/{name}", value, record["step"])

    def note(self, text: str, step: int) -> None:
        self.writer.add_text("event", text, step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self, end: End) -> None:
        step = int(end.summary.get("steps", 0))
        for name, value in figures(end.summary):
            self.writer.add_scalar(f"summary/{name}", value, step)
        self.writer.close()


class WandB:
    """W&B, online or offline; without login or network it falls back to offline, with one warning.
    All starts of a run have the same W&B id. `first`: the first step of this start; `earlier`:
    bytes of metrics.jsonl that are older. W&B's service sends every 15 s and dies with this
    process: what is not sent by then, the next start sends from there."""

    def __init__(
        self,
        run: rundir.RunDir,
        config: Config,
        mode: str,
        values: Mapping[str, Any],
        key: str | None = None,
        first: int = 1,
        earlier: int = 0,
    ) -> None:
        name, number = config.wandb_run or run.name, _wandb_id(run)
        known = rundir.read_json(run.wandb_id) or {}
        self._file, self._own = run.wandb_id, {"id": number, FOLDER: str(run.path)}
        lacks = min(whole(known.get(LACKS_FROM)) or first, first)
        self._keep(lacks)  # before a slow import
        sys.argv[1:] = _public_words(sys.argv[1:])  # W&B records them, and nothing else reads them
        import wandb

        self.wandb = wandb

        def begin(mode: Any) -> Any:
            more: dict[str, Any] = (
                {} if os.environ.get("WANDB_INIT_TIMEOUT") else {"init_timeout": WANDB_INIT_S}
            )
            # not by the environment, which all later child processes would inherit
            if key:
                more["api_key"] = key
            settings = wandb.Settings(console="off", silent=True, **more)
            return wandb.init(
                project=config.wandb_project,
                name=name,
                id=number,
                resume="allow",
                dir=str(run.path),
                config=public(values),
                mode=mode,
                settings=settings,
            )

        try:
            self.run = begin(mode)
        except wandb.errors.Error as error:
            log.warning(
                msg(
                    "trainer.tracker.offline",
                    error=str(error).splitlines()[0],
                    folder=shlex.quote(str(run.wandb)),
                )
            )
            wandb.teardown()  # otherwise its service considers the id in use
            self.run = begin("offline")
        # W&B's step counter cannot decrease, as it would in a run that restarts from a checkpoint.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        if self.run.resumed:
            sent = whole(self.run.summary.get("step")) or 0
            # after a kill, the evaluation of that step may be missing
            lacks = min(sent if lacks <= sent else sent + 1, first)
        if lacks < first:
            for record in _recorded(run.metrics, earlier, range(lacks, first)):
                self.write(record)
        self._keep(None if self.run.offline else lacks)

    def write(self, record: Figures) -> None:
        self.run.log({**dict(figures(record)), "step": record["step"]})

    def note(self, text: str, step: int) -> None:
        self.run.log({"event": text, "step": step})

    def flush(self) -> None:
        """Impossible: the next start sends what is missing."""

    def _keep(self, lacks: int | None) -> None:
        mark = {} if lacks is None else {LACKS_FROM: lacks}
        rundir.keep_json(self._file, {**self._own, **mark})

    def close(self, end: End) -> None:
        self.run.summary.update(
            {name: value for name, value in end.summary.items() if value is not None}
        )
        if end.code == Exit.PREEMPTED:
            self.run.mark_preempting()  # so that W&B does not mark it as failed
        self.run.finish(exit_code=0 if end.code == Exit.INTERRUPTED else end.code)
        self._keep(None)
        # end its service: a failing rank exits without Python's clean-up
        self.wandb.teardown()


def public(values: Mapping[str, Any]) -> Figures:
    """The configuration without secrets and private values."""
    shown = {name: value for name, value in values.items() if name not in PRIVATE}
    return {
        name: redact.shown(name, value) if isinstance(value, str) else value
        for name, value in shown.items()
    }


def _public_words(argv: list[str]) -> list[str]:
    """As `public`, of the command line."""
    kept = list(argv)
    for name, start, stop in reversed(flags.parse(argv).places):
        if name in PRIVATE:
            del kept[start:stop]
    return redact.words(kept)


def _wandb_id(run: rundir.RunDir) -> str:
    known = rundir.read_json(run.wandb_id) or {}
    number = known.get("id")
    if isinstance(number, str) and number.isalnum() and not _is_copy(known, run):
        return number
    made = secrets.token_hex(4)
    rundir.write_json(run.wandb_id, {"id": made, FOLDER: str(run.path)})
    return made


def _is_copy(known: Record, run: rundir.RunDir) -> bool:
    """Whether the run was copied, not moved: the folder of its W&B run still has it."""
    folder = known.get(FOLDER)
    if not isinstance(folder, str):
        return False
    there = rundir.read_json(rundir.RunDir(folder).wandb_id) or {}
    with suppress(OSError):  # the same folder by another path
        return there.get("id") == known["id"] and not run.path.samefile(folder)
    return False


def _recorded(metrics: Path, size: int, steps: range) -> list[Figures]:
    """The steps and evaluations in the first `size` bytes; of a repeated one the last record."""
    found: dict[tuple[int, bool], Figures] = {}
    try:
        with metrics.open("rb") as file:
            while size > 0 and (line := file.readline(size)):
                size -= len(line)
                known = STEP.match(line)
                if known and int(known[1]) not in steps:
                    continue
                record = parse(line)
                if record and whole(record.get("step")) in steps:
                    found[record["step"], of_evaluation(record)] = record
    except OSError:
        return []
    return [record for _, record in sorted(found.items(), key=itemgetter(0))]

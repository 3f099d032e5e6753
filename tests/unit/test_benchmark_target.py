"""Comparison of times to a loss: which trainings it needs, what it keeps, its table."""

from __future__ import annotations

import functools
import json
import math
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks.flags import NANOCHAT_DIR
from benchmarks.target import __main__ as command
from benchmarks.target import plan, runs, table, turns
from benchmarks.target.plan import CPU, CUDA, DUET, SOURCES, Losses, Plan, Training
from tests.cases import each
from training.core.project import ROOT
from training.tasks.gpt import evaluated
from training.tasks.gpt.task import LanguageModel

PLAN = Plan("gpt2", "fp32", [300, 1000], [1, 2], 4.0, [0.5, 0.6, 0.7, 0.8, 1.0], 0.7)


def loss(training: Training, best: float = 16.0, enough: float = 0.6) -> float:
    """The baseline ends at 2.0 with the best rate; Duet does after `enough` of its steps."""
    if training.contender != DUET:
        return 2.0 + abs(training.rate / best - 1)
    length = 300 if training.steps <= 300 else 1000
    return 2.0 if training.steps >= enough * length else 2.5


def played(chosen: Plan, at_a_time: int = 1, **facts: float) -> tuple[Losses, list[Training]]:
    """Executes the plan; the trainings in their order."""
    losses: dict[Training, float] = {}
    order: list[Training] = []
    while waiting := plan.wanted(chosen, losses):
        for training in waiting[:at_a_time]:
            losses[training] = loss(training, **facts)
            order.append(training)
    return losses, order


def test_the_rate_is_tuned_until_both_neighbors_are_worse() -> None:
    losses, order = played(PLAN)
    first = [t.rate for t in order if t.contender == "gpt2" and t.steps == 300 and t.seed == 1]
    assert first == [4.0, 8.0, 16.0, 32.0], "2.0 is not beside the best one"
    longer = [t.rate for t in order if t.contender == "gpt2" and t.steps == 1000 and t.seed == 1]
    assert longer == [16.0, 32.0, 8.0], "from the best rate of the shorter one"
    assert {t.rate for t in losses if t.seed == 2} == {16.0, 1.0}


def test_the_shortest_run_that_reaches_the_target() -> None:
    losses, order = played(PLAN)
    found = plan.pairs(PLAN, losses)
    assert [(p.base.steps, p.base.seed, p.duet and p.duet.steps) for p in found] == [
        (300, 1, 180),
        (300, 2, 180),
        (1000, 1, 600),
        (1000, 2, 600),
    ]
    own = [t.steps for t in order if t.contender == DUET and t.seed == 1 and t.steps < 300]
    assert own == [210, 180, 150], "down from the first share, until one is not enough"


def test_a_target_that_no_run_reaches() -> None:
    losses, order = played(PLAN, enough=2.0)
    assert all(pair.duet is None for pair in plan.pairs(PLAN, losses))
    assert [t.steps for t in order if t.contender == DUET][:3] == [210, 240, 300]
    assert 150 not in [t.steps for t in order], "shorter runs are useless"


def test_two_at_a_time_find_the_same() -> None:
    losses, order = played(PLAN)
    more, both = played(PLAN, 2)
    assert plan.pairs(PLAN, more) == plan.pairs(PLAN, losses)
    assert len(both) == len(set(both)) and set(order) <= set(both)


def test_trainings_of_another_corpus_are_apart() -> None:
    longer = replace(PLAN, corpus=SOURCES)
    assert longer.duet(300, 1, 0.6).name == "duet-sources-fp32-180-rate1-seed1"
    losses, _ = played(PLAN)
    assert plan.pairs(longer, losses) == []
    assert longer.includes(longer.base(300, 1, 2.0)) and not longer.includes(PLAN.base(300, 1, 2.0))


def records(path: Path, steps: int) -> Path:
    lines: list[dict[str, float]] = [
        {"step": n, "loss": float(n), "time": n / 10} for n in range(1, steps + 1)
    ]
    lines.insert(2, {"step": 2, "val_bpb": 3.0})
    lines.append({"step": steps, "val_bpb": 2.5})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_kept_training_is_read_again(tmp_path: Path) -> None:
    kept, training = runs.Kept(tmp_path / "kept"), Training("gpt2", 4, 1, 7e-4, "fp32")
    assert not kept.losses()
    assert kept.add(training, records(tmp_path / "records", 4)) == 2.5
    assert kept.losses() == {training: 2.5}
    (record,) = kept.trainings().values()
    assert record["loss"] == [[2, 1.5], [4, 3.5]], "means since the validation before"
    with pytest.raises(SystemExit, match="made 4 steps of 5"):
        kept.add(replace(training, steps=5), tmp_path / "records")


def test_a_rate_that_diverged_is_the_worst(tmp_path: Path) -> None:
    kept, training = runs.Kept(tmp_path / "kept"), Training("gpt2", 4, 1, 7e-4, "fp32")
    path = records(tmp_path / "records", 4)
    path.write_text(path.read_text().replace("2.5", "NaN"))
    kept.add(training, path)
    assert kept.losses() == {training: math.inf}
    assert math.isnan(kept.trainings()[training]["val_bpb"][-1][1])
    page = table.lines(kept.folder, replace(PLAN, lengths=[4], seeds=[1]))
    assert "| GPT-2, AdamW 0.0007 | 4 | diverged |" in page


def test_a_training_that_was_complete_but_not_kept(tmp_path: Path) -> None:
    kept, training = runs.Kept(tmp_path / "kept"), Training("gpt2", 4, 1, 7e-4, "fp32")
    folder = tmp_path / "started" / training.name
    folder.mkdir(parents=True)
    records(folder / "records.jsonl", 4)

    def missing(losses: Losses) -> list[Training]:
        return [] if training in losses else [training]

    runs.complete(kept, missing, 1, 2, folder.parent)
    assert kept.losses() == {training: 2.5} and not folder.exists()


@each(
    "text", ['{"training": {', "{}", "[1]", '{"training": {"name": 1}, "loss": [], "val_bpb": []}']
)
def test_a_damaged_file_is_not_repeated_silently(tmp_path: Path, text: str) -> None:
    (tmp_path / "duet-fp32-4-rate1-seed1.json").write_text(text)
    with pytest.raises(SystemExit, match="duet-fp32-4"):
        runs.Kept(tmp_path).losses()


@each(
    "flag",
    ["steps=abc", "steps=0", "seeds=", "eval_every=0", "parallel=0", "device=cuda"]
    + [f"rate={text}" for text in ("0", "nan")]
    + [f"shares={text}" for text in ("0,1", "inf,1", "0.001,0.6")],
)
def test_a_wrong_flag_is_named(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        command.arguments([f"--{flag}"])
    assert ended.value.code == 2
    assert f"--{flag.partition('=')[0]}" in capsys.readouterr().err.splitlines()[-1]


def test_lists_may_have_spaces_and_repetitions() -> None:
    asked = command.arguments(["--steps=1000, 300,300", "--seeds=2,1,2", "--shares=0.6, 0.5,0.6"])
    assert (asked.steps, asked.seeds, asked.shares) == ([300, 1000], [2, 1], [0.5, 0.6])


def test_the_checkout_of_nanochat_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own/nanochat").mkdir(parents=True)
    (tmp_path / "own/nanochat/gpt.py").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given in ("own", "~/own", str(tmp_path / "own")):
        monkeypatch.setenv(NANOCHAT_DIR, given)
        assert command.arguments(["--baseline=nanochat"]).nanochat == tmp_path / "own"
    monkeypatch.setenv(NANOCHAT_DIR, "~/none")
    assert command.arguments(["--baseline=nanochat", "--table"]).nanochat is None
    with pytest.raises(SystemExit):
        command.arguments(["--baseline=nanochat"])
    assert "NANOCHAT_DIR is '~/none'" in capsys.readouterr().err


def keep(folder: Path, losses: Losses) -> None:
    for training, final in losses.items():
        record = {"training": training.__dict__, "commit": "c0ffee", "loss": []}
        record |= {"val_bpb": [[training.steps, final]]}
        (folder / f"{training.name}.json").write_text(json.dumps(record))


def test_the_table_multiplies_steps_and_the_time_of_a_step(tmp_path: Path) -> None:
    losses, _ = played(PLAN)
    keep(tmp_path, losses)
    assert "| of seconds |" in table.lines(tmp_path, PLAN)[0]
    assert "| 180 | 0.60 |  |" in "\n".join(table.lines(tmp_path, PLAN)), "not timed yet"
    time = {"commit": "c0ffee", "machine": {"cpu": "CPU", "cores": 2, "torch": "2"}}
    rounds = [[100.0, 150.0], [200.0, 240.0], [100.0, 110.0]]
    turns.file(tmp_path, PLAN).write_text(json.dumps(time | {"step_cpu_ms": rounds}))
    page = "\n".join(table.lines(tmp_path, PLAN))
    assert "| 180 | 0.60 | **0.75** |" in page, "0.6 × 500 / 400: all rounds together"
    assert "150 ms of processor time in Duet and 100 ms in the baseline" in page
    assert "All 3 rounds together: 1.250 ×" in page
    assert "single rounds 1.10 to 1.50 (CPU, 2 cores" in page
    assert "| GPT-2, AdamW 16 | 1000 | 2.000 | 2.000 |" in page
    assert "\n\nCommits: Duet `c0ffee`.\n\n" in page


def test_trainings_on_a_gpu_have_a_table_of_their_own(tmp_path: Path) -> None:
    on_gpu = replace(PLAN, lengths=[300], seeds=[1], device=CUDA)
    losses, _ = played(on_gpu)
    everywhere = losses | {replace(one, device=CPU): 9.0 for one in losses}
    keep(tmp_path, everywhere)
    assert runs.Kept(tmp_path).losses() == everywhere
    time = {"commit": "c0ffee", "machine": {"gpu": "GPU", "cpu": "CPU", "cores": 2, "torch": "2"}}
    turns.file(tmp_path, on_gpu).write_text(json.dumps(time | {"step_ms": [[10.0, 15.0]]}))
    page = "\n".join(table.lines(tmp_path, on_gpu))
    assert "| 180 | 0.60 | **0.90** |" in page and "9.000" not in page
    assert "15.0 ms in Duet and 10.0 ms in the baseline" in page and "(GPU, torch 2" in page
    assert "| of seconds |" in (
        other := "\n".join(table.lines(tmp_path, replace(on_gpu, device=CPU)))
    )
    assert "2.000" not in other and "A step takes" not in other


def test_losses_of_two_precisions_are_columns_of_one_table(tmp_path: Path) -> None:
    in_bf16 = replace(PLAN, precision="bf16").duet(300, 1, 1.0)
    keep(tmp_path, {in_bf16: 1.5, PLAN.duet(300, 2, 1.0): 2.5, PLAN.base(300, 2, 4.0): 3.5})
    assert table.trainings(runs.Kept(tmp_path).trainings()) == [
        "| training | steps | bf16, seed 1 | fp32, seed 2 |",
        "|---|---|---|---|",
        "| Duet, defaults | 300 | 1.500 | 2.500 |",
        "| GPT-2, AdamW 4 | 300 |  | 3.500 |",
        "",
        "Commits: Duet `c0ffee`.",
    ]


def test_longer_trainings_are_not_of_a_comparison() -> None:
    short = replace(PLAN, lengths=[300])
    assert short.includes(short.duet(300, 1, 1.0)) and not short.includes(PLAN.base(1000, 1, 4.0))
    assert replace(PLAN, lengths=[1000]).includes(PLAN.base(300, 1, 4.0)), "shorter ones are"


def test_all_trainings_of_a_plan_are_of_its_comparison() -> None:
    """1.15 × 100 is less than 115, 1.5 × 1001 less than 1502."""
    for steps, share in ((100, 1.15), (1001, 1.5)):
        chosen = replace(PLAN, lengths=[steps], shares=[share])
        assert chosen.includes(chosen.duet(steps, 1, share))


def test_each_published_training_is_in_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PUBLISHED", tmp_path)
    steps = (150, 1500, 1501, 1800, 4500)
    keep(tmp_path, {Training(DUET, n, 1, 1.0, "bf16"): n / 1000 for n in steps})
    rows = [*command.published("nanochat"), *command.published_long("stdlib")]
    assert [row.split(" | ")[1] for row in rows if "Duet, defaults" in row] == list(map(str, steps))


def test_versions_of_nanochat_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = replace(PLAN, baseline="nanochat", precision="bf16")
    kept = runs.Kept(tmp_path / "kept", "abc")
    for training in (chosen.base(4, 1, 16.0), replace(chosen.base(4, 1, 16.0), contender=DUET)):
        kept.add(training, records(tmp_path / "records", 4))
    assert {t.contender: r.get("nanochat") for t, r in kept.trainings().items()} == {
        "nanochat": "abc",
        DUET: None,
    }
    checkout = tmp_path / "own"
    (checkout / "nanochat").mkdir(parents=True)
    (checkout / "nanochat/gpt.py").write_text("")
    monkeypatch.setenv(NANOCHAT_DIR, str(checkout))
    words = ["--baseline=nanochat", "--precision=bf16", f"--results={kept.folder}"]
    for more in ([], ["--timing"]):
        monkeypatch.setattr(sys, "argv", ["target", *words, *more])
        with pytest.raises(SystemExit, match=r"nanochat abc, .* unknown\+"):
            command.main()
    monkeypatch.setattr(sys, "argv", ["target", *words, "--table"])
    command.main()
    assert "; nanochat `abc`." in capsys.readouterr().out


def test_a_started_training_is_not_continued_by_another_nanochat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, Path] = {}

    def begin(training: Training, folder: Path, every: int) -> None:
        started[training.contender] = folder
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "Process", begin)
    folders = []
    for version in ("abc", "def"):
        for training in (PLAN.duet(300, 1, 1.0), Training("nanochat", 4, 1, 8.0, "fp32")):
            wanted = functools.partial(lambda one, _: [one], training)
            with pytest.raises(KeyboardInterrupt):
                runs.complete(runs.Kept(tmp_path, version), wanted, 1, 2, tmp_path)
        folders.append(dict(started))
    before, after = folders
    assert before["nanochat"] != after["nanochat"] and before[DUET] == after[DUET]


def test_the_time_of_a_step_of_another_nanochat_is_not_used(tmp_path: Path) -> None:
    chosen = replace(PLAN, baseline="nanochat", lengths=[300], seeds=[1])
    kept = runs.Kept(tmp_path, "new")
    kept.add(chosen.base(4, 1, 16.0), records(tmp_path / "records", 4))
    time = {"commit": "c0ffee", "machine": {"cpu": "CPU", "cores": 2, "torch": "2"}}
    time |= {"step_cpu_ms": [[1.0, 2.0]]}
    for version, used in (("old", False), ("new", True)):
        turns.file(tmp_path, chosen).write_text(json.dumps(time | {"nanochat": version}))
        page = table.lines(tmp_path, chosen)
        assert ("A step takes" in page[-1]) is used and (table.STALE in page) is not used


def test_duet_is_evaluated_on_the_text_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its first sequences, as in the stored trainings."""
    measured: list[Sequence[int]] = []
    task: Any = SimpleNamespace(config=SimpleNamespace(eval_tokens=5 * 16, max_seq_len=16))

    def train(path: str, run_name: str) -> None:
        assert (Path(path), run_name) == (ROOT / "train.py", "__main__")
        measured.extend(LanguageModel.share(task, count, 1, 2) for count in (1000, 4))

    commands: list[list[str]] = []
    monkeypatch.setattr(runs.subprocess, "Popen", lambda argv, **more: commands.append(argv))
    runs.Process(Training(DUET, 4, 1, 1.0, "fp32"), tmp_path / "run", 2)
    (_, _, module, *_), *others = commands
    monkeypatch.setattr(evaluated, "spread", evaluated.spread)  # restored at the end
    monkeypatch.setattr(runpy, "run_path", train)
    runpy.run_module(module, run_name="__main__")
    assert [list(sequences) for sequences in measured] == [[1, 3], [1, 3]] and not others


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DEPTH": 1, "SEQ_LEN": 16, "BATCH": 2, "EVAL_TOKENS": 64}.items():
        monkeypatch.setattr(runs, name, value)


@pytest.mark.soak
@pytest.mark.usefixtures("tiny")
def test_a_training_that_is_no_longer_needed_is_stopped(tmp_path: Path) -> None:
    kept, scratch = runs.Kept(tmp_path / "kept"), tmp_path / "started"
    short, endless = (Training("gpt2", steps, 1, 1e-3, "fp32") for steps in (2, 1_000_000))
    runs.complete(kept, lambda losses: [] if short in losses else [short, endless], 2, 2, scratch)
    assert set(kept.losses()) == {short}
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(scratch) in str(p.info)]


@pytest.mark.soak
@pytest.mark.usefixtures("tiny")
def test_an_interrupted_comparison_continues(tmp_path: Path) -> None:
    kept, scratch = runs.Kept(tmp_path / "kept"), tmp_path / "started"
    both = [Training("gpt2", 400, 1, 1e-3, "fp32"), Training(DUET, 400, 1, 1.0, "fp32")]

    def missing(losses: Losses) -> list[Training]:
        return [training for training in both if training not in losses]

    def until_saved(losses: Losses) -> list[Training]:
        if any(scratch.glob("gpt2*/*.pt")) and any(scratch.glob("duet*/run/checkpoints/*")):
            raise KeyboardInterrupt
        return missing(losses)

    with pytest.raises(KeyboardInterrupt):
        runs.complete(kept, until_saved, 3, 200, scratch)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(scratch) in str(p.info)]
    started = {Path(training.name) for training in both if training not in kept.losses()}
    assert started == {folder.relative_to(scratch) for folder in scratch.iterdir()}
    runs.complete(kept, missing, 2, 200, scratch)
    assert set(kept.losses()) == set(both) and not list(scratch.iterdir())
    for record in kept.trainings().values():
        assert [step for step, _ in record["loss"]] == [200, 400]
        assert [step for step, _ in record["val_bpb"]] == [200, 400]


@pytest.mark.soak
@pytest.mark.usefixtures("tiny")
def test_both_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 20, "WARM": 2}.items():
        monkeypatch.setitem(getattr(turns, name), CPU, value)
    turns.measure(PLAN, runs.Kept(tmp_path), 2)
    found = json.loads(turns.file(tmp_path, PLAN).read_text())
    assert len(found["step_cpu_ms"]) == 2
    assert all(time > 0 for both in found["step_cpu_ms"] for time in both)

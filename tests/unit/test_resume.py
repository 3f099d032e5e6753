from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import ask, make_run, only, wrong
from training import tasks
from training.config.batch import Batch
from training.config.loader import Values
from training.config.resolve import Resolved
from training.config.schema import FIELDS, Config
from training.core import manifest, rundir
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.data import duration
from training.data.corpus import CorpusSource
from training.data.prepare import ensure
from training.data.prepared_corpus import PreparedCorpus, content
from training.data.tokenizer import identity
from training.plan import resume_checks
from training.tasks.custom import CustomSpec
from training.tasks.video_restoration.options import NAME as VIDEO
from training.trainer import prepared_cache

SHAPE = {"depth": 2, "vocab": 320, "max_seq_len": 64, "key_offset": True}
SMALL = {"depth": 2, "max_seq_len": 64}  # with the bytes tokenizer


def prepared(folder: Path, text: str, name: str = "a", **chosen: Any) -> PreparedCorpus:
    file = folder / f"{name}.txt"
    file.write_text(text)
    return ensure(
        CorpusSource(name, (file,), file.stat().st_size), "text", folder / "cache", **chosen
    )


def checkpoint(
    run: rundir.RunDir, data: PreparedCorpus | None = None, step: int = 3, **changes: Any
) -> Path:
    folder = run.checkpoints / manifest.folder_name(step)
    folder.mkdir(parents=True)
    facts = {
        "step": step,
        "epoch": 0,
        "used": 8,
        "shape": SHAPE,
        "optimizer": "muon",
        "world_size": 2,
        "bytes": 0,
        "sha256": "",
    }
    facts |= {"data": {}, "tokenizer": "bytes"}
    if data:
        facts |= {
            "data": {"folder": Path(data.folder).name, "tokens_sha256": content(data)},
            "tokenizer": identity(data),
        }
    manifest.write(folder, facts | changes)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> rundir.RunDir:
    return rundir.RunDir(tmp_path / "run")


def request_for(run: rundir.RunDir, **changes: Any) -> Any:
    found = ask("--device=cpu", *(f"--{k}={v}" for k, v in changes.items()))
    found.resume_from = run
    return found


def problems(asked_for: Any, invalid: tuple[Problem, ...] = ()) -> list[Problem]:
    resolved = Resolved(asked_for.config, asked_for.origins, list(invalid), dict(asked_for.options))
    return resume_checks.problems(
        asked_for.kind, asked_for.resume_from, resolved, asked_for.resumed
    )


def test_the_same_model_continues(run: rundir.RunDir) -> None:
    checkpoint(run)
    same = request_for(run, **SMALL)
    assert problems(same) == [] and resume_checks.notes(same) == []


def test_fewer_steps_than_the_run_has_are_refused(run: rundir.RunDir) -> None:
    checkpoint(run, step=219)
    problem = only(problems(request_for(run, **SMALL, num_iterations=120)))
    assert problem.code == "resume.fewer_steps" and "219" in problem.what
    for steps in (0, 219, 220):
        assert problems(request_for(run, **SMALL, num_iterations=steps)) == []


def test_another_model_is_refused_with_all_differences(run: rundir.RunDir) -> None:
    checkpoint(run)
    other = request_for(run, **{**SMALL, "optimizer": "adamw", "tokenizer": "bpe"})
    other.config.vocab_size, other.config.depth = 512, 4
    problem = only(problems(other))
    assert "optimizer muon (now adamw), depth 2 (now 4), vocab 320 (now 512)" in problem.what
    (fix,) = problem.fixes  # only what was given
    given = {word for word in fix.replace(":", " ").split() if word.startswith("--")}
    assert given == {"--depth", "--tokenizer", "--optimizer"}
    unset = request_for(run, max_seq_len=64)
    assert only(problems(unset)).fixes == []
    invalid = Problem("field.value", "", field="depth")
    assert problems(unset, (invalid,)) == [], "an invalid value has kept the default"


def test_a_change_that_is_impossible_is_reported_with_the_other_errors(home: Path) -> None:
    checkpoint(make_run(home / "experiments", "demo", key_offset=True, **SMALL))
    assert ask("--resume=demo").resume_from
    assert {p.code for p in wrong("--resume=demo", "--depth=4", "--numa=1023", "--retries=x")} == {
        "resume.other_model",
        "field.value",
        "numa.node",
    }


@pytest.mark.parametrize(("saved", "now"), [("gpt", "line"), ("line", "gpt"), (None, "line")])
def test_another_task_is_refused(saved: str | None, now: str, run: rundir.RunDir) -> None:
    """A checkpoint from before there were several tasks is a GPT's."""
    checkpoint(run, **({"task": saved, "shape": {}, "optimizer": "AdamW"} if saved else {}))
    asked_for = request_for(run)
    asked_for.kind = tasks.BUILT_IN.get(now) or CustomSpec(now)
    problem = only(problems(asked_for))
    assert (
        problem.what == f"cannot resume run: its task is {saved or 'gpt'}, not {now}"
        and "omit --task" in problem.fixes[0]
    )


def test_the_same_task_continues_and_changed_options_are_reported(run: rundir.RunDir) -> None:
    asked_for = request_for(run)
    asked_for.kind, asked_for.options = CustomSpec("line"), {"width": 4, "slope": 0.5}
    asked_for.resumed = {"width": (3, "x"), "slope": (0.5, "x"), "task": ("/old/line.py", "x")}
    changed = (
        "changed in the resumed run: width 3 → 4; the result differs from an uninterrupted run"
    )
    assert resume_checks.notes(asked_for) == [
        "run has no checkpoint yet: it restarts at step 0",
        changed,
    ]
    checkpoint(run, task="line", shape={}, optimizer="AdamW")
    assert problems(asked_for) == [] and resume_checks.notes(asked_for) == [changed]


def test_a_task_knows_the_options_that_change_nothing(run: rundir.RunDir) -> None:
    checkpoint(run, task=VIDEO, shape={}, optimizer="Adam")
    asked_for = request_for(run)
    asked_for.kind, asked_for.options = tasks.BUILT_IN[VIDEO], {"test_num_frame": 5}
    asked_for.resumed = {"test_num_frame": (-1, "x")}
    changed = msg("plan.resume.changed", shown="test_num_frame -1 → 5")
    assert resume_checks.notes(asked_for) == [changed]


def test_options_of_the_models_shape_cannot_change(run: rundir.RunDir) -> None:
    asked_for = request_for(run)
    asked_for.kind, asked_for.options = CustomSpec("line"), {"width": 4, "scale": "2", "slope": 1.0}
    checkpoint(run, task="line", shape={"width": 3, "scale": 2, "channels": 7}, optimizer="AdamW")
    assert "has another model: width 3 (now 4)" in only(problems(asked_for)).what
    asked_for.options["width"] = 3
    assert problems(asked_for) == []


def test_the_newest_readable_manifest_is_used(run: rundir.RunDir) -> None:
    checkpoint(run, step=3)
    (checkpoint(run, step=4, optimizer="adamw") / manifest.NAME).write_text("{")
    assert problems(request_for(run, **SMALL)) == []


def test_a_missing_checkpoint_is_reported(run: rundir.RunDir) -> None:
    assert problems(request_for(run)) == []
    assert "restarts at step 0" in resume_checks.notes(request_for(run))[0]


def changes(config: Config, resumed: Values) -> list[str]:
    return resume_checks.changes(asdict(config), resumed)


def test_changes_are_listed_and_inexact_ones_marked() -> None:
    old: Values = {
        "seed": (1, "x"),
        "depth": (12, "x"),
        "num_iterations": (5, "x"),
        "eval_every": (7, "x"),
    }
    assert changes(Config(seed=1, eval_every=7, num_iterations=9), old) == []
    assert changes(Config(seed=1, eval_every=8), old) == [
        "changed in the resumed run: eval_every 7 → 8"
    ]
    (note,) = changes(Config(seed=2, eval_every=7), old)
    assert "seed 1 → 2; the result differs from an uninterrupted run" in note


def test_both_ends_of_a_long_value_are_shown() -> None:
    before = "curl -s https://example.org/" + "x" * 60 + "/hook"
    old: Values = {"notify": (before, "x")}
    (note,) = changes(Config(notify="mail"), old)
    shown = note.partition("notify ")[2].partition(" → ")[0]
    assert len(shown) == 40 and shown.startswith("curl -s ") and shown.endswith("/hook")


def test_changes_not_known_to_be_harmless_are_marked() -> None:
    mark = "; the result differs from an uninterrupted run"
    changed = {
        name: next(
            v
            for v in ("fp32", 0.125, 3, True, False)
            if type(v) is type(getattr(Config(), name)) and v != getattr(Config(), name)
        )
        for name in FIELDS
        if name not in resume_checks.SILENT
        and isinstance(getattr(Config(), name), (str, int, float))
    }
    marked = {
        n
        for n, v in changed.items()
        if changes(replace(Config(), **{n: v}), {n: (getattr(Config(), n), "x")})[0].endswith(mark)
    }
    assert marked >= {
        *(
            "seed",
            "total_batch_size",
            "dropout",
            "matrix_lr",
            "embedding_lr",
            "unembedding_lr",
            "weight_decay",
            "grad_clip",
        ),
        *(
            "warmup_ratio",
            "warmdown_ratio",
            "final_lr_frac",
            "find_unused_parameters",
            "use_static_graph",
        ),
    }
    assert not marked & (resume_checks.HARMLESS | resume_checks.DECIDED)
    assert not (resume_checks.HARMLESS | resume_checks.DECIDED | resume_checks.SILENT) - set(
        FIELDS
    ), "a renamed field"
    for name in resume_checks.DECIDED:
        assert changes(
            replace(Config(), **{name: changed[name]}), {name: (getattr(Config(), name), "x")}
        ), "it is listed all the same"


def test_changed_decisions_are_reported_although_auto_is_unchanged(run: rundir.RunDir) -> None:
    def plan(**changed: Any) -> dict[str, Any]:
        values = {
            "device": "cpu",
            "precision": "bf16",
            "compile": False,
            "loss_chunks": 1,
            "activation_checkpointing": 2,
        } | changed
        size = values.pop("device_batch_size", 4)
        made = {
            name: {"value": value, "reason": "as it came"}
            for name, value in values.items()
            if name != "torch"
        }
        return made | {
            "torch": values.get("torch", "2.13.0"),
            "config": {"device_batch_size": size, "precision": "auto"},
        }

    assert resume_checks.decided_otherwise(None, plan()) == []
    assert resume_checks.decided_otherwise(run, plan()) == []
    run.create()
    rundir.write_json(run.plan, {"config": plan()["config"], "ranks": 4})
    assert resume_checks.decided_otherwise(run, plan() | {"ranks": 4}) == [], "a submitted job"
    rundir.write_json(run.plan, plan())
    assert resume_checks.decided_otherwise(run, plan()) == []
    assert resume_checks.decided_otherwise(run, plan(activation_checkpointing=0)) == [], (
        "the same arithmetic"
    )
    then = plan(compile=True, selective_checkpointing=0)
    assert resume_checks.decided_otherwise(run, then | {"compile": plan()["compile"]}) == []
    rundir.write_json(run.plan, then)
    (note,) = resume_checks.decided_otherwise(run, plan(compile=True, selective_checkpointing=3))
    assert "selective_checkpointing 0 → 3" in note, "another compiled program"
    rundir.write_json(run.plan, plan())
    for name, value, shown in (
        ("device", "cuda", "device cpu → cuda"),
        ("precision", "fp32", "precision bf16 → fp32"),
        ("compile", True, "compile False → True"),
        ("loss_chunks", 4, "loss_chunks 1 → 4"),
        ("device_batch_size", 2, "device_batch_size 4 → 2"),
        ("torch", "2.14.0", "torch 2.13.0 → 2.14.0"),
    ):
        assert resume_checks.decided_otherwise(run, plan(**{name: value})) == [
            f"decided differently than before the stop: {shown}; not bit-exact"
        ]
    two = plan(compile=True) | {"ranks": 2}
    rundir.write_json(run.plan, two)
    (note,) = resume_checks.decided_otherwise(run, two | plan(compile=True, blocks_per_graph=4))
    assert "blocks_per_graph 1 → 4" in note
    for ranks, count in ((2, 0), (3, 1)):  # two ranks add gradients in one order only
        rundir.write_json(run.plan, plan() | {"ranks": ranks})
        notes = resume_checks.decided_otherwise(run, plan(bucket_mib=8) | {"ranks": ranks})
        assert len(notes) == count and all("bucket_mib 25 → 8" in note for note in notes)


def test_the_same_tokens_from_another_file_are_the_same_data(
    run: rundir.RunDir, tmp_path: Path
) -> None:
    checkpoint(run, prepared(tmp_path, "some text " * 100))
    assert resume_checks.check_data(run, prepared(tmp_path, "some text " * 100, "moved")) == ""
    assert "an unfinished epoch restarts" in resume_checks.check_data(
        run, prepared(tmp_path, "other text " * 100, "b")
    )


def test_another_seed_begins_the_epoch_of_a_text_again(run: rundir.RunDir, tmp_path: Path) -> None:
    data, batch = prepared(tmp_path, "some text " * 100), Batch(4, 10, 1, 1)
    checkpoint(run, data, seed=42)
    for seed, used in ((42, 8), (43, 0)):
        found = resume_checks.position(run, data, Config(seed=seed), batch)
        assert found == {"step": 3, "epoch": 0, "used": used}


def test_an_epoch_that_has_ended_is_not_trained_again_with_other_data(
    run: rundir.RunDir, tmp_path: Path
) -> None:
    batch = Batch(4, 10, 1, 1)
    checkpoint(run, prepared(tmp_path, "some text " * 100), samples=11)  # 8 are used
    more = prepared(tmp_path, "some text " * 200, "b")
    found = resume_checks.position(run, more, Config(), batch)
    count = duration.sequences(more, batch)
    assert found == {"step": 3, "epoch": 0, "used": count} and count > 12
    length = duration.of_text(Config(num_epochs=2), batch, more, **found)
    assert length.total_steps == 3 + count // 4


def test_another_tokenizer_is_refused_and_the_old_file_suggested(
    run: rundir.RunDir, tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers")
    first = prepared(tmp_path, "some text, and more of it " * 100, chosen="bpe", vocab_size=270)
    checkpoint(run, first)
    assert resume_checks.check_data(run, first) == ""
    other = prepared(
        tmp_path, "quite other words that merge otherwise " * 100, "b", chosen="bpe", vocab_size=270
    )
    with pytest.raises(UserError) as caught:
        resume_checks.check_data(run, other)
    fix = only(caught.value.problems).fixes[0]
    assert fix == f"--tokenizer={Path(first.folder) / 'tokenizer.json'}"
    loaded = prepared(
        tmp_path,
        "quite other words that merge otherwise " * 100,
        "b",
        chosen=fix.removeprefix("--tokenizer="),
    )
    assert "epoch restarts" in resume_checks.check_data(run, loaded), (
        "the advice works: other data, the same tokens"
    )


def test_a_shard_changed_during_a_run_is_named(run: rundir.RunDir, tmp_path: Path) -> None:
    data = prepared(tmp_path, "some text " * 100)
    assert prepared_cache.changed(run) == ""
    run.path.mkdir()
    rundir.write_json(run.data, asdict(data))
    assert prepared_cache.changed(run) == ""
    data.train[0].write_bytes(b"12")
    assert str(data.train[0]) in prepared_cache.changed(
        run
    ) and "has 2 bytes" in prepared_cache.changed(run)

"""DDPInspector in any training loop: models that it cannot compare or must not change, one process,
records of the run, options."""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.unit.conftest import python
from tests.unit.inspected_ranks import GOOD, SAME, Ranks, Samples, ranks, sharded
from training.inspector import DDPInspector, InspectionError, reporting
from training.inspector.background import Watcher
from training.inspector.main_thread import in_collective
from training.inspector.reporting import Finding
from training.inspector.shared_store import OwnStore, SharedStore

__all__ = ["ranks"]  # a fixture


def test_sharded_parameters_are_not_compared(ranks: Ranks) -> None:
    def change(rank: int, step: int, model: torch.nn.Module) -> None:
        with torch.no_grad():
            model[1].weight += rank  # type: ignore[index,operator]

    make = torch.nn.Linear.reset_parameters

    def reset(layer: torch.nn.Linear) -> None:
        make(layer)
        if layer.in_features == 3:
            layer.weight.placements = ["a shard"]  # type: ignore[attr-defined]

    ranks._patch.setattr(torch.nn.Linear, "reset_parameters", reset)
    ranks._patch.setattr(copy, "deepcopy", _twin)
    assert ranks.train(GOOD["sampler"], change=change, on_finding="raise") == []
    assert ranks.logged("parameters that are not compared: 1 sharded") and ranks.logged(
        "step 8: all ranks train"
    )


def _twin(model: torch.nn.Module) -> torch.nn.Module:
    """deepcopy() drops attributes of parameters."""
    twin = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 1))
    twin.load_state_dict(model.state_dict())
    return twin


def test_ranks_with_different_parameters_are_not_compared(ranks: Ranks) -> None:
    numbers = iter((3, 5))
    ranks._patch.setattr(copy, "deepcopy", lambda model: torch.nn.Linear(6, next(numbers)))
    assert ranks.train(GOOD["sampler"], on_finding="raise") == []
    assert ranks.logged("parameters are not compared: the ranks hold different ones")


def test_an_inspected_model_can_be_saved_and_copied(ranks: Ranks, tmp_path: Path) -> None:
    model, _ = ranks.start(GOOD["batches"])
    torch.save(model, tmp_path / "whole.pt")
    code = (
        f"import torch; model = torch.load({str(tmp_path / 'whole.pt')!r}, "
        f"weights_only=False); "
        f"print(model(torch.ones(2, 6)).shape)"
    )
    done = python("-c", code, cwd=tmp_path, PYTHONPATH="")
    assert done.stdout == "torch.Size([2, 1])\n", done.stderr
    copy.deepcopy(model)(torch.ones(2, 6))
    assert not ranks.inspectors[0]._in_step, "a copy is another model"
    model(torch.ones(2, 6))
    assert ranks.inspectors[0]._in_step


def test_the_own_time_of_a_compiled_model() -> None:
    compiled = torch.compile(torch.nn.Linear(6, 1), backend="eager")
    one = DDPInspector(compiled, None)  # type: ignore[arg-type]
    for _ in range(25):
        loss = compiled(torch.ones(2, 6)).mean()
        loss.backward()
        one.step(loss)
    own, _, period = one._clock.medians() or (0, 0, 0)
    assert 0 < own <= period
    one.close()
    assert not compiled._forward_pre_hooks, "the model is restored"


def test_a_single_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = torch.nn.Linear(6, 1)
    with DDPInspector(model, DataLoader(Samples(40), 4), every=2) as alone:
        for batch in alone._loader:
            alone.step(model(batch).mean(), batch)
    shown = capsys.readouterr().err
    assert "[inspector] one process, no other ranks" in shown
    assert (
        "[inspector] rank 0 of 1: 40 samples, 10 batches an epoch, SequentialSampler, first "
        "indices 0, 1, 2, 3" in shown
    )
    with DDPInspector(model, DataLoader(Samples(1), 4)) as alone:
        for batch in alone._loader:
            alone.step(model(batch).mean(), batch)
    assert "rank 0 of 1: 1 sample, 1 batch an epoch, " in capsys.readouterr().err
    assert (
        re.search(r"step 10: rank 0: 4 samples, loss -?\d", shown)
        and "WARNING" not in shown
        and "parameters" not in shown
    )
    with pytest.raises(InspectionError, match="nan"), DDPInspector(model) as alone:
        alone.step(float("nan"))


def test_losses_of_any_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with DDPInspector(torch.nn.Linear(6, 1), every=1) as alone:
        for loss in (1.30124, 2e-5, 1.7e16):
            alone.step(loss)
    shown = re.findall(r"loss (\S+)", capsys.readouterr().err)
    assert shown == ["1.3012", "2e-05", "1.7e+16"]


def test_ranks_without_a_process_group_train_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    DDPInspector(torch.nn.Linear(6, 1)).close()
    assert (
        "WARNING: rank 2 trains alone: WORLD_SIZE is 4, but there is no process group"
        in capsys.readouterr().err
    )


def test_events_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    monkeypatch.setenv("DUET_RUN_DIR", str(tmp_path))
    ranks.train(SAME["no sampler"][0])
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events[:2]] == ["inspection"] * 2 and [
        e.get("rank") for e in events[:2]
    ] == [0, 1]
    (warning,) = [e for e in events if e["event"] == "warning"]
    assert warning["kind"] == "overlap" and "train on the same samples" in warning["text"]


def test_an_unwritable_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    (tmp_path / "events.jsonl").mkdir()
    monkeypatch.setenv("DUET_RUN_DIR", str(tmp_path))
    assert ranks.train(GOOD["sampler"]) == []
    assert sum("cannot write" in line for line in ranks.lines) == 1, "reported once"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_finding": "stop"}, "'auto', 'warn', 'raise'"),
        ({"every": -1}, "at least 0"),
        ({"slow": 1.0}, "above 1"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDPInspector(torch.nn.Linear(6, 1), **options)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["distributed_c10d.py"], True),
        (["checkpoint/state_dict_saver.py", "distributed_c10d.py"], True),
        (["checkpoint/state_dict_saver.py"], False),  # no_dist=True
        (["elastic/multiprocessing/errors/__init__.py"], False),  # @record
        (["launcher/api.py", "elastic/agent/server/api.py"], False),  # notebook_launcher
        (["run.py"], False),  # torchrun --run-path
        (["algorithms/_checkpoint/checkpoint_wrapper.py"], False),
        ([], False),
    ],
)
def test_a_collective_of_the_main_thread_is_seen_from_another_one(
    files: list[str], found: bool
) -> None:
    with ThreadPoolExecutor(1) as pool:
        names: dict[str, Any] = {"call": lambda: pool.submit(in_collective).result()}
        for file in ["/job/train.py", *(f"/torch/distributed/{file}" for file in files)][::-1]:
            inner = {"call": names["call"]}
            exec(compile("def frame(): return call()", file, "exec"), inner)
            names["call"] = inner["frame"]
        assert names["call"]() is found


@pytest.mark.parametrize("place", [True, False])
def test_a_stack_is_read_where_the_system_lacks_something(
    place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in memory, as Python of uv and conda does, or a folder for temporary files."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path if place else tmp_path / "none"))
    with ThreadPoolExecutor(1) as pool:
        names: dict[str, Any] = {"look": lambda: pool.submit(in_collective).result()}
        exec(compile("seen = look()", "/torch/distributed/rpc.py", "exec"), names)
    assert names["seen"] is place and not any(tmp_path.iterdir())


def test_a_long_step_after_a_wait_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    state: Any = {"step": 10, "in_step": True, "ended": ""}
    board, output = SharedStore(OwnStore(), 1, 2), reporting.FindingsOutput()
    one = Watcher(board, output, lambda: state, lambda _: True, patience_s=0.0)

    def ends(*found: Finding) -> int:
        for each in found:
            one.find(each)
        for _ in range(2):
            one._turn()
        return len(ended)

    assert ends(Finding("no_data", "", 0, 10)) > 0
    ended.clear()
    state["step"] = 11
    assert ends() == 0
    assert ends(Finding("no_data", "", 0, 11)) > 0, "the next wait"


def test_a_rank_that_has_looked_at_a_batch_may_evaluate_between_two_epochs(ranks: Ranks) -> None:
    """Its loader has begun more often than those of the others, which wait in the next epoch."""
    models = ranks.start(lambda rank: sharded(Samples(16), rank), patience_s=0.2)
    shown = next(iter(ranks.loaders[0]))
    for batches in zip(*ranks.loaders, strict=True):
        for rank, batch in enumerate(batches):
            ranks.inspectors[rank].step(models[rank](batch).square().mean(), batch)
    shown = next(iter(ranks.loaders[0]))
    models[1](shown)
    after = [one._state() for one in ranks.inspectors]
    assert [(s["step"], s["in_step"], bool(s["ended"])) for s in after] == [
        (2, False, True),
        (2, True, False),
    ]
    assert after[0]["epoch"] == 1
    following = iter(ranks.loaders[1])
    next(following)
    assert ranks.inspectors[1]._state()["epoch"] == 2

"""The cause of an exception: as reported by a rank, in its log, by torchelastic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.verdicts import TRACEBACK, failed, new_run, report_error, verdict
from training.core import rundir
from training.core.rundir import RunDir, write_json
from training.diagnose import card, exception_cause
from training.diagnose.result import diagnose
from training.launcher import endings, failure_report
from training.launcher.outcome import Outcome
from training.watchdog import rank_exit


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


@each(
    ("kind", "message", "expected"),
    [
        ("ValueError", "planted", "exception"),
        ("NotFinite", "loss is nan on rank 1", "nan_loss"),
        ("ParametersDiffer", "weights", "ddp_params_mismatch"),
        (
            "InspectionError",
            "parameters differ at step 20: rank 1 against the other 2; 1 of 4, first 2.bias",
            "ddp_params_mismatch",
        ),
        (
            "InspectionError",
            "第 20 步参数不一致：rank 1 与其他 2 个不一致；4 个参数中的 1 个，第一个是 2.bias",
            "ddp_params_mismatch",
        ),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.50 GiB.", "gpu_oom"),
        ("AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be …", "gpu_oom"),
        ("RuntimeError", "Triton Error [CUDA]: out of memory", "gpu_oom"),
        ("RuntimeError", "CUDA driver error: operation not supported", "config_error"),
        ("DistBackendError", "…\nLast error:\nCuda failure 2 'out of memory'", "gpu_oom"),
        (
            "AcceleratorError",
            "CUDA error: an illegal memory access was encountered",
            "cuda_device_assert",
        ),
        ("AcceleratorError", "CUDA error: device-side assert triggered", "cuda_device_assert"),
        ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered", "gpu_hardware"),
        (
            "RuntimeError",
            "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
            "gpu_hardware",
        ),
        (
            "RuntimeError",
            "DataLoader worker (pid 3216) is killed by signal: Killed. ",
            "dataloader_worker_died",
        ),
        (
            "RuntimeError",
            "DataLoader worker (pid(s) 3216, 3217) exited unexpectedly",
            "dataloader_worker_died",
        ),
        (
            "RuntimeError",
            "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory.",
            "shm_too_small",
        ),
        (
            "ValueError",
            "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback …",
            "exception",
        ),
        (
            "RuntimeError",
            "[…/pair.cc:537] Read error [127.0.0.1]:46811: Connection reset by peer.",
            "peer_died",
        ),
        (
            "RuntimeError",
            "[…/pair.cc:553] Connection closed by peer [127.0.0.1]:5006.",
            "peer_died",
        ),
        ("DistNetworkError", "failed to recv, got 0 bytes", "peer_died"),
        (
            "DistStoreError",
            "Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
            "rendezvous_timeout",
        ),
        (
            "DistNetworkError",
            "The server socket has failed to listen on any local network address. port: 29500, "
            "name: EADDRINUSE",
            "port_in_use",
        ),
        ("BarrierError", "barrier 'x': rank 1 did not arrive within 3 s", "hang"),
    ],
)
def test_cause_of_a_reported_exception(run: RunDir, kind: str, message: str, expected: str) -> None:
    report_error(run, 1, kind, message)
    record = failed(run)
    assert verdict(record) == (expected, "error", 1)
    assert record["summary"] == f"{kind}: {message.splitlines()[0]}"
    assert (record["where"], record["step"], record["phase"]) == (
        "model.py:1",
        7,
        "step 7: forward",
    )


PICKLED = """Traceback (most recent call last):
  File "/data/main.py", line 27, in main
    call(thing)
  File "/env/lib/python3.11/{file}", line 60, in dump
    ForkingPickler(file, protocol).dump(obj)
AttributeError: Can't pickle local object 'main.<locals>.<lambda>'
"""


@each(
    ("file", "of_workers"),
    [
        ("multiprocessing/reduction.py", True),
        ("site-packages/torch/utils/data/dataloader.py", True),
        ("site-packages/torch/distributed/distributed_c10d.py", False),
        ("site-packages/torch/serialization.py", False),
    ],
)
@each("language", ["en", "zh"])
def test_an_object_that_cannot_be_pickled_is_not_always_for_a_worker(
    file: str, of_workers: bool, language: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUET_LANG", language)
    report_error(run, 1, "AttributeError", "Can't pickle local object 'main.<locals>.<lambda>'")
    log = run.rank_log(1)
    log.write_text(PICKLED.format(file=file))
    alone = run.path.parent / "alone.log"
    alone.write_bytes(log.read_bytes())
    for advice in (failed(run)["advice"], diagnose([alone])["advice"]):
        assert len(advice) == 1
        assert ("num_workers" in advice[0], "lambda" in advice[0]) == (of_workers, not of_workers)


@pytest.mark.parametrize("who", ["ranks 0, 1 (no majority)", "rank 1"])
def test_weights_that_drift_apart_are_not_blamed_on_the_model(run: RunDir, who: str) -> None:
    """They were equal at the first step: the advice is about what changes them."""
    message = f"parameters differ at step 100: {who}; 2 parameters, first weight"
    report_error(run, 1, "ParametersDiffer", message)
    advice = failed(run)["advice"]
    assert "optimizer" in advice[0] and not any("build the model" in one for one in advice)


def test_weights_that_differ_between_two_ranks_are_of_neither(run: RunDir) -> None:
    message = "parameters differ at step 10: ranks 0, 1 among each other; 1 of 2, first weight"
    report_error(run, 1, "InspectionError", message)
    write_json(run.rank_error(1), {**rundir.read_json(run.rank_error(1)), "guilty_rank": None})
    run.rank_log(1).write_text(TRACEBACK.replace("ValueError: planted", f"Error: {message}"))
    record = failed(run)
    assert verdict(record) == ("ddp_params_mismatch", "error", None)
    assert "optimizer" in record["advice"][0]


def test_the_place_of_a_waiting_rank_is_not_that_of_the_guilty_one(run: RunDir) -> None:
    message = "rank 1 ran out of data: its loop ended after step 90, and rank 0 waits for it"
    report_error(run, 0, "InspectionError", message, guilty=1, where="")
    run.rank_log(0).write_text(TRACEBACK)
    record = failed(run, rank=0)
    assert verdict(record) == ("exception", "error", 1)
    assert record["where"] is None


@each(
    ("message", "suspect"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: misaligned address", True),
        ("CUDA error: an illegal instruction was encountered", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(…)`", True),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", True),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: invalid configuration argument", False),
        ("CUDA out of memory. Tried to allocate 2.50 GiB.", False),
    ],
)
def test_kernel_errors_that_may_be_the_gpu_s(run: RunDir, message: str, suspect: bool) -> None:
    report_error(run, 1, "AcceleratorError", message)
    assert failed(run).get("suspect_gpu", False) is suspect
    assertion = {"type": "RuntimeError", "message": "device-side assert triggered"}
    report_error(run, 1, "AcceleratorError", message, before=[assertion])
    assert "suspect_gpu" not in failed(run)
    run.rank_error(1).unlink()
    run.rank_log(1).write_text(f"terminate called after …\nwhat():  {message}\nframe #0: …\n")
    assert failed(run, -6).get("suspect_gpu", False) is suspect


def test_a_script_s_vague_error_has_the_cause_that_it_was_raised_from(run: RunDir) -> None:
    vague = "DataLoader worker (pid(s) 9) exited unexpectedly"
    bus = "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that …"
    report_error(run, 1, "RuntimeError", vague, before=[{"type": "RuntimeError", "message": bus}])
    assert verdict(failed(run)) == ("shm_too_small", "error", 1)


@each("worker", ["(pid(s) 9) exited unexpectedly", "(pid 9) exited unexpectedly with exit code 1."])
@each(
    ("line", "cause"),
    [
        (
            "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
            "shared memory (shm).",
            "shm_too_small",
        ),
        ("RuntimeError: can't start new thread", "too_many_processes"),
        ("RuntimeError: Connection reset by peer", "dataloader_worker_died"),
        ("epoch 1", "dataloader_worker_died"),
    ],
)
def test_the_log_may_name_the_reason_of_a_vague_error(
    run: RunDir, worker: str, line: str, cause: str
) -> None:
    """torch 2.13 loses the first exception where it comes during an import."""
    report_error(run, 1, "RuntimeError", f"DataLoader worker {worker}")
    run.rank_log(1).write_text(f"{line}\nstep 7\n")
    record = failed(run)
    assert verdict(record) == (cause, "error", 1)
    assert "exited unexpectedly" in record["summary"]


def test_a_long_exception_message_is_truncated(run: RunDir) -> None:
    report_error(run, 1, "OutOfMemoryError", "CUDA out of memory. " + "x" * 1000)
    assert (
        len(failed(run)["summary"]) == len("OutOfMemoryError: ") + failure_report.SHOWN_CHARACTERS
    )


@each(
    ("message", "code", "expected"),
    [
        ("", "assert s == 3", "ValueError: assert s == 3"),
        ("\n \n  bad sample\n", "assert s == 3", "ValueError:   bad sample"),
        ("", "raise ValueError", "ValueError"),
        ("", None, "ValueError"),
        (" \n", "", "ValueError"),
    ],
)
def test_an_exception_without_a_message_is_named_with_its_code(
    run: RunDir, message: str, code: str | None, expected: str
) -> None:
    report_error(run, 1, "ValueError", message, code=code)
    assert failed(run)["summary"] == expected
    how = rank_exit.explain(run, 1, 1, [], {}).how
    assert how == expected.replace("   ", " ")


def test_an_exception_without_a_message_that_was_only_printed(run: RunDir) -> None:
    """As lib/run_script.py prints it if its file cannot be written."""
    record = failed(run, unwritten={1: "ValueError: at a.py:3"})
    assert (record["summary"], record["where"]) == ("ValueError", "a.py:3")


def test_an_exception_on_another_machine_is_read_from_the_common_disk(run: RunDir) -> None:
    """No rank of this machine has ended with an error: rank 0 has ended with 0."""
    report_error(run, 1, "ValueError", "planted")
    record = failed(run, elsewhere=True, here=None)
    assert verdict(record) == ("exception", "error", 1) and "ValueError" in record["summary"]


@each(
    ("rank", "outcome"),
    [
        (1, {"guilty": (1, 2)}),
        (0, {}),  # whose exit is seen first
        (None, {}),  # under torchrun
        (None, {"here": (0, 1), "elsewhere": True}),
    ],
)
def test_what_one_rank_rejects_has_its_exit_code(
    rank: int | None, outcome: dict[str, Any], run: RunDir
) -> None:
    """The others have lost it."""
    trace = ['File "/x/torch/distributed/c10d.py", line 3\n']
    lost = "[…/pair.cc:534] Connection closed by peer [127.0.0.1]:5"
    report_error(run, 0, "RuntimeError", lost, time=2.0, traceback=trace)
    rejected = {"code": "data.differs", "text": "planted"}
    report_error(run, 1, "UserError", "planted", where="", rejected=[rejected], exit_code=2)
    record = failed(run, 1, rank, **outcome)
    assert verdict(record) == ("config_error", "error", 1)
    assert (record["exit_code"], record["status"], record["rejected"]) == (2, 2, [rejected])
    assert not endings.may_help(run, Outcome(), record)


def test_a_rank_can_report_another_rank_as_guilty(run: RunDir) -> None:
    report_error(run, 0, "NotFinite", "loss is nan on rank 1 at step 5", guilty=1)
    assert failed(run, rank=0)["rank"] == 1


def test_the_card_of_a_failed_check_does_not_name_its_line(run: RunDir) -> None:
    """Neither by the rank's report nor by the traceback in its log."""
    for kind in ("NotFinite", "SanityCheckError"):
        trace = TRACEBACK.replace("ValueError", kind)
        run.rank_log(1).write_text(trace)
        report_error(run, 1, kind, "planted", where="", traceback=trace.splitlines(keepends=True))
        record = failed(run)
        assert record["rank"] == 1 and record["where"] is None
        assert "  Where" not in card.of_run(record)


def test_an_earlier_exception_of_the_rank_is_the_cause(run: RunDir) -> None:
    report_error(
        run,
        1,
        "SystemExit",
        "1",
        before=[
            {
                "type": "OutOfMemoryError",
                "message": "CUDA out of memory. Tried to allocate 2.00 GiB",
            }
        ],
    )
    assert failed(run)["cause"] == "gpu_oom"
    report_error(
        run,
        1,
        "RuntimeError",
        "no data",
        before=[{"type": "ConnectionResetError", "message": "Connection reset by peer"}],
    )
    assert failed(run)["cause"] == "exception", "it may be any connection"


@pytest.mark.parametrize(("after", "found"), [("a last line\n", True), ("step\n" * 10_000, False)])
def test_a_traceback_at_the_end_of_a_log_is_the_cause(run: RunDir, after: str, found: bool) -> None:
    """For a program that does not report exceptions; a much earlier traceback does not count."""
    run.rank_log(1).write_text("ready\n" + TRACEBACK + after)
    record = failed(run)
    assert verdict(record) == (("exception", "error", 1) if found else ("exit_status", "died", 1))
    assert record["where"] == ("/prog:3" if found else None)
    assert ("ValueError: planted" in record["summary"]) == found


def test_what_record_of_torchelastic_has_written_is_used_where_nothing_better_is_known(
    run: RunDir,
) -> None:
    stack = 'Traceback (most recent call last):\n  File "/home/ann/train.py", line 7, in main\n'
    message = {"message": "ValueError: planted", "extraInfo": {"py_callstack": stack}}
    write_json(run.elastic_error(1), {"message": message})
    record = failed(run, status=1)
    assert (record["kind"], record["rank"]) == ("error", 1)
    assert (record["summary"], record["where"]) == ("ValueError: planted", "/home/ann/train.py:7")
    report_error(run, 1, "SystemExit", "1")
    assert failed(run, status=1)["summary"] == "ValueError: planted"
    report_error(run, 1, "KeyError", "'own'")
    assert failed(run, status=1)["summary"] == "KeyError: 'own'"


def test_the_card_names_exceptions_in_threads(run: RunDir) -> None:
    record = failed(run, in_threads={1: "Exception in thread T: ValueError: x; at a.py:3"})
    assert record["threads"] == {"1": "Exception in thread T: ValueError: x; at a.py:3"}
    assert record["threads"]["1"] in card.of_run(record)


@pytest.mark.parametrize(
    ("text", "collates"),
    [
        (
            "stack expects each tensor to be equal size, but got [3, 8] at entry 0 and [4] at entry 1",
            1,
        ),
        ("The size of tensor a (37) must match the size of tensor b (36)", 0),
    ],
)
def test_advice_on_samples_of_different_shapes(run: RunDir, text: str, collates: int) -> None:
    report_error(run, 1, "RuntimeError", text)
    record = failed(run)
    assert record["cause"] == "shape_mismatch"
    said = " ".join(record["advice"])
    assert ("collate_fn" in said, "drop_last" in said) == (bool(collates), not collates)


def test_the_exception_in_a_log_that_was_truncated_since(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text(TRACEBACK)
    size = log.stat().st_size
    assert exception_cause.of_log(log, 0, size) is None
    found = exception_cause.of_log(log, 0, size + 1)
    assert found and found.event and found.event.thrown

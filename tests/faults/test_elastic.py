"""The benchmark of lost machines, on a few of its cases: a run passes, an interrupted call continues,
and a run that is not the untouched one fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.elastic.network import unusable
from benchmarks.losses import ROUNDING
from tests.conftest import TOKEN
from tests.e2e.hooks import at_rank
from training.core.jsonl import Record
from training.core.rundir import read_records

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]
FORGETS = "from training.tasks import optim\noptim.Optimizers.load_state_dict = lambda *_: None"


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if why := unusable():
        pytest.skip(why)


def elastic(
    project: Path, token: str, folder: Path, only: str, hook: str = ""
) -> tuple[int, str, dict[str, Record]]:
    """(exit status, output, kept lines by name) of the benchmark."""
    variables = {**os.environ, TOKEN: token}
    if hook:
        (folder / "hook").mkdir()
        (folder / "hook/sitecustomize.py").write_text(hook)
        variables["PYTHONPATH"] = str(folder / "hook")
    flags = [f"--only={only}", "--random=0", f"--out={folder / 'out'}"]
    done = subprocess.run(
        [project / ".venv/bin/python", "-m", "benchmarks.elastic", *flags],
        cwd=project,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    kept = {line["name"]: line for line in read_records(folder / "out/cases.jsonl")}
    return done.returncode, done.stdout + done.stderr, kept


def test_a_machine_switched_off_and_a_link_that_loses_one_direction(
    project: Path, token: str, tmp_path: Path
) -> None:
    power, mute = "training-2x1-power-middle", "duet-2x1-mute-middle"
    status, output, kept = elastic(project, token, tmp_path, power)
    assert (status, list(kept)) == (0, [power]), output
    line = kept[power]
    assert line["exits"] == [0, -9] and line["world_sizes"] == [2, 1]
    assert line["same_bits"] and 0 < line["differs"] < ROUNDING
    assert 10 < line["pauses_s"][0] < 100, "no message has come from a machine that is off"

    again = elastic(project, token, tmp_path, power)
    assert again == (0, again[1], kept) and again[1] in output, "it is not run again"
    status, output, kept = elastic(project, token, tmp_path, mute)
    assert (status, list(kept)) == (0, [power, mute]), output
    assert kept[mute]["same_samples"] and kept[mute]["exits"] == [0, 6]
    assert not list((tmp_path / "out/runs").iterdir()), "no files of runs without problems"


def test_two_machines_that_lose_each_other_s_packets(
    project: Path, token: str, tmp_path: Path
) -> None:
    """Both are connected to the first one: only they notice."""
    name = "training-4x1-pair-middle"
    status, output, kept = elastic(project, token, tmp_path, name)
    assert (status, list(kept)) == (0, [name]), output
    assert kept[name]["exits"] == [0, 0, 6, 0] and kept[name]["world_sizes"] == [4, 3]


def test_a_restart_that_forgets_the_optimizer_is_found(
    project: Path, token: str, tmp_path: Path
) -> None:
    """The proof can fail."""
    name = "training-2x1-rank-middle"
    hook = at_rank(0, FORGETS) + at_rank(1, FORGETS)
    status, output, kept = elastic(project, token, tmp_path, name, hook)
    assert status == 1 and kept[name]["finished"], output
    assert not kept[name]["same_bits"] and kept[name]["problems"], output
    assert (tmp_path / "out/runs" / name / "console0.0.txt").exists()

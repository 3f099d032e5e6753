"""Runs whose processes are on other machines, on a shared disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made, look, old
from training.core import owner, rundir, standing
from training.core.heartbeat import Heartbeat
from training.core.rundir import RunDir
from training.launcher.slurm import controller
from training.monitor import rank_states, slurm_job
from training.monitor.rank_states import RankStates
from training.monitor.run_list import RunTable
from training.monitor.runs import facts
from training.watchdog import rank_process
from training.watchdog.probes import procfs

GONE = 1 << 30  # no pid of this machine
HERE = os.uname().nodename
UNKNOWN_JOB = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"


def there(made: Made, host: str = "gpu-box-2") -> Made:
    """`made`, running on another machine."""
    made.supervisor(GONE).steps()
    rundir.write_json(
        made.run.supervisor, {**(rundir.read_json(made.run.supervisor) or {}), "host": host}
    )
    return made


def silent(made: Made) -> None:
    past = time.time() - standing.ELSEWHERE_S - 10
    for file in made.run.path.rglob("*"):
        os.utime(file, (past, past))


def both(made: Made) -> tuple[str, str | None]:
    """State and reason, which the monitor and `duet runs` share."""
    seen, listed = look(made.run)["run"], facts.read(made.run.path)
    assert (listed.state, listed.reason) == (seen["state"], seen["reason"])
    return seen["state"], seen["reason"]


@pytest.fixture
def srun(tmp_path: Path) -> Made:
    """Ranks that srun or torchrun started on another machine, without a supervisor."""
    made = Made(tmp_path / "experiments/srun", starter={"pid": os.getpid(), "host": "node17"})
    for rank in (0, 1):
        beat = Heartbeat(made.run.heartbeat(rank), rank, pid=GONE)
        beat.step = 101
        beat.beat("forward")
    return made.steps()


def test_a_run_of_another_machine_is_running_while_it_writes(made: Made) -> None:
    (there(made).run.checkpoints / "step_00000100").mkdir()
    state, reason = both(made)
    assert state == "running" and reason and "gpu-box-2" in reason and "resume" not in reason
    seen = look(made.run)
    assert seen["run"]["supervisor_alive"] is None
    assert [r["alive"] for r in seen["ranks"]] == [None, None]


def test_a_run_of_another_machine_without_a_supervisor(srun: Made) -> None:
    assert both(srun)[0] == "running"
    seen = look(srun.run)
    assert [(r["alive"], r["late"], r["step"]) for r in seen["ranks"]] == [(None, False, 101)] * 2


def test_ranks_of_another_launcher_on_several_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 on this machine, rank 1 on another one with a PID that does not exist here."""
    place = {"kind": "rank", "local_world_size": 1, "world_size": 2}
    here = {"pid": os.getpid(), "host": HERE}
    made = Made(tmp_path / "experiments/srun", starter=here, place=place).steps()
    ranks = RankStates(made.run)
    beats = [Heartbeat(made.run.heartbeat(0), 0), Heartbeat(made.run.heartbeat(1), 1, pid=GONE)]
    for beat in beats:
        beat.beat("forward")
    looked, maps = [], rank_process.maps
    monkeypatch.setattr(
        rank_process, "maps", lambda pid, file: looked.append(pid) or maps(pid, file)
    )
    assert [r["alive"] for r in ranks.read(made.plan, {}, made.at)] == [True, None]
    file = made.run.heartbeat(0)
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    assert [r["alive"] for r in ranks.read(made.plan, {}, made.at)] == [True, None], "seen here"
    assert looked == [os.getpid(), GONE], "once for each process"
    monkeypatch.setattr(rank_states, "LOOK_S", 0.0)
    ranks.read(made.plan, {}, made.at)
    assert looked[2:] == [GONE]


def test_ranks_of_another_user_are_on_this_machine_if_they_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their mappings cannot be read. A process younger than a beat, or of a user who has not written
    it, has reused its PID."""
    place = {"kind": "rank", "local_world_size": 1, "world_size": 3}
    made, now = Made(tmp_path / "experiments/srun", ranks=3, place=place).steps(), time.time()
    for rank, pid, at in ((0, os.getpid(), now), (1, os.getpid(), now - 1e7), (2, GONE, now)):
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda at=at: at)
            Heartbeat(made.run.heartbeat(rank), rank, pid=pid).beat("forward")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("environ"))
    monkeypatch.setattr(procfs, "_memory", lambda pid, name: b"")
    for user, alive in ((7, True), (8, None)):
        monkeypatch.setattr(
            owner, "uid", lambda path, user=user: 7 if path.suffix == ".bin" else user
        )
        ranks = RankStates(made.run)
        for _ in range(2):
            assert [r["alive"] for r in ranks.read(made.plan, {}, 0.0)] == [alive, None, None]


def test_a_resume_on_another_machine_before_its_first_step(srun: Made) -> None:
    """It is not taken for a resume that has ended, which restores the plan before it."""
    srun.summary()
    rundir.write_json(srun.run.plan_before, srun.plan)
    old(srun.run.summary)
    rundir.write_json(srun.run.plan, srun.plan | {"created": time.time()})
    Heartbeat(srun.run.heartbeat(0), 0, pid=GONE).beat("loading torch")
    assert both(srun)[0] == "starting"


def test_a_silent_run_of_another_machine_is_never_final(made: Made) -> None:
    there(made)
    every = RunTable(made.run.path.parent)
    silent(made)
    assert both(made)[0] == "died"
    assert [r["run"]["state"] for r in every.read()["runs"]] == ["died"]
    made.step(101, 2.0, at=time.time())
    assert [r["run"]["state"] for r in every.read()["runs"]] == ["running"]
    made.summary()
    assert [r["run"]["state"] for r in every.read()["runs"]] == ["finished"]


@pytest.mark.parametrize(
    ("answer", "quiet_s", "state"),
    [
        ("echo JobState=TIMEOUT", 90, "died"),
        ("echo JobState=TIMEOUT", 30, "running"),
        ("echo JobState=RUNNING", 90, "running"),
        (UNKNOWN_JOB, 90, "died"),
        ("exit 1", 90, "running"),
    ],
)
def test_a_run_whose_slurm_job_has_ended_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, quiet_s: float, state: str
) -> None:
    """SLURM has killed it: it leaves no record, and its processes cannot be checked."""
    made = killed(tmp_path, quiet_s)
    calls = scontrol(tmp_path, monkeypatch, answer)
    found, reason = both(made)
    assert found == state and ("job 7" in str(reason)) == (state == "died")
    asked = calls.read_text() if calls.exists() else ""
    assert asked == ("show job -o 7\n" if quiet_s > slurm_job.QUIET_S else ""), "once"


def killed(folder: Path, quiet_s: float) -> Made:
    """A run of job 7 that has written nothing for this time."""
    made = there(Made(folder / "experiments/killed", age_s=200, submission="code_2"))
    rundir.write_json(made.run.path / "code_2.json", {"job": "7", "cluster": "home"})
    for file in made.run.path.rglob("*"):
        old(file, quiet_s)
    return made


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> Path:
    """A program that answers like this for a job; the file of its calls."""
    program, calls = folder / "bin/scontrol", folder / "calls"
    program.parent.mkdir(exist_ok=True)
    name = '[ "$2" = config ] && { echo "ClusterName = home"; exit; }'
    away = f"[ -e {folder}/away ] && {{ echo Unable to contact slurm controller >&2; exit 1; }}"
    program.write_text(f"#!/bin/sh\n{away}\n{name}\necho $* >>{calls}\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(controller, "_away", {})
    monkeypatch.setattr(controller, "_local", [])
    return calls


def test_a_slurmctld_that_was_away_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a monitor that has run since then."""
    made, now, later = killed(tmp_path, 90), time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now() + later[0])
    scontrol(tmp_path, monkeypatch, "echo JobState=TIMEOUT")
    (tmp_path / "away").touch()
    assert both(made)[0] == "running"
    (tmp_path / "away").unlink()
    later[0] = max(controller.PAUSE_S, slurm_job.ASK_EVERY_S) + 1
    assert both(made)[0] == "died"


def test_a_slurmctld_that_does_not_answer_holds_the_screen_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = scontrol(tmp_path, monkeypatch, "")
    (tmp_path / "bin/scontrol").write_text(f"#!/bin/sh\necho $* >>{calls}\nexec sleep 60\n")
    begun = time.monotonic()
    for name in ("one", "two"):
        assert both(killed(tmp_path / name, 90))[0] == "running"
    assert calls.read_text() == "show config\n"
    assert time.monotonic() - begun < 2 * slurm_job.LIMIT_S


def test_slurm_is_not_asked_for_a_run_that_counts_as_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands of them."""
    made = killed(tmp_path, standing.ELSEWHERE_S + 90)
    calls = scontrol(tmp_path, monkeypatch, "echo JobState=TIMEOUT")
    assert both(made)[0] == "died" and not calls.exists()


@pytest.mark.parametrize(
    ("user", "state"), [("owner", "died"), ("root", "died"), ("other", "running")]
)
def test_a_job_that_slurm_does_not_show_may_be_that_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str, state: str
) -> None:
    """With PrivateData=jobs the answer is that for a job that SLURM has forgotten."""
    made = killed(tmp_path, 90)
    scontrol(tmp_path, monkeypatch, UNKNOWN_JOB)
    owner = made.run.path.stat().st_uid
    uid = {"owner": owner, "root": 0, "other": owner + 1}[user]
    monkeypatch.setattr(os, "getuid", lambda: uid)
    assert both(made)[0] == state


def test_processes_of_another_machine_are_not_those_of_this_one(made: Made) -> None:
    """Its PIDs may exist here."""
    made.supervisor(os.getpid())
    known = rundir.read_json(made.run.supervisor) or {}
    rundir.write_json(made.run.supervisor, known | {"host": "gpu-box-2"})
    seen = look(made.run)
    assert seen["run"]["state"] == "starting"
    assert [r["alive"] for r in seen["ranks"]] == [None, None]


def test_a_process_of_another_pid_namespace_cannot_be_checked(made: Made) -> None:
    """That of another container, for example, with the host name of this one."""
    own = standing.identity(os.getpid())
    assert own["pid_namespace"] == str(Path("/proc/self/ns/pid").readlink())
    assert standing.runs_here(own, 0.0) and standing.other_host({"starter": own}, {}) is None
    made.supervisor(GONE).steps()
    known = (rundir.read_json(made.run.supervisor) or {}) | {"host": HERE}
    for more, state in (({}, "died"), ({"pid_namespace": "pid:[1]"}, "running")):
        rundir.write_json(made.run.supervisor, known | more)
        assert both(made)[0] == state, more
        assert standing.runs_here(known | more, 0.0) == (state == "running")


def test_a_machine_of_the_same_name_is_another_one(made: Made) -> None:
    """Unlike this machine before it was restarted: what it had started was older than its boot."""
    own = standing.identity(os.getpid())
    assert own["boot"] == standing.BOOT_ID.read_text().strip() and standing.is_here(own)
    made.supervisor(GONE).steps()
    known = (rundir.read_json(made.run.supervisor) or {}) | {"host": HERE, "boot": "other"}
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for started, state in ((booted - 60.0, "died"), (booted + 60.0, "running")):
        rundir.write_json(made.run.supervisor, known | {"started": started})
        plan = rundir.read_json(made.run.plan) or {}
        rundir.write_json(made.run.plan, plan | {"created": started - 1.0})
        assert both(made)[0] == state
        assert standing.runs_here(known | {"started": started}, 0.0) == (state == "running")


def node1(made: Made, host: str, pid: int) -> RunDir:
    """The second machine of a run, with rank 1."""
    node = RunDir(made.run.path, 1)
    node.create()
    known = rundir.read_json(made.run.supervisor) or {}
    ranks = [{"rank": 1, "pid": pid}]
    rundir.write_json(node.supervisor, known | {"host": host, "ranks": ranks})
    return node


def test_ranks_of_another_machine_of_a_run(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pids may exist here, and its monotonic clock counts from its own boot."""
    made.supervisor(os.getpid()).steps().beats(ranks=[0])
    known = rundir.read_json(made.run.supervisor) or {}
    rundir.write_json(made.run.supervisor, known | {"host": HERE, "ranks": known["ranks"][:1]})
    with monkeypatch.context() as patched:
        booted_later = time.monotonic_ns() - 10**13
        patched.setattr(time, "monotonic_ns", lambda: booted_later)
        made.beats(ranks=[1])
    node1(made, "gpu-box-2", os.getpid())
    seen = look(made.run)
    assert [(r["alive"], r["late"]) for r in seen["ranks"]] == [(True, False), (None, False)]
    node1(made, HERE, GONE)
    assert [r["alive"] for r in look(made.run)["ranks"]] == [True, False]


def test_a_renumbered_rank_is_that_of_the_newest_supervisor(made: Made) -> None:
    """Machine 1 was lost; its number is now that of a rank here."""
    made.supervisor(os.getpid()).steps()
    old(node1(made, "gpu-box-2", GONE).supervisor)
    assert [r["alive"] for r in look(made.run)["ranks"]] == [True, True]
    one = rundir.read_json(made.run.supervisor) or {}
    rundir.write_json(made.run.supervisor, one | {"ranks": one["ranks"][:1]})
    rundir.write_json(made.run.plan, made.plan | {"ranks": 1})
    assert [r["alive"] for r in look(made.run)["ranks"]] == [True]


def test_a_restart_on_another_machine_is_seen(made: Made) -> None:
    """Between two starts it looks like a failure; the plan may stay as it is."""
    every = RunTable(there(made).run.path.parent)
    made.failure()
    assert [r["run"]["state"] for r in every.read()["runs"]] == ["failed"]
    made.run.failure.unlink()
    assert [r["run"]["state"] for r in every.read()["runs"]] == ["running"]

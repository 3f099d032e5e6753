"""`--min_ranks` on several machines: which ranks remain after the loss of a machine, and on which
machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.node_plans import plan as plan_of_node
from tests.unit.test_launch_fewer_ranks import failed, gpu, plan
from tests.unit.test_launch_recovery import record, run
from training.core.failure_kinds import SILENT
from training.core.rundir import RunDir
from training.launcher import (
    fewer_ranks,
    local_ranks,
    recovery,
    rejoin,
    replan,
    restart_order,
    seats,
)
from training.launcher.outcome import Outcome
from training.launcher.recovery import Recovery
from training.launcher.recovery_policy import remedy
from training.launcher.restart import Failure, GiveUp, Restart, Team

__all__ = ["run"]  # a fixture


def node_plan(node: int, nodes: int = 3, **more: Any) -> dict[str, Any]:
    """Plan of a machine with two ranks."""
    made = plan(2 * nodes, **more)
    gpus = [gpu(0), gpu(1)]
    own = {"per_node": 2, "gpus": gpus, "bindings": [None] * 2}
    place = {"node_rank": node, "nnodes": nodes}
    return made | {
        "local_ranks": 2,
        "gpus": gpus,
        "numa": {"value": [None] * 2, "memory": True, "reason": ""},
        "place": place,
        "elastic": made["elastic"] | own,
    }


def lost(*nodes: int, kind: Any = SILENT, back: tuple[int, ...] = ()) -> Failure:
    return Failure("nccl_network", kind, None, 0, 23, 20, "", "gone", nodes=nodes, back=back)


def after(before: dict[str, Any], failure: Failure) -> dict[str, Any]:
    chosen = remedy(failure, before, [])  # type: ignore[arg-type]
    assert isinstance(chosen, Restart) and chosen.team, chosen
    return dict(replan.with_team(before, chosen.team, chosen.why))  # type: ignore[arg-type]


def of_network(node: int, port: int) -> dict[str, Any]:
    made = plan_of_node(node, port)
    elastic = {"per_node": 2, "ranks": 4, "seats": [0, 1, 2, 3], "lost": [], "rejoined": []}
    return made | {"elastic": elastic | {"min_ranks": 2}}


class Line:
    """Node 0's connections: `away` are missing, `back` have joined again, GPUs that work again."""

    def __init__(
        self, away: tuple[int, ...], back: tuple[int, ...], works: tuple[int, ...] = ()
    ) -> None:
        self.away, self.ready_again, self.works = away, back, set(works)
        self.wires = dict.fromkeys((1, 2))

    def there(self, node: int) -> bool:
        return node not in self.away

    def missing(self) -> list[int]:
        return list(self.away)


def test_every_machine_finds_its_own_ranks() -> None:
    for node, ranks, gpus in ((0, range(2), 2), (1, range(2, 2), 0), (2, range(2, 4), 2)):
        found = after(node_plan(node), lost(1))
        assert found["elastic"]["seats"] == [0, 1, 4, 5]
        assert seats.ranks(found) == ranks  # type: ignore[arg-type]
        assert (found["ranks"], found["local_ranks"], len(found["gpus"])) == (4, len(ranks), gpus)
        assert [one["node"] for one in found["elastic"]["lost"]] == [1, 1]
    team = local_ranks.of_node(found, "a", 1)  # type: ignore[arg-type]
    variables = team.variables(3, ours=False)
    assert (variables["LOCAL_RANK"], variables["GROUP_RANK"]) == ("1", "1")
    assert variables["GROUP_WORLD_SIZE"] == "2"


def test_one_gpu_of_a_machine_is_named_with_it() -> None:
    before = node_plan(1)
    found = after(before, failed(3))
    assert fewer_ranks.names(found, [3]) == "GPU 1 on node 1"  # type: ignore[arg-type]
    found = after(found, lost(1))
    assert fewer_ranks.names(found, [2, 3]) == "node 1"  # type: ignore[arg-type]
    assert found["elastic"]["seats"] == [0, 1, 4, 5]


def test_a_silent_machine_gets_time_to_end_its_ranks() -> None:
    chosen = remedy(lost(2), node_plan(0), [])  # type: ignore[arg-type]
    assert isinstance(chosen, Restart) and chosen.pause_s == fewer_ranks.SILENT_PAUSE_S


def test_a_machine_without_a_rank_replaces_the_next_lost_one() -> None:
    """8 sequences: 4 ranks of 6."""
    found = after(node_plan(0, 4, size=1, total=8 * 32), lost(2))
    assert found["elastic"]["seats"] == [0, 1, 2, 3]
    assert seats.nodes(found) == [0, 1]  # type: ignore[arg-type]
    assert after(found, lost(1))["elastic"]["seats"] == [0, 1, 6, 7]


def test_without_a_rank_on_the_first_machine_the_run_ends() -> None:
    found = after(node_plan(0), failed(0))
    assert isinstance(remedy(failed(0), found, []), GiveUp)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [True, False])
def test_a_coordinator_with_a_bad_disk_leaves_the_run_to_another(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    """`other`: one with a disk of its own is connected."""
    monkeypatch.setattr(recovery.os, "access", lambda *_: False)
    tried = recovery.Recovery(run, node_plan(0))  # type: ignore[arg-type]
    line: Any = Line((), ())
    line.other_disks = lambda: other
    assert tried.choose(record(), Outcome(), line) is None  # type: ignore[arg-type]
    assert tried.hand_over is other and "cannot be written" in tried.given_up


def test_another_failure_is_restarted_with_the_machines_that_are_back() -> None:
    found = after(node_plan(0), lost(1))
    killed = failed(0, "killed", back=(2, 3))
    chosen = fewer_ranks.with_machines(Restart(1), killed, found)  # type: ignore[arg-type]
    assert isinstance(chosen, Restart) and chosen.team and chosen.number == 1
    assert isinstance(chosen.team, Team) and chosen.team.seats == (0, 1, 2, 3, 4, 5)
    found = dict(replan.with_team(found, chosen.team, ""))  # type: ignore[arg-type]
    assert found["elastic"]["lost"] == []


@pytest.mark.parametrize(
    ("first", "cause", "back"),
    [
        (None, "gpu_hardware", [2, 3]),
        (lost(1), "gpu_hardware", [2, 3]),
        (failed(3), "gpu_hardware", [2, 3]),
        (failed(2), "gpu_hardware", [3]),
        (failed(2), "no_gpu", [3]),
        (failed(2), "peer_died", [2, 3]),
    ],
)
def test_a_gpu_that_was_defective_twice_does_not_return_with_its_machine(
    first: Failure | None, cause: str, back: list[int]
) -> None:
    """The GPU of seat 2. All that `first` has lost comes back, then its machine is lost as well."""
    found = node_plan(0)
    if first:
        found = after(found, first)
        again = tuple(one["seat"] for one in found["elastic"]["lost"])
        team = fewer_ranks.choose(found, back=again)  # type: ignore[arg-type]
        assert isinstance(team, Team)
        order = restart_order.made(found, Restart(0, team=team), 2)  # type: ignore[arg-type]
        found = dict(restart_order.followed(found, order))  # type: ignore[arg-type]
    assert "keeps_savings" not in found
    found = after(after(found, failed(2)), lost(1))
    last = found["elastic"]["lost"][0]
    assert (last["seat"], last["cause"]) == (2, "gpu_hardware")
    last["cause"] = cause
    assert rejoin.back(found, Line((1,), (1,))) == back  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "own"), [(1, {1: "gpu_hardware"}), (3, {3: "gpu_hardware"})])
def test_only_the_gpu_that_has_failed_is_defective(rank: int, own: dict[int, str]) -> None:
    """Not those of a machine that is lost with it."""
    found = after(node_plan(0), failed(rank, nodes=(1,)))
    causes = {one["seat"]: one["cause"] for one in found["elastic"]["lost"]}
    assert causes == {2: "peer_died", 3: "peer_died"} | own


@pytest.mark.parametrize(
    ("moved", "ranks", "limit", "size"),
    [({"back": (4, 5)}, 6, 3, 2), ({"nodes": (2,)}, 4, 2, 1)],
    ids=["back", "nodes"],
)
def test_the_smaller_batch_and_other_machines_are_one_plan_on_every_machine(
    run: RunDir, moved: dict[str, tuple[int, ...]], ranks: int, limit: int, size: int
) -> None:
    """60 sequences: `limit` suits the ranks that were out of memory with 5, not those after."""
    own, other = (node_plan(node, size=5, total=60 * 32) for node in (0, 1))
    if "back" in moved:
        own, other = after(own, lost(2)), after(other, lost(2))
    tried = Recovery(run, own)  # type: ignore[arg-type]
    failure = failed(0, "gpu_oom", kind="error", **moved)
    smaller = remedy(failure, own, [])  # type: ignore[arg-type]
    assert isinstance(smaller, Restart) and smaller.changes == {"device_batch_size": limit}
    chosen = fewer_ranks.with_machines(smaller, failure, own)  # type: ignore[arg-type]
    assert isinstance(chosen, Restart)
    tried._failures.append(failure)
    order = tried.order(chosen)
    assert tried.begin(chosen)
    for found in (own, restart_order.followed(other, order)):  # type: ignore[arg-type]
        assert (found["ranks"], found["batch"]["device_sequences"]) == (ranks, size)
        assert found["batch"]["accumulation"] == 60 // ranks // size
        assert found["elastic"]["device_batch_size"] == limit
        assert found["keeps_savings"]


def test_a_code_error_is_not_the_machine_s() -> None:
    raised = Failure("code_error", "error", 0, 1, 23, 20, "", "ValueError", nodes=(1,))
    assert isinstance(remedy(raised, node_plan(0), []), GiveUp)  # type: ignore[arg-type]


def test_a_machine_that_is_back_before_the_restart_waits_for_a_checkpoint(run: RunDir) -> None:
    """Its launcher was started again within the grace of the other ranks."""
    tried = Recovery(run, node_plan(0))  # type: ignore[arg-type]
    gone = record(kind="gone", cause="peer_died", rank=None, status=0, node=1)
    chosen = tried.choose(gone, Outcome(), Line((1,), (1,)))  # type: ignore[arg-type]
    assert chosen and chosen.team and chosen.team.back == ()
    order = tried.order(chosen)["team"]
    away = {one["seat"] for one in order["lost"]}
    assert away == {2, 3} and not away.intersection(order["seats"])


def test_a_machine_that_takes_over_knows_the_batch_that_was_too_large(
    run: RunDir, tmp_path: Path
) -> None:
    """4 sequences were out of memory: 2 were left, and no later choice of ranks has more."""
    first, second = node_plan(0), node_plan(1)
    order = Recovery(run, first).order(Restart(1, {"device_batch_size": 2}, "gpu_oom"))  # type: ignore[arg-type]
    other = RunDir(tmp_path / "run", 1)
    other.create()
    assert Recovery(other, second).follow(order, None)  # type: ignore[arg-type]
    assert second["config"]["device_batch_size"] == 2 == second["elastic"]["device_batch_size"]
    second["place"]["leader"] = 1
    assert after(second, lost(0))["config"]["device_batch_size"] == 2

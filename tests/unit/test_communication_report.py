"""What the communication test reports and advises, from synthetic outcomes."""

from __future__ import annotations

import pytest

from tests.unit.communication_outcomes import LARGE, ended, find, hung
from training.host.kernel_quotes import KernelQuotes
from training.launcher.communication import analysis
from training.launcher.communication.analysis import CommunicationFinding
from training.launcher.communication.result import AllReduceTimes, CommunicationResult, hardware
from training.plan.communication import command


@pytest.mark.parametrize(
    ("ranks", "text"), [([1], "rank 1"), ([0, 2], "ranks 0 and 2"), ([0, 1, 2], "ranks 0, 1 and 2")]
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert analysis.ranks_text(ranks) == text


def test_a_good_result_is_one_line() -> None:
    (check,) = CommunicationResult(
        2,
        "cpu",
        "gloo",
        CommunicationFinding(analysis.OK, ""),
        AllReduceTimes(8 << 20, 0.2, 1.9, 1.9),
    ).checks()
    text = "all_reduce of 8 MiB over 2 ranks: 1.9 GB/s, 1 KiB in 0.2 ms; data correct"
    assert (check.name, check.status, check.text, check.fixes) == ("communication", "ok", text, [])
    (check,) = CommunicationResult(
        4,
        "cuda",
        "nccl",
        CommunicationFinding(analysis.OK, ""),
        AllReduceTimes(64 << 20, 0.031, 42.4, 63.6),
    ).checks()
    assert (
        check.text
        == "all_reduce of 64 MiB over 4 ranks: 42 GB/s (on the bus 64), 1 KiB in 0.031 ms; data "
        "correct"
    )


def test_the_result_of_a_single_rank() -> None:
    (check,) = CommunicationResult(1, "cpu", "none", None).checks()
    assert (check.status, check.text) == ("ok", "one rank: nothing to test")


def test_gpus_that_hang_get_advice() -> None:
    found = find(hung(LARGE, LARGE))
    (check,) = CommunicationResult(
        2, "cuda", "nccl", found, variables={"NCCL_P2P_DISABLE": "0"}
    ).checks()
    again = command(2, "cuda")
    assert check.status == "error"
    assert check.fixes == [
        "export NCCL_P2P_DISABLE=1",
        f"NCCL_DEBUG=INFO {again}   # its last lines show what NCCL was about to do",
        *hardware(KernelQuotes()),
    ]
    (check,) = CommunicationResult(
        2, "cuda", "nccl", found, first=found, variables={"NCCL_P2P_DISABLE": "1"}
    ).checks()
    assert (
        check.text
        == "after 20 s all ranks hang in the all_reduce of 8 MiB; the same with NCCL_P2P_DISABLE=1"
    )
    assert "export NCCL_P2P_DISABLE=1" not in check.fixes, "it was tried"
    (check,) = CommunicationResult(2, "cuda", "nccl", find(ended(1, 1)), variables={}).checks()
    assert "export NCCL_P2P_DISABLE=1" not in check.fixes, "a failed rank has its own reason"


def test_both_failures_are_named_where_they_differ() -> None:
    first = find(hung(LARGE, LARGE))
    for second in (find(ended(1, 1)), find(hung("import of torch", "import of torch"))):
        (check,) = CommunicationResult(2, "cuda", "nccl", second, first=first).checks()
        assert check.status == "error"
        assert first.text in check.text and second.text in check.text


def test_the_fix_tests_the_gpus_of_the_run() -> None:
    result = CommunicationResult(
        2, "cuda", "nccl", find(hung(LARGE, LARGE)), variables={"CUDA_VISIBLE_DEVICES": "2,3"}
    )
    assert result.again == f"CUDA_VISIBLE_DEVICES=2,3 {command(2, 'cuda')}"
    assert any(f" {result.again} " in fix for fix in result.checks()[0].fixes)
    assert command(2, "cuda", "2, 3").startswith("CUDA_VISIBLE_DEVICES='2, 3' ")
    assert command(2, "cpu", "2,3") == command(2, "cpu")


def test_gpus_that_work_without_peer_to_peer_are_a_warning() -> None:
    figures = AllReduceTimes(64 << 20, 0.05, 9.5, 9.5)
    result = CommunicationResult(
        2,
        "cuda",
        "nccl",
        CommunicationFinding(analysis.OK, ""),
        figures,
        first=find(hung(LARGE, LARGE)),
        note="remembered in /c.json",
    )
    (check,) = result.checks()
    assert result.ok and result.first and check.status == "warning"
    assert check.text == (
        "works only without GPU peer-to-peer copies (NCCL_P2P_DISABLE=1). With them: after 20 s "
        "all ranks hang in the all_reduce of 8 MiB. "
        "Without: all_reduce of 64 MiB over 2 ranks: 9.5 GB/s, 1 KiB in 0.05 ms; data correct; "
        "remembered in /c.json"
    )


def test_the_interface_that_a_user_has_chosen_is_named() -> None:
    found = find(ended(1, 1, at="rendezvous"))
    (check,) = CommunicationResult(
        2, "cpu", "gloo", found, variables={"GLOO_SOCKET_IFNAME": "eth7"}
    ).checks()
    assert check.fixes == [
        "unset GLOO_SOCKET_IFNAME   # it is 'eth7'; ranks of one machine communicate over 'lo'",
        "ip addr show lo   # must be UP with 127.0.0.1, without a firewall",
        f"TORCH_CPP_LOG_LEVEL=INFO {command(2, 'cpu')}",
    ]
    assert (
        len(
            CommunicationResult(2, "cpu", "gloo", found, variables={"GLOO_SOCKET_IFNAME": "lo"})
            .checks()[0]
            .fixes
        )
        == 2
    )


def test_evidence_is_below_the_text() -> None:
    (check,) = CommunicationResult(
        2,
        "cpu",
        "gloo",
        CommunicationFinding(analysis.FAILED, "rank 1 failed", [1], "rendezvous", ["a", "b"]),
    ).checks()
    assert check.text == "rank 1 failed\n    │ a\n    │ b"

"""State of GPUs and their links through the real NVML client."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import python
from training.core.messages import msg
from training.host import gpu_choice
from training.host.gpus import EXCLUSIVE, PROHIBITED, SLOWDOWNS, Gpu, slowdowns
from training.plan.preflight import gpu_health, one_gpu, report
from training.plan.preflight.gpu_state import Pair, State
from training.tasks.gpt.memory import Estimate

Nvidia = Callable[..., dict[str, Any]]
QUIET = {"REASONS": 1, "ECC": 0, "WIDTH": 16, "GENERATION": 1}


def checks(variables: dict[str, str]) -> list[dict[str, Any]]:
    """Health checks of the GPUs visible to a process with this environment."""
    code = (
        "import json; from training.host import gpus; from training.plan.preflight import "
        "gpu_health;"
        "print(json.dumps([c.record() for c in gpu_health.checks(gpus.inventory().gpus)]))"
    )
    done = python("-c", code, **variables)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_healthy_gpus_are_fine(nvidia: Nvidia) -> None:
    first, second, links = checks(nvidia(**QUIET))
    assert (first["name"], second["name"], links["name"]) == (
        "GPU 0 state",
        "GPU 1 state",
        "GPU links",
    )
    assert (
        first["text"]
        == "not slowed down; no memory errors; PCIe ×16, generation 1 now, 4 at most; persistence "
        "mode on; clocks: idle"
    )
    assert links["text"] == "over the CPU's PCIe root, direct copies"
    assert {c["status"] for c in (first, second, links)} == {"ok"}
    assert not any(c["fixes"] for c in (first, second, links))


@pytest.mark.parametrize("reasons", [0, 1, 2, 4, 1 | 2 | 4 | 16 | 256])
def test_clocks_that_are_low_for_normal_reasons(reasons: int, nvidia: Nvidia) -> None:
    assert checks(nvidia(REASONS=reasons))[0]["status"] == "ok"


@pytest.mark.parametrize(
    ("reasons", "expected", "fix"),
    [
        (8, "slowed down by the hardware", "check its power cables and the power supply"),
        (32, "slowed down for heat (driver)", "improve its cooling: fans, dust, room temperature"),
        (
            8 | 64,
            "slowed down for heat (hardware)",
            "improve its cooling: fans, dust, room temperature",
        ),
        (
            8 | 128,
            "slowed down by the power supply's brake",
            "check its power cables and the power supply",
        ),
        (
            4 | 128,
            "slowed down by the power supply's brake",
            "check its power cables and the power supply",
        ),
    ],
)
def test_clocks_that_are_low_for_abnormal_reasons(
    reasons: int, expected: str, fix: str, nvidia: Nvidia
) -> None:
    first, second, _ = checks(nvidia(REASONS=f"{reasons},1"))
    assert (first["status"], second["status"]) == ("warning", "ok")
    assert first["text"].startswith(f"{expected}; no memory errors")
    assert first["fixes"] == [
        fix,
        "nvidia-smi -i 0 -q -d PERFORMANCE,TEMPERATURE,POWER   # details",
    ]


def test_chinese_words_for_the_driver_s_answers(nvidia: Nvidia) -> None:
    chinese = {"DUET_LANG": "zh"}
    slow, quick, _ = checks(nvidia(REASONS="64,1") | chinese)
    assert slow["text"].startswith("因过热降频（硬件）；") and quick["status"] == "ok"
    code = (
        "from training.host import gpu_words, gpus\n"
        "for one in gpus.SLOWDOWNS.values(): print(gpu_words.slowdown(one))\n"
        "for one in (gpus.EXCLUSIVE, gpus.PROHIBITED): print(gpu_words.compute_mode(one))"
    )
    english, translated = (
        python("-c", code, DUET_LANG=language).stdout.splitlines() for language in ("en", "zh")
    )
    assert english == [*SLOWDOWNS.values(), EXCLUSIVE, PROHIBITED]
    assert len(english) == len(translated) and not set(english) & set(translated)


def test_a_compute_mode_is_refused_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(0, "GPU-0", "Fake", 32 << 30, 31 << 30, 0, 40, 50.0, compute_mode=PROHIBITED)
    estimate = Estimate(1 << 30, 0, 0, 0, 0, 0, 0, 0)
    monkeypatch.setenv("DUET_LANG", "zh")
    check = one_gpu.check(gpu, estimate, [], set(), measured=False)
    assert (check.status, check.name) == ("error", "GPU 0")
    assert "'禁止'" in check.text and PROHIBITED not in check.text


def test_a_gpu_with_unknown_memory_has_no_placeholder() -> None:
    estimate = Estimate(1 << 30, 0, 0, 0, 0, 0, 0, 0)
    texts = []
    for total, free in ((None, None), (32 << 30, None), (None, 8 << 30)):
        gpu = Gpu(0, "GPU-0", "Fake", total, free, None, 40, 50.0)
        check = one_gpu.check(gpu, estimate, [], set(), measured=False)
        texts.append(check.text)
    unreported = [
        msg("plan.gpus.free_unknown", shown=shown, occupied="")
        for shown in ("Fake", "Fake, 32.0 GiB")
    ]
    assert texts == [*unreported, f"Fake, {msg('plan.memory.free', room='8.0 GiB')}"]
    word = msg("core.units.unknown")
    assert gpu_choice._described(Gpu(1, "GPU-1", "Fake", None, None, None, None, None)) == msg(
        "host.gpus.described", index=1, free=word, use=word
    )


def test_the_generic_hardware_bit_is_the_last_resort() -> None:
    assert slowdowns(8) == ("slowed down by the hardware",)
    assert slowdowns(8 | 64 | 128) == (
        "slowed down for heat (hardware)",
        "slowed down by the power supply's brake",
    )
    assert slowdowns(0) == ()


@pytest.mark.parametrize(
    ("values", "expected", "fix"),
    [
        (
            {"ECC": "0,3"},
            "3 uncorrected memory errors since the driver was loaded",
            "sudo nvidia-smi -i 1 --gpu-reset   # or reboot; if it recurs",
        ),
        (
            {"ECC": "0,1"},
            "1 uncorrected memory error since the driver was loaded",
            "sudo nvidia-smi -i 1 --gpu-reset   # or reboot; if it recurs",
        ),
        (
            {"REMAP": "0,1"},
            "damaged memory will be remapped at the next reset",
            "sudo nvidia-smi -i 1 --gpu-reset   # or reboot",
        ),
        (
            {"RETIRED": "0,1"},
            "damaged memory will be remapped at the next reset",
            "sudo nvidia-smi -i 1 --gpu-reset   # or reboot",
        ),
        (
            {"REMAP": "0,2"},
            "damaged memory could not be remapped to spare memory",
            "replace the card",
        ),
        (
            {"WIDTH": "16,8"},
            "its PCIe link has 8 of 16 lanes: slower communication between ranks",
            "reseat the card",
        ),
    ],
    ids=str,
)
def test_hardware_problems(values: dict[str, str], expected: str, fix: str, nvidia: Nvidia) -> None:
    first, second, _ = checks(nvidia(**values))
    assert (first["status"], second["status"]) == ("ok", "warning")
    assert second["text"].startswith(f"{expected}; ")
    assert second["fixes"][0].startswith(fix)
    assert ("no memory errors" in second["text"]) == ("WIDTH" in values)


def test_a_link_with_the_width_of_the_slot(nvidia: Nvidia) -> None:
    first = checks(nvidia(WIDTH=8, WIDTH_MOST=8, GENERATION=1, GENERATION_MOST=5))[0]
    assert (first["status"], first["text"].split("; ")[2]) == (
        "ok",
        "PCIe ×8, generation 1 now, 5 at most",
    )


@pytest.mark.parametrize(("use", "status"), [(5, "ok"), (97, "warning")])
def test_a_low_generation_matters_under_load(use: int, status: str, nvidia: Nvidia) -> None:
    first = checks(nvidia(GENERATION=1, GENERATION_MOST=4, USE=use))[0]
    assert first["status"] == status
    assert ("generation 1 of 4 while the GPU is 97 % busy" in first["text"]) == (status != "ok")


def test_power_ecc_and_normal_limits_are_informational(nvidia: Nvidia) -> None:
    values = {"POWER_LIMIT": "300,575", "POWER_DEFAULT": 575, "ECC_MODE": "0,1", "REASONS": "6,1"}
    first, second, _ = checks(nvidia(**values))
    assert (first["status"], second["status"]) == ("ok", "ok")
    assert first["text"].split("; ")[4:] == [
        "power limit 300 W, default 575 W",
        "clocks: fixed by the user, at the power limit",
        "ECC off",
    ]
    assert second["text"].split("; ")[4:] == ["power limit 575 W", "clocks: idle", "ECC on"]


def test_the_slot_of_a_card(nvidia: Nvidia, tmp_path: Path) -> None:
    folder = tmp_path / "0000:41:00.0"
    folder.mkdir()
    (folder / "max_link_width").write_text("16\n")
    code = (
        "from pathlib import Path\n"
        "from training.host import gpus\n"
        "from training.plan.preflight import gpu_state\n"
        f"gpus.PCI_DEVICES = Path({str(tmp_path)!r})\n"
        "first, second = gpu_state.read_state(gpus.inventory().gpus)[0]\n"
        "print(first.card_width, first.numa, second.card_width)"
    )
    for node, shown in (("-1", None), ("1", 1)):
        (folder / "numa_node").write_text(f"{node}\n")
        done = python("-c", code, **nvidia(BUS="0000:41:00.0"))
        assert (done.returncode, done.stdout) == (0, f"16 {shown} None\n"), done.stderr


@pytest.mark.parametrize(("most", "status"), [(4, "warning"), (8, "ok"), (16, "ok")])
def test_a_slot_with_fewer_lanes_than_the_card(most: int, status: str) -> None:
    state = State(1, (), 0, None, None, most, most, 4, 4, None, None, card_width=16)
    (check,) = gpu_health.health(replace(state, card_generation=5, numa=1))
    assert check.status == status and bool(check.fixes) == (status != "ok")
    assert ("the card ×16" in check.text) == (most < 16)
    assert "generation 5" in check.text and check.text.endswith("NUMA node 1")


def test_persistence_mode_is_informational(nvidia: Nvidia) -> None:
    first = checks(nvidia(PERSISTENCE=0))[0]
    assert (first["status"], first["text"].split("; ")[3]) == ("ok", "persistence mode off")


def test_a_driver_without_information(nvidia: Nvidia) -> None:
    first, second, links = checks(nvidia(NOT_SUPPORTED=1))
    assert first == {
        "code": "preflight.gpu_state",
        "name": "GPU 0 state",
        "status": "ok",
        "text": "no hardware state reported by the driver",
        "fixes": [],
    }
    assert (second["status"], links["status"], links["text"]) == ("ok", "ok", "unknown")


def test_a_driver_without_newer_calls(old_driver: dict[str, str], nvidia: Nvidia) -> None:
    variables = nvidia(REASONS=64, RETIRED=1) | old_driver
    slow, damaged = (one["text"] for one in checks(variables)[:2])
    assert slow.startswith("slowed down for heat (hardware); PCIe")
    assert damaged == "damaged memory will be remapped at the next reset"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"NVLINKS": "4"}, "NVLink; NVLinks up: 4 on GPU 0, 4 on GPU 1"),
        ({"NVLINKS": "4,0"}, "over the CPU's PCIe root, direct copies; NVLinks up: 4 on GPU 0"),
        (
            {"TOPOLOGY": 50, "P2P": 1},
            "over two CPU sockets, through host memory (not supported by the chipset)",
        ),
        ({"P2P": 5}, "over the CPU's PCIe root, through host memory"),
        ({"TOPOLOGY": 10}, "on one PCIe switch, direct copies"),
        ({"TOPOLOGY": 77}, "direct copies"),
    ],
    ids=str,
)
def test_how_two_gpus_reach_each_other(
    values: dict[str, object], expected: str, nvidia: Nvidia
) -> None:
    assert checks(nvidia(**values))[2]["text"] == expected


def test_four_gpus_of_which_two_have_a_bridge() -> None:
    pairs = [
        Pair(a, b, "over two CPU sockets", (a, b) == (0, 1), True)
        for a in range(3)
        for b in range(a + 1, 3)
    ]
    text = gpu_health.links([], pairs).text
    assert text == "NVLink (0–1); over two CPU sockets, direct copies (0–2, 1–2)"


def test_one_gpu_has_no_links(nvidia: Nvidia) -> None:
    assert [c["name"] for c in checks(nvidia(COUNT=1))] == ["GPU 0 state"]


def test_a_driver_that_stopped_responding(nvidia: Nvidia) -> None:
    code = (
        "from training.host.gpus import Gpu; from training.plan.preflight import gpu_health;"
        "print(gpu_health.checks([Gpu(0, 'GPU-0', 'x', None, None, None, None, None)]))"
    )
    done = python("-c", code, **nvidia(INIT=9))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_unknown_facts_are_omitted() -> None:
    state = State(3, None, 0, None, None, None, None, None, 5, None, None)
    (check,) = gpu_health.health(state)
    assert check.text == "no memory errors; PCIe generation unknown now, 5 at most"


def test_each_fault_has_its_own_row_and_no_command_is_shown_twice() -> None:
    state = State(1, (SLOWDOWNS[0x40], SLOWDOWNS[0x80]), 2, True, None, 8, 16, 4, 4, None, None)
    found = gpu_health.health(state)
    assert [check.status for check in found] == ["warning"] * 4  # heat, power, memory, lanes
    assert [len(check.fixes) for check in found] == [2, 2, 1, 1]
    shown = report.table([check.record() for check in found]).splitlines()
    commands = [
        line.split("   #")[0].split(maxsplit=1)[1] for line in shown if "nvidia-smi" in line
    ]
    assert len(commands) == len(set(commands)) == 2
    (only,) = gpu_health.health(replace(state, slowdowns=(), link_width=16, remap_failed=True))
    assert only.fixes == [msg("plan.gpu.replace")]

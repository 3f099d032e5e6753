"""The catalogue of failures: every entry matches its samples, has texts in both languages, a source
and a log."""

from __future__ import annotations

import itertools
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import re2

from tests.cases import each
from training.core import cause_ids, messages
from training.core.cause_ids import NONE, UNKNOWN
from training.diagnose import patterns, scan, signatures
from training.diagnose.advice import COMMANDS, KERNEL_READ, RANK_STACKS, advice, filled
from training.diagnose.result import diagnose
from training.diagnose.signatures import EVIDENCE, ROLES, ROOT, WEAK, LocalizedText, Signature

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
# Users' scripts and issue trackers rely on these ids.
IDS = set(json.loads((LOGS / "causes.json").read_text()))
HEALTHY = "\n".join(
    f"[2025-11-06 10:00:{i % 60:02d}] Epoch: {i // 9}, Iter: {i}, Loss: 0.{i:04d}, error: 0.023, "
    f"lr: 2e-4, val_error 0.2, it/s 3.80, "
    f"INFO timeout=1800 WARNING retry nccl watchdog started, saving checkpoint to "
    f"/data/exp_{i}/epoch.pt, "
    f"step {i:05d}/20000 | loss: 3.1 | tok/sec: 118,300"
    for i in range(50)
)
ALL = signatures.signatures()
ALIKE = 0.6  # of the words of the shorter sentence


def names(text: LocalizedText) -> set[str]:
    return {
        name
        for one in (*text.en, *text.zh)
        for _, name, _, _ in string.Formatter().parse(one)
        if name
    }


def translated(found: object) -> Iterator[dict[str, list[str]]]:
    """Every text in both languages, however deep."""
    if isinstance(found, dict):
        if {"en", "zh"} <= found.keys():
            texts = {language: found[language] for language in ("en", "zh")}
            yield {lang: [t] if isinstance(t, str) else t for lang, t in texts.items()}
        for inner in found.values():
            yield from translated(inner)
    elif isinstance(found, list):
        for inner in found:
            yield from translated(inner)


def test_both_languages_have_the_same_values() -> None:
    checked = 0
    for file in Path(signatures.__file__).parent.glob("*.json"):
        for text in translated(json.loads(file.read_text(encoding="utf-8"))):
            assert len(text["en"]) == len(text["zh"]), text
            for pair in zip(text["en"], text["zh"], strict=True):
                english, chinese = (
                    {name for _, name, _, _ in string.Formatter().parse(one) if name}
                    for one in pair
                )
                assert english == chinese, pair
                checked += 1
    assert checked > 500


each_entry = each("entry", ALL, ids=lambda entry: entry.id)


def test_the_cause_ids_are_stable() -> None:
    assert sorted(signatures.causes()) == sorted(IDS)


def test_every_id_is_unique() -> None:
    assert len({entry.id for entry in ALL}) == len(ALL) > 350


@each_entry
def test_an_entry_is_complete(entry: Signature) -> None:
    assert (
        entry.cause in signatures.causes()
        and entry.role in ROLES
        and (entry.cause != NONE or entry.role == EVIDENCE)
    )
    assert entry.patterns and entry.source and entry.versions
    assert entry.says.en and entry.says.zh and len(entry.says.en) == len(entry.says.zh)
    assert bool(entry.advice.en) == bool(entry.advice.zh)


@each_entry
def test_every_pattern_has_a_sample_and_every_sample_a_pattern(entry: Signature) -> None:
    found = {
        pattern: [s for s in entry.samples if patterns.compiled(pattern).search(s.encode())]
        for pattern in entry.patterns
    }
    assert [pattern for pattern, samples in found.items() if not samples] == []
    assert [s for s in entry.samples if not any(s in samples for samples in found.values())] == []


@each_entry
def test_a_text_uses_only_values_that_a_pattern_captures(entry: Signature) -> None:
    groups = {group for pattern in entry.patterns for group in re2.compile(pattern).groupindex}
    assert names(entry.says) | names(entry.advice) <= groups | {
        RANK_STACKS,
        KERNEL_READ,
        *COMMANDS,
    }
    values = dict.fromkeys(groups, "")
    assert len(filled(entry.advice, values)) == len(entry.advice.en), "for a log without a run"


@each_entry
def test_an_entry_always_has_a_summary_or_a_title(entry: Signature) -> None:
    for sample in entry.samples:
        known = next(m.groupdict() for p in entry.patterns if (m := re2.search(p, sample)))
        values = {name: value for name, value in known.items() if value is not None}
        assert filled(entry.says, values) or filled(signatures.causes()[entry.cause].title, {})


@each_entry
def test_a_sample_is_recognised_as_its_entry(entry: Signature) -> None:
    for sample in entry.samples:
        assert entry.id in [known.id for known in scan.recognised(sample)]


# Samples whose own line, without others, has another cause: that of a more specific or an equal
# entry, or of a step that is merely skipped.
OTHER_ALONE = {
    "gpu.abi.loader": {"module_missing"},
    "nccl.cuda.refused": {"invalid_device"},
    "python.module.environment": {"file_not_found"},
    "tracking.wandb.permission": {"wandb_network"},
    "training.nan.logged": {UNKNOWN},
    "training.nan.scale": {UNKNOWN},
}


@each("entry", [e for e in ALL if e.role in (ROOT, WEAK)], ids=lambda entry: entry.id)
def test_a_sample_alone_gives_its_cause(entry: Signature, tmp_path: Path) -> None:
    allowed = OTHER_ALONE.get(entry.id, set()) | {entry.cause}
    for sample in entry.samples:
        (tmp_path / "log").write_text(f"step 10 loss 3.2\nstep 20 loss 3.1\n{sample}\n")
        assert diagnose([tmp_path / "log"])["cause"] in allowed, sample


def test_no_pattern_is_a_candidate_for_a_healthy_log() -> None:
    assert scan.known().candidates(HEALTHY.encode()) == []


@each_entry
def test_python_re_finds_the_same_as_re2(entry: Signature) -> None:
    slow = patterns.Slow([(entry.id, pattern) for pattern in entry.patterns])
    assert all(
        {key for key, _ in slow.found(sample.encode())} == {entry.id} for sample in entry.samples
    )
    assert all(
        min(map(len, patterns.literals(pattern))) >= patterns.SHORTEST for pattern in entry.patterns
    )


@each("cause", sorted(IDS))
def test_every_cause_has_texts_and_a_log(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = signatures.causes()[cause]
    assert known.title.en and known.title.zh and known.source
    assert len(known.advice.en) == len(known.advice.zh) and len(known.ours.en) == len(known.ours.zh)
    for language in messages.LANGUAGES:
        monkeypatch.setenv("DUET_LANG", language)
        assert filled(known.advice, {}) or cause == NONE
    expected = json.loads((LOGS / "expected.json").read_text())
    assert any(name.startswith(f"{cause}/") for name in expected)


def test_the_ids_that_code_decides_on_are_in_the_catalogue() -> None:
    named = {v for k, v in vars(cause_ids).items() if k.isupper() and isinstance(v, str)}
    assert named and named <= IDS


def test_every_cause_has_a_signature_unless_the_supervisor_sees_it() -> None:
    seen_by_the_supervisor = {"exit_status", "segfault", "killed"}
    assert IDS - {entry.cause for entry in ALL} <= {NONE, UNKNOWN} | seen_by_the_supervisor


def words(sentence: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_./=-]{4,}|[\u4e00-\u9fff]{2}", sentence))


def like(one: str, other: str) -> float:
    """The share of common words of two sentences."""
    return len(words(one) & words(other)) / max(1, min(len(words(one)), len(words(other))))


@pytest.mark.parametrize("language", messages.LANGUAGES)
def test_no_advice_is_repeated_in_other_words(
    language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUET_LANG", language)
    twice = []
    for cause in signatures.causes():
        for entry in [None, *(e for e in ALL if e.cause == cause)]:
            sentences = advice(
                cause, entry, dict.fromkeys(names(entry.advice) if entry else (), "x")
            )
            twice += [
                (entry and entry.id, a, b)
                for a, b in itertools.combinations(sentences, 2)
                if like(a, b) > ALIKE
            ]
    assert twice == []


@each("language", messages.LANGUAGES)
@each(
    ("entry", "topic"),
    [
        ("training.nan.own", "learning rate|学习率"),
        ("slurm.ended.time", "--signal=|结束前保存"),
        ("machine.oom.kernel", "num_workers"),
        ("slurm.oom.cgroup", "data-loader workers|DataLoader worker"),
        ("training.dataloader.killed", "dmesg"),
    ],
)
def test_a_topic_occurs_once(
    entry: str, topic: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUET_LANG", language)
    known = next(e for e in ALL if e.id == entry)
    run = {
        "resume_command": "./launch_train.sh 2 --resume=run",
        "fewer_workers_command": "./launch_train.sh 2 --num_workers=1",
    }
    for ours in ({}, run):
        sentences = advice(known.cause, known, {}, ours)
        assert sum(1 for sentence in sentences if re.search(topic, sentence)) <= 1, sentences


@each("cause", [c for c in signatures.causes().values() if c.same], ids=lambda c: c.id)
def test_a_topic_matches_advice_of_both_kinds(
    cause: signatures.Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice for a Duet run and a signature's advice; otherwise the topic has no effect."""
    values = {
        name: f"./launch_train.sh 2 --resume=run --{name}=1 --num_workers=1"
        for name in names(cause.ours) - {KERNEL_READ}
    }
    for topic in cause.same:
        for language in messages.LANGUAGES:
            monkeypatch.setenv("DUET_LANG", language)
            own = filled(cause.ours, values | {"unused_command": "--find_unused_parameters"})
            special = [s for e in ALL if e.cause == cause.id for s in e.advice.sentences()]
            assert any(re.search(topic, s) for s in own) and any(
                re.search(topic, s) for s in special
            ), topic


def test_kinds_have_advice_in_both_languages() -> None:
    kinds = (
        "silent gone desync uneven branch left root stopped vanished torn_down native_exception "
        "spawns may_end"
    )
    assert list(signatures.kinds()) == kinds.split()
    assert all(len(text.en) == len(text.zh) > 0 for text in signatures.kinds().values())


def test_no_slash_follows_a_quoted_path() -> None:
    files = Path(signatures.__file__).parent.glob("*.json")
    after = re.compile(r"\{(run|parent|ranks_folder)\}/")
    assert [file.name for file in files if after.search(file.read_text())] == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [patterns.Fast, patterns.Slow], ids=["RE2", "re"])
def test_no_text_makes_a_pattern_take_exponential_time(
    kind: type[patterns.Fast] | type[patterns.Slow],
) -> None:
    """Repeated prefixes of a match in one line, without its end: exponential or cubic matching
    would not finish within the time limit."""
    found = 0
    for entry in ALL:
        finder = kind([(entry.id, pattern) for pattern in entry.patterns])
        for sample in entry.samples:
            for part in (
                sample[: len(sample) // 2],
                sample[:-1],
                f"{sample[:12]} ",
                "".join(c * 9 for c in sample[:40]),
            ):
                found += len(
                    list(finder.found((part * (1 + 16_000 // max(1, len(part)))).encode()))
                )
    assert found > 0

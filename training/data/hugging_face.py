"""A tokenizer as a tokenizer.json of Hugging Face's library, with the same ids: for programs that
load an exported model."""

from __future__ import annotations

import itertools
import json

from training.core.jsonl import Record
from training.data import bpe
from training.data.tokenizer_base import BOS, BOS_NAME, Bytes, Tokenizer

PRINTABLE = (range(ord("!"), ord("~") + 1), range(ord("¡"), ord("¬") + 1), range(ord("®"), 256))


def tokenizer_json(words: Tokenizer) -> Record:
    """As any tokenizer of the library; it puts the separator before each text, as in training."""
    if isinstance(words, bpe.Learned):
        found: Record = json.loads(words.inner.to_str())
        name = next(one for one, number in words.special.items() if number == words.bos)
    elif isinstance(words, bpe.Ranks):
        found, name = _by_bytes(words.ranks, _merges(words.ranks), words.bos, bpe.SPLIT), BOS_NAME
    else:
        assert isinstance(words, Bytes)
        found, name = _by_bytes({bytes([n]): n for n in range(256)}, [], BOS, ""), BOS_NAME
    return {
        **found,
        "truncation": None,
        "padding": None,
        "post_processor": _begins(name, words.bos),
    }


def bos_name(tokenizer: Record) -> str:
    """The name of the separator."""
    return str(tokenizer["post_processor"]["single"][0]["SpecialToken"]["id"])


def _begins(name: str, number: int) -> Record:
    def text(part: str) -> list[Record]:
        return [
            {"SpecialToken": {"id": name, "type_id": 0}},
            {"Sequence": {"id": part, "type_id": 0}},
        ]

    return {
        "type": "TemplateProcessing",
        "single": text("A"),
        "pair": [*text("A"), *text("B")],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }


def _by_bytes(
    ranks: dict[bytes, int], merges: list[tuple[bytes, bytes]], bos: int, split: str
) -> Record:
    """A byte-level vocabulary. `split`: the pattern of words; "": the text is not split."""
    letters = _letters()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    words = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    level = {**by_bytes, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": bos, "content": BOS_NAME, **special, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, level]} if split else level,
        "decoder": {**by_bytes, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {written(token): rank for token, rank in ranks.items()},
            "merges": [[written(left), written(right)] for left, right in merges],
        },
    }


def _letters() -> list[str]:
    """The library's character for each byte: itself if it is printable, else one from 256 on."""
    out, more = [], 256
    for byte in range(256):
        if any(byte in part for part in PRINTABLE):
            out.append(chr(byte))
        else:
            out.append(chr(more))
            more += 1
    return out


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs that ranks of tiktoken are made of: the last step of encoding each token without
    itself."""
    out = []
    for token, rank in sorted(ranks.items(), key=lambda one: one[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            found = [
                (ranks.get(left + right, rank), place)
                for place, (left, right) in enumerate(itertools.pairwise(parts))
            ]
            lowest, place = min(found)
            if lowest >= rank:
                break
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            out.append((parts[0], parts[1]))
    return out

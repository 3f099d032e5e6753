"""Spelling suggestions."""

from __future__ import annotations

NEAR = 0.75  # similarity by difflib: --depht matches --depth, block_size not vocab_size


def suggest(name: str, known: list[str], cutoff: float = NEAR, most: int = 2) -> list[str]:
    """Known names similar to `name`, or the only one that begins with `name_` (`warmup`,
    `total_batch`) or with all but its last letter (`retry`); closest first."""
    import difflib

    found = difflib.get_close_matches(name, known, n=most, cutoff=cutoff)
    # swapped letters in short names: --uot → --out
    found += [k for k in known if len(k) < 6 and k != name and sorted(k) == sorted(name)]
    begins = [k for k in known if len(name) > 3 and k.startswith(f"{name}_")]
    begins = begins or [k for k in known if len(name) > 4 and k.startswith(name[:-1])]
    return list(dict.fromkeys(found + (begins if len(begins) == 1 else [])))[:most]

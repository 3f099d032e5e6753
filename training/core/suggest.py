"""Names near in spelling to a wrong one."""

from __future__ import annotations

NEAR = 0.75  # share of equal characters: --depht is near --depth, block_size is not near vocab_size


def suggest(name: str, known: list[str], cutoff: float = NEAR, most: int = 2) -> list[str]:
    """Names that differ little in spelling, or whose first words these are (`warmup`,
    `total_batch`); nearest first."""
    import difflib

    found = difflib.get_close_matches(name, known, n=most, cutoff=cutoff)
    # --uot: out
    found += [k for k in known if len(k) < 6 and k != name and sorted(k) == sorted(name)]
    begins = [k for k in known if len(name) > 3 and k.startswith(f"{name}_")]
    return list(dict.fromkeys(found + (begins if len(begins) == 1 else [])))[:most]

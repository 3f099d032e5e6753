"""Order of an epoch, computed: no permutation is stored, so an epoch of any length starts at once.

The positions 0 … n-1 of an epoch map one to one to the sequences 0 … n-1: rounds of "add, multiply
by an odd number, shift and xor" are a bijection on k-bit numbers, and results outside 0 … n-1 are
mapped again until they fall inside (cycle walking). The order depends only on (count, seed, epoch),
not on the number of ranks or workers or the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 6
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


def mix(value: int) -> int:
    """splitmix64's finalizer: 64 well-mixed bits of a number."""
    value &= MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


class EpochPermutation:
    """The order of one epoch of `count` sequences, for any integer `seed` and `epoch`."""

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        self.count = count
        bits = max(1, (count - 1).bit_length())
        self._mask = np.uint64((1 << bits) - 1)
        # Rounds alternate between shifts by half and by a third of the bits.
        shifts = (max(1, bits // 2), max(1, (bits + 2) // 3))
        state = mix(mix(seed) + GOLDEN * (epoch + 1))
        self._rounds = []
        for number in range(ROUNDS):
            add, multiply = (
                mix(state + 2 * number * GOLDEN),
                mix(state + (2 * number + 1) * GOLDEN) | 1,
            )
            self._rounds.append(
                (np.uint64(add), np.uint64(multiply), np.uint64(shifts[number % 2]))
            )

    def indices(self, start: int, stop: int) -> Ints:
        """The sequences at positions start … stop-1, (n,) int64; fewer at the end of the epoch."""
        return self.at(np.arange(start, min(stop, self.count), dtype=np.int64))

    def at(self, positions: Ints) -> Ints:
        """The sequences at these positions (0 … count-1); same shape, int64."""
        values = self._permute(positions.astype(np.uint64).ravel())
        outside = np.flatnonzero(values >= self.count)
        while len(outside):
            again = self._permute(values[outside])
            values[outside] = again
            outside = outside[again >= self.count]
        return values.astype(np.int64).reshape(positions.shape)

    def _permute(self, values: Words) -> Words:
        """A bijection on k-bit numbers, in place."""
        for add, multiply, shift in self._rounds:
            values += add
            values *= multiply  # modulo 2^64, so modulo 2^k too
            values &= self._mask
            values ^= values >> shift
        return values


def digest(indices: npt.ArrayLike) -> int:
    """A 64-bit hash of a multiset of sequences: the sum of mixed values modulo 2^64.

    It does not depend on the order, and the digests of disjoint parts add up (modulo 2^64) to the
    digest of the whole.
    """
    values = np.asarray(indices, dtype=np.int64).astype(np.uint64).ravel()
    with np.errstate(over="ignore"):
        values = values + np.uint64(GOLDEN)
        values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return int((values ^ values >> np.uint64(31)).sum(dtype=np.uint64))

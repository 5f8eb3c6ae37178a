"""Noise that belongs to a token, not to a batch.

Every sampled token gets one uniform number that depends on nothing but

    (seed, policy version, group epoch, group row, sample index, position of the token in its sequence)

so a sample is the same in whatever slot, batch, order or moment it is drawn. The generator is counter-based: it holds
no state. Words are absorbed one after another by the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), a bijection of 64 bits in which every input bit reaches every output bit.
The stream key of a sequence is mixed once, at admission; a step mixes only the positions, vectorised.
"""

import numpy as np
from numpy.typing import NDArray

from plimsoll.types import SampleId

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)


def stream_key(seed: int, version: int, sample_id: SampleId) -> int:
    """64-bit key of one sample's noise. Order matters: each word is added to the mix of those before it."""
    key = 0
    for word in (seed, version, sample_id.group.epoch, sample_id.group.row, sample_id.index):
        key = _mix((key + _GOLDEN + (word & _MASK)) & _MASK)
        # A second round with another constant, so that (a, b) and (a + d, b') cannot be aligned by a small difference.
        key = _mix(key ^ _GOLDEN)
    return key


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in the open interval (0, 1) for each (key, position), shape [S].

    52 bits and half a step: the smallest value is 2^-53 and the largest 1 - 2^-53, both exact in float64.
    """
    word = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)  # wraps, as it should
    for _ in range(2):
        word = (word ^ (word >> np.uint64(30))) * np.uint64(_FIRST)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(_SECOND)
        word = word ^ (word >> np.uint64(31))
    return ((word >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

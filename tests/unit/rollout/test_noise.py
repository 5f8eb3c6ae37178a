import numpy as np
import pytest

from plimsoll.rollout.noise import stream_key, uniforms
from plimsoll.types import GroupId, SampleId


def _key(seed: int = 0, version: int = 0, epoch: int = 0, row: int = 0, index: int = 0) -> int:
    return stream_key(seed, version, SampleId(group=GroupId(epoch=epoch, row=row), index=index))


def _draw(keys: list[int], num_positions: int) -> np.ndarray:
    """[keys, positions]"""
    grid = np.repeat(np.array(keys, dtype=np.uint64), num_positions)
    return uniforms(grid, np.tile(np.arange(num_positions), len(keys))).reshape(len(keys), num_positions)


def _chi_square(values: np.ndarray, bins: int) -> float:
    counts, _ = np.histogram(values, bins=bins, range=(0, 1))
    expected = values.size / bins
    return float(((counts - expected) ** 2 / expected).sum())


def test_numbers_are_uniform_over_positions_rows_samples_versions_and_seeds():
    # 99.999 % of chi-square with 63 degrees of freedom lies below 121.
    assert _chi_square(_draw([_key()], 20_000), 64) < 121
    for word in ("seed", "version", "epoch", "row", "index"):
        keys = [_key(**{word: value}) for value in range(20_000)]
        assert _chi_square(_draw(keys, 1), 64) < 121, word


@pytest.mark.parametrize("word", ["seed", "version", "epoch", "row", "index"])
def test_neighbours_are_independent(word: str):
    draws = _draw([_key(**{word: value}) for value in range(2_000)], 3)
    pairs = [(draws[:-1, 0], draws[1:, 0]), (draws[:, 0], draws[:, 1]), (draws[:-1, 1], draws[1:, 0])]
    for left, right in pairs:
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.1  # 4.5 standard deviations at 2,000 pairs
        counts, *_ = np.histogram2d(left, right, bins=8, range=[[0, 1], [0, 1]])
        expected = len(left) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 121


def test_every_word_of_the_key_and_its_place_matter():
    words = {"seed": 3, "version": 5, "epoch": 7, "row": 11, "index": 13}
    keys = {_key(**words), _key(seed=5, version=3, epoch=7, row=11, index=13)}
    for word in words:
        keys.add(_key(**{**words, word: words[word] + 1}))
    assert len(keys) == 7


def _unshift(word: int, by: int) -> int:
    out = word
    for _ in range(64 // by):
        out = word ^ (out >> by)
    return out


def _key_whose_word_is(word: int) -> int:
    """Runs the two rounds of the finaliser backwards, for position 0."""
    size = 1 << 64
    for _ in range(2):
        word = _unshift(word, 31) * pow(0x94D049BB133111EB, -1, size) % size
        word = _unshift(word, 27) * pow(0xBF58476D1CE4E5B9, -1, size) % size
        word = _unshift(word, 30)
    return (word - 0x9E3779B97F4A7C15) % size


def test_interval_is_open_at_both_ends():
    keys = np.array([_key_whose_word_is(0), _key_whose_word_is(2**64 - 1)], dtype=np.uint64)
    assert uniforms(keys, np.array([0, 0])).tolist() == [2.0**-53, 1 - 2.0**-53]


def test_values_are_pinned():
    """A change of the generator changes every run that is resumed: it must be seen."""
    assert _key(seed=1, version=2, epoch=3, row=4, index=5) == PINNED_KEY
    assert uniforms(np.array([PINNED_KEY], dtype=np.uint64), np.array([6]))[0] == PINNED_UNIFORM


PINNED_KEY = 0x198759144842C26B
PINNED_UNIFORM = 0.1034589000405689

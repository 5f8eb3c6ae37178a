import pytest

from plimsoll.rollout.native import NativeEngine
from plimsoll.rollout.slots import Prefixes, batches
from plimsoll.types import Request
from tests import tiny
from tests.unit.rollout.requests import drain, request


@pytest.mark.parametrize(
    ("lengths", "limit", "expected"),
    [
        ([4, 4, 4], 12, [[0, 1, 2]]),
        ([4, 4, 4], 11, [[0, 1], [2]]),
        ([5, 1, 5, 2], 10, [[1, 3], [0, 2]]),  # 2 x 2, then 2 x 5 padded tokens
        ([3, 20, 3], 10, [[0, 2], [1]]),  # the longer one goes alone
        ([20, 21], 10, [[0], [1]]),
        ([], 10, []),
    ],
)
def test_padded_batches_stay_within_the_limit(lengths: list[int], limit: int, expected: list[list[int]]):
    assert batches(lengths, limit) == expected


def test_a_slot_holds_one_prefix_and_a_prefix_has_its_lowest_slot():
    prefixes = Prefixes()
    prefixes.put(4, (1, 2))
    prefixes.put(2, (1, 2))
    assert prefixes.holder((1, 2)) == 2
    prefixes.put(2, (3,))
    assert prefixes.holder((1, 2)) == 4
    assert prefixes.held(2) == (3,)
    prefixes.drop(4)
    assert prefixes.holder((1, 2)) is None
    prefixes.clear()
    assert prefixes.held(2) is None


def _engine(num_slots: int) -> NativeEngine:
    return NativeEngine(tiny.qwen2(), num_slots=num_slots, slot_tokens=40, prefill_tokens=64)


@pytest.mark.parametrize("num_slots", [2, 3], ids=["its slot was taken over", "its slot stood idle"])
def test_a_kept_prompt_is_intact_or_forgotten(num_slots: int):
    """A short sample leaves its prompt behind in slot 0. With two slots the long one is moved there; with three the
    slot is an idle row of several steps. Then the group's next sample comes."""
    prompt = list(range(5, 15))
    first = request(0, prompt, max_tokens=1)
    long: list[Request] = [request(1 + i, range(20, 23), max_tokens=30) for i in range(num_slots - 1)]
    again = request(0, prompt, index=1, max_tokens=12)
    engine = _engine(num_slots)
    engine.add([first, *long])
    for _ in range(15):
        engine.step()
    finished = drain(engine, [again])
    alone = drain(_engine(1), [again])[again.sample_id]
    assert finished[again.sample_id].token_ids == alone.token_ids
    assert finished[again.sample_id].logprobs == pytest.approx(alone.logprobs, abs=1e-5)

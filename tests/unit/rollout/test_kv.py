import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, PreTrainedConfig, Qwen2Config, Qwen3Config

from plimsoll.errors import RefusedError
from plimsoll.rollout.kv import LayerCache, kv_bytes_per_token, plan_slots
from plimsoll.rollout.movers import kv_resident
from plimsoll.rollout.native import NativeEngine
from tests import tiny
from tests.unit.rollout.requests import drain, request


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        # layers x (K and V) x key-value heads x head size x bytes, by hand
        (
            Qwen2Config(num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, hidden_size=1536),
            torch.bfloat16,
            28 * 2 * 2 * 128 * 2,
        ),
        (
            Qwen3Config(
                num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, hidden_size=2560, head_dim=128
            ),
            torch.float32,
            36 * 2 * 8 * 128 * 4,
        ),
        (GPT2Config(n_layer=12, n_head=12, n_embd=768), torch.float32, 12 * 2 * 768 * 4),
        (
            Gemma3TextConfig(num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1, head_dim=256),
            torch.bfloat16,
            26 * 2 * 1 * 256 * 2,
        ),
    ],
    ids=["grouped", "head_dim", "gpt2", "gemma3"],
)
def test_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype, expected: int):
    assert kv_bytes_per_token(config, dtype) == expected


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_has_exactly_the_planned_bytes(family: str, dtype: torch.dtype):
    model = tiny.FAMILIES[family](dtype=dtype)
    engine = NativeEngine(model, num_slots=5, slot_tokens=24, prefill_tokens=8)
    assert engine.kv_bytes == 5 * 24 * kv_bytes_per_token(model.config, dtype)


def test_slots_are_what_fits_and_what_the_work_can_use():
    assert plan_slots(kv_memory=10_000, slot_bytes=1_000, num_sequences=64) == 10
    assert plan_slots(kv_memory=10_999, slot_bytes=1_000, num_sequences=64) == 10
    assert plan_slots(kv_memory=10_000, slot_bytes=1_000, num_sequences=4) == 4
    assert plan_slots(kv_memory=1_000, slot_bytes=1_000, num_sequences=4) == 1


def test_less_than_one_slot_is_refused_with_the_bytes_it_needs():
    with pytest.raises(RefusedError, match=r"rollout\.kv_memory: 999 bytes do not hold one sequence.* 1000 bytes"):
        plan_slots(kv_memory=999, slot_bytes=1_000, num_sequences=4)


def test_a_config_without_sizes_is_refused_by_name():
    with pytest.raises(RefusedError, match=r"does not say the number of layers"):
        kv_bytes_per_token(PreTrainedConfig(), torch.float32)


def test_a_sleeping_cache_has_no_bytes_and_wakes_to_zeros_and_the_same_samples():
    asked = [request(i, [5, 6, 7 + i], max_tokens=9) for i in range(3)]
    expected = drain(NativeEngine(tiny.qwen2(), num_slots=2, slot_tokens=16, prefill_tokens=8), asked)
    engine = NativeEngine(tiny.qwen2(), num_slots=2, slot_tokens=16, prefill_tokens=8)
    size, mover = engine.kv_bytes, kv_resident(engine, None).mover
    assert mover is not None
    for _ in range(2):
        assert drain(engine, asked) == expected
        assert mover.evict() == 0
        assert engine.kv_bytes == 0
        assert not mover.present
        assert mover.evict() == 0
        for layer in engine._layers.values():
            assert layer.keys.shape[2] == 16
        stray = torch.full((size,), float("nan"))  # takes the memory that was freed, and leaves it with NaN in it
        del stray
        assert mover.admit() == 0
        assert engine.kv_bytes == size
        assert mover.present
        for layer in engine._layers.values():
            assert not layer.keys.any()
            assert not layer.values.any()


def test_the_prompts_of_a_cache_that_slept_are_forgotten():
    engine = NativeEngine(tiny.qwen2(), num_slots=1, slot_tokens=16, prefill_tokens=8)
    engine.add([request(0, [5, 6, 7], max_tokens=2)])
    engine.step()
    engine.abort()
    assert engine._prefixes.holder((5, 6)) == 0
    engine.sleep(("kv_cache",))
    engine.wake(("kv_cache",))
    assert engine._prefixes.holder((5, 6)) is None


def test_a_cache_in_use_does_not_sleep_and_one_that_sleeps_is_not_used():
    engine = NativeEngine(tiny.qwen2(), num_slots=1, slot_tokens=16, prefill_tokens=8)
    engine.add([request(0, [5, 6, 7], max_tokens=2)])
    with pytest.raises(AssertionError, match="unfinished requests"):
        engine.sleep(("kv_cache",))
    assert engine.awake("kv_cache")
    engine.abort()
    engine.sleep(("kv_cache",))
    engine.add([request(0, [5, 6, 7], max_tokens=2)])
    with pytest.raises(AssertionError, match="asleep"):
        engine.step()
    with pytest.raises(AssertionError, match="all that this engine has"):
        engine.sleep(("weights",))
    assert engine.awake("weights")


def test_a_device_that_has_no_room_for_the_whole_cache_gives_all_of_it_back(monkeypatch: pytest.MonkeyPatch):
    engine = NativeEngine(tiny.qwen2(), num_slots=1, slot_tokens=16, prefill_tokens=8)
    size = engine.kv_bytes
    engine.sleep(("kv_cache",))
    filled: list[LayerCache] = []
    fill = LayerCache.fill

    def second_fails(layer: LayerCache) -> None:
        if filled:
            raise torch.OutOfMemoryError("no room")
        filled.append(layer)
        fill(layer)

    monkeypatch.setattr(LayerCache, "fill", second_fails)
    with pytest.raises(torch.OutOfMemoryError):
        engine.wake(("kv_cache",))
    assert engine.kv_bytes == 0
    assert not engine.awake("kv_cache")
    monkeypatch.undo()
    engine.wake(("kv_cache",))
    assert engine.kv_bytes == size

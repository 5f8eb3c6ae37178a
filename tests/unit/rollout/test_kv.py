import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, PreTrainedConfig, Qwen2Config, Qwen3Config

from plimsoll.errors import RefusedError
from plimsoll.rollout.kv import kv_bytes_per_token, plan_slots
from plimsoll.rollout.native import NativeEngine
from tests import tiny


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

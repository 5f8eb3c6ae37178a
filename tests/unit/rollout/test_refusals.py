"""What the native engine says no to, before anything is sampled."""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from plimsoll.errors import RefusedError
from plimsoll.rollout.native import NativeEngine
from tests import tiny
from tests.unit.rollout.requests import drain, request, sample_id

_SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _engine(model: PreTrainedModel, slot_tokens: int = 32) -> NativeEngine:
    return NativeEngine(model, num_slots=2, slot_tokens=slot_tokens, prefill_tokens=32)


def _recurrent_mix() -> PreTrainedModel:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    heads = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    kinds = ["linear_attention", "full_attention"]
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(**_SMALL, **experts, **heads, linear_value_head_dim=8, layer_types=kinds)
    )


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_recurrent_mix, r"Qwen3NextForCausalLM: its layers of type linear_attention need another cache"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**_SMALL)), r"Gemma2Attention uses softcap"),
        (
            lambda: GptOssForCausalLM(GptOssConfig(**_SMALL, num_local_experts=2, num_experts_per_tok=1)),
            r"GptOssAttention uses s_aux",
        ),
        (
            lambda: MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)),
            r"MambaForCausalLM: 0 of its 2 layers compute attention in the way",
        ),
        (
            lambda: BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2)),
            r"BloomForCausalLM: 0 of its 2 layers compute attention in the way",
        ),
    ],
    ids=["recurrent", "softcap", "sinks", "no-attention", "own-attention"],
)
def test_families_that_the_slots_cannot_compute(build, reason: str):  # pyright: ignore
    with pytest.raises(RefusedError, match=reason) as error:
        _engine(build())
    assert "rollout.engine" in str(error.value)


def test_requests_that_do_not_fit_are_refused_all_together():
    engine = _engine(tiny.qwen2())
    with pytest.raises(RefusedError, match=r"sample 0:7:0: 30 prompt tokens \+ 3 response tokens do not fit.* of 32"):
        engine.add([request(6, [5] * 4), request(7, [5] * 30, max_tokens=3)])
    assert engine.idle
    done = drain(engine, [request(6, [5] * 4), request(7, [5] * 30, max_tokens=2)])[sample_id(7)]
    assert len(done.token_ids) == 2


@pytest.mark.parametrize(("ids", "max_tokens"), [([], 4), ([5], 0)])
def test_a_request_needs_a_prompt_and_room(ids: list[int], max_tokens: int):
    with pytest.raises(RefusedError, match="must be at least 1"):
        _engine(tiny.qwen2()).add([request(0, ids, max_tokens=max_tokens)])


def test_slots_longer_than_the_positions_of_the_model():
    with pytest.raises(RefusedError, match="129 tokens is longer than the 128 positions that GPT2LMHeadModel knows"):
        _engine(tiny.gpt2(), slot_tokens=129)


def test_a_window_in_every_layer_is_no_reason():
    def build() -> PreTrainedModel:
        torch.manual_seed(0)
        return MistralForCausalLM(MistralConfig(**_SMALL, sliding_window=5)).eval()

    done = drain(_engine(build()), [request(0, range(3, 15), temperature=0.0, max_tokens=12)])[sample_id(0)]
    ids = list(range(3, 15))
    for token in done.token_ids:
        with torch.no_grad():
            assert token == build()(input_ids=torch.tensor([ids])).logits[0, -1].argmax()
        ids.append(token)


def test_a_model_in_training_mode_is_put_into_eval_mode():
    model = tiny.gpt2()
    model.train()
    _engine(model)
    assert not model.training

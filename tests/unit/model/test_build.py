from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, DeepseekV3Config, Qwen2ForCausalLM

from plimsoll.errors import RefusedError
from plimsoll.model.build import (
    build_meta,
    build_random,
    build_rollout_skeleton,
    model_folder,
    read_config,
)
from plimsoll.weights.load import load_sharded
from tests import tiny

CPU = torch.device("cpu")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path / "model")
    assert model_folder(tmp_path / "model") == tmp_path / "model"
    with pytest.raises(RefusedError, match=r"model\.path: .* holds no config\.json"):
        model_folder(tmp_path)


def test_a_config_without_a_causal_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(RefusedError, match=r"model\.config.*no-such-model"):
        read_config(tmp_path)
    with pytest.raises(RefusedError, match=r"model\.config"):
        read_config(tmp_path / "absent")
    vision = type("VisionConfig", (BertConfig,), {"model_type": "vision"})()
    with pytest.raises(RefusedError, match="no causal language model"):
        build_random(vision, torch.float32, CPU, seed=0)


def test_random_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    config = tiny.qwen2().config
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (build_random(config, torch.float32, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [model.get_input_embeddings().weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_skeleton_has_every_buffer_and_no_memory_for_parameters(family: str) -> None:
    model = tiny.FAMILIES[family]()
    model.set_attn_implementation("eager")
    buffers = dict(model.named_buffers())
    skeleton = build_rollout_skeleton(model.config, torch.float32, buffers)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    ours = dict(skeleton.named_buffers())
    assert ours.keys() == buffers.keys()
    for name, buffer in buffers.items():
        assert torch.equal(ours[name], buffer)
        assert ours[name].data_ptr() != buffer.data_ptr()
    assert skeleton.state_dict().keys() == model.state_dict().keys()
    assert skeleton.config is not model.config


def test_a_model_on_the_meta_device_is_the_one_that_from_pretrained_builds(tmp_path: Path) -> None:
    source = tiny.qwen2()
    source.generation_config.eos_token_id = [2, 5]
    source.save_pretrained(tmp_path)
    model = build_meta(tmp_path, torch.bfloat16)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training
    assert model.generation_config.eos_token_id == [2, 5]
    again = build_meta(model.config, torch.float32)
    assert again.dtype is torch.float32
    assert model.config.dtype is torch.bfloat16
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_what_a_family_keeps_in_fp32_stays_in_fp32_and_tied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.qwen2().save_pretrained(tmp_path)
    monkeypatch.setattr(Qwen2ForCausalLM, "_keep_in_fp32_modules_strict", {"norm", "embed_tokens"})
    model = build_meta(tmp_path, torch.bfloat16)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)}
    assert dtypes == {name: parameter.dtype for name, parameter in expected.named_parameters(remove_duplicate=False)}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_buffer_that_a_family_keeps_in_fp32_stays_in_fp32(tmp_path: Path) -> None:
    config = DeepseekV3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    model = build_meta(tmp_path, torch.bfloat16)
    assert model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").dtype is torch.float32
    load_sharded(model, tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    made = model.state_dict()
    assert {name: tensor.dtype for name, tensor in made.items()} == {name: t.dtype for name, t in expected.items()}
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())


def test_a_family_without_the_wanted_head_is_refused(tmp_path: Path) -> None:
    tiny.gemma3().save_pretrained(tmp_path)
    with pytest.raises(RefusedError, match=r"gemma3_text.*has no model for token classification"):
        build_meta(tmp_path, torch.float32, auto_class="token_classification")
    assert build_meta(tmp_path, torch.float32, auto_class="sequence_classification", num_labels=1).num_labels == 1

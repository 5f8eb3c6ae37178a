"""Tiny models for tests: random weights, a fraction of a second each."""

from functools import partial

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)


def qwen2(vocab: int = 64, *, tied: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Two layers, hidden 32, 4 heads over 2 key-value heads."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).to(dtype).eval()


def llama(vocab: int = 64, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Two layers, untied."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def gpt2(vocab: int = 64, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Absolute positions: shows position bugs that rotary models hide."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config).to(dtype).eval()


def gemma3(vocab: int = 64, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Sliding attention (window 8) in the first layer, full in the second."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Gemma3ForCausalLM(config).to(dtype).eval()


def qwen3(vocab: int = 66, *, tied: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """No dim is a multiple of 4: hidden 30, vocabulary 66 by default."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=30,
        intermediate_size=54,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).to(dtype).eval()


def qwen3_moe(vocab: int = 64, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A dense layer, then one of 11 experts (so that the order of names is not that of numbers), hidden 24.

    Rows of a multiple of 16 bytes in bf16 too: grouped matrix products want them.
    """
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=24,
        intermediate_size=40,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=11,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config).to(dtype).eval()


def mixtral(vocab: int = 64, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Four experts in each of two layers."""
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return MixtralForCausalLM(config).to(dtype).eval()


def qwen3_next(vocab: int = 64, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A layer of linear attention, then one of full attention; four experts and a shared one in each."""
    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=24,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3NextForCausalLM(config).to(dtype).eval()


FAMILIES = {"qwen2": qwen2, "llama": llama, "gpt2": gpt2, "gemma3": gemma3}
"""What training is tested with."""

CHECKPOINT_FAMILIES = FAMILIES | {
    "qwen2_untied": partial(qwen2, tied=False),
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "qwen3_next": qwen3_next,
}
"""What loading and saving of weights is tested with."""

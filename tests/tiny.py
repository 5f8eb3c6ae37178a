"""Tiny models for tests: random weights, a fraction of a second each."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
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


FAMILIES = {"qwen2": qwen2, "llama": llama, "gpt2": gpt2, "gemma3": gemma3}

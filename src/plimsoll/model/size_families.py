"""What tells one model family from another: a row of `FAMILIES` each.

A row says which keys its files may leave out and what its config class in transformers puts there, and in which of a
few ways its layers differ. Tests build every family with transformers and compare.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from plimsoll.model.size_values import Values

Kind: TypeAlias = tuple[Literal["full", "sliding", "linear"], int | None]
"""Attention of a layer and its window."""

_FULL: Kind = ("full", None)


@dataclass(slots=True, kw_only=True, frozen=True)
class Family:
    """All layers have rotary positions, RMS norms and a gated MLP or experts."""

    defaults: Mapping[str, Any]
    """Of the config class in transformers. None where it derives the number from others."""
    kinds: Callable[[Values, int], list[Kind]]
    """Attention of each layer, and its window."""
    bias: Literal["never", "qkv", "config"] = "never"
    """Which attention projections have one; `config`: all four, if `attention_bias` says so."""
    query_key_norm: bool = False
    query_gate: bool = False
    """The query projection also makes a gate of the output."""
    fused: bool = False
    """Query, key and value are one matrix, gate and up another."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    mlp_bias: bool = False
    """Whether the key of this name is one of the family's."""
    experts: tuple[str, str] | None = None
    """Keys of the number of experts and of their width."""
    shared_expert: bool = False
    sparse: bool = False
    """Whether `mlp_only_layers` and `decoder_sparse_step` leave some layers dense."""


def _all_full(config: Values, layers: int) -> list[Kind]:
    return [_FULL] * layers


def _one_window(config: Values, layers: int) -> list[Kind]:
    """The same for every layer."""
    window = config.optional("sliding_window")
    return [_FULL if window is None else ("sliding", window)] * layers


def _one_window_if_used(config: Values, layers: int) -> list[Kind]:
    return _one_window(config, layers) if config.flag("use_sliding_window") else [_FULL] * layers


def _window_from_a_layer_on(config: Values, layers: int) -> list[Kind]:
    """Qwen's `max_window_layers` are the first ones, which have none."""
    window = config.optional("sliding_window") if config.flag("use_sliding_window") else None
    first = config.count("max_window_layers")
    pattern = ["sliding" if index >= first else "full" for index in range(layers)]
    return _named(config, pattern, {"full": _FULL, "sliding": _FULL if window is None else ("sliding", window)})


def _mostly_windows(config: Values, layers: int) -> list[Kind]:
    """Gemma 3: the last of each six layers is full."""
    window = config.optional("sliding_window")
    if window is not None and config.flag("use_bidirectional_attention"):
        window = window // 2 + 1  # both sides are counted in the file
    every = config.number("sliding_window_pattern")
    pattern = ["sliding" if (index + 1) % every else "full" for index in range(layers)]
    return _named(config, pattern, {"full": _FULL, "sliding": _FULL if window is None else ("sliding", window)})


def _mostly_linear(config: Values, layers: int) -> list[Kind]:
    """Qwen3-Next: the last of each four layers is full."""
    every = config.number("full_attention_interval")
    pattern = ["linear" if (index + 1) % every else "full" for index in range(layers)]
    return _named(config, pattern, {"full": _FULL, "linear": ("linear", None)})


def _named(config: Values, pattern: list[str], kinds: Mapping[str, Kind]) -> list[Kind]:
    """`layer_types` where the file has it, else the family's pattern."""
    named = config.entries("layer_types")
    names = pattern if named is None else [str(kind).removesuffix("_attention") for kind in named]
    if len(names) != len(pattern):
        raise config.refusal(f"has {len(names)} entries in `layer_types` for {len(pattern)} layers")
    if unknown := sorted(set(names) - set(kinds)):
        raise config.refusal(f"names a kind of layer in `layer_types` that is not known, {unknown[0]!r},")
    return [kinds[name] for name in names]


GPT2_DEFAULTS: Mapping[str, Any] = {
    "n_positions": 1024,
    "n_inner": None,
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}

_COMMON: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "layer_types": None,
    "mlp_only_layers": None,
    "decoder_sparse_step": 1,
}
_QWEN_WINDOWS: Mapping[str, Any] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        defaults={**_COMMON, "max_position_embeddings": 2048, "mlp_bias": False},
        kinds=_all_full,
        bias="config",
        mlp_bias=True,
    ),
    "mistral": Family(
        defaults={
            **_COMMON,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        kinds=_one_window,
    ),
    "phi3": Family(
        defaults={**_COMMON, "max_position_embeddings": 4096, "sliding_window": None},
        kinds=_one_window,
        fused=True,
    ),
    "qwen2": Family(
        defaults={**_COMMON, **_QWEN_WINDOWS, "num_key_value_heads": 32, "max_position_embeddings": 32768},
        kinds=_window_from_a_layer_on,
        bias="qkv",
    ),
    "qwen3": Family(
        defaults={
            **_COMMON,
            **_QWEN_WINDOWS,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
        kinds=_window_from_a_layer_on,
        bias="config",
        query_key_norm=True,
    ),
    "gemma3_text": Family(
        defaults={
            **_COMMON,
            # The published files of the multimodal models leave out most numbers.
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "use_bidirectional_attention": False,
        },
        kinds=_mostly_windows,
        bias="config",
        query_key_norm=True,
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    ),
    "mixtral": Family(
        defaults={
            **_COMMON,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        kinds=_one_window,
        experts=("num_local_experts", "intermediate_size"),
    ),
    "qwen3_moe": Family(
        defaults={
            **_COMMON,
            **_QWEN_WINDOWS,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        kinds=_one_window_if_used,
        bias="config",
        query_key_norm=True,
        experts=("num_experts", "moe_intermediate_size"),
        sparse=True,
    ),
    "qwen3_next": Family(
        defaults={
            **_COMMON,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "dtype": None,
        },
        kinds=_mostly_linear,
        bias="config",
        query_key_norm=True,
        query_gate=True,
        experts=("num_experts", "moe_intermediate_size"),
        shared_expert=True,
        sparse=True,
    ),
}
"""Families but GPT-2, which has no layer in common with them. A key without a default must be in the file."""

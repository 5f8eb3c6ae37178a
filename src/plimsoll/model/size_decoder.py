"""Tensors of a model as transformers 5 builds it from config.json: names, shapes, kinds of layers."""

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from plimsoll.errors import RefusedError
from plimsoll.model.size_families import FAMILIES, GPT2_DEFAULTS, Family, Kind
from plimsoll.model.size_types import LayerSize, ModelSizes, TensorSize
from plimsoll.model.size_values import Values

_Shapes: TypeAlias = dict[str, tuple[int, ...]]

_EXPERTS = ("num_local_experts", "num_experts")
"""The same number in files of the publisher and of transformers 5."""


def read_decoder(values: Mapping[str, Any]) -> ModelSizes:
    """Sizes of the language model of a config. RefusedError: an unknown family, or a number that is missing."""
    values = _text_values(values)
    name = values.get("model_type")
    if name == "gpt2":
        return _gpt2(Values(values, GPT2_DEFAULTS, "gpt2"))
    if not isinstance(name, str) or name not in FAMILIES:
        raise RefusedError(
            f"model.config: the config.json has model_type {name!r}, whose sizes are not known (known are "
            f"{', '.join(sorted([*FAMILIES, 'gpt2']))}), so its memory cannot be planned; name a model of one of these "
            "families in model.config"
        )
    family = FAMILIES[name]
    config = Values(values, family.defaults, name)
    hidden, vocab = config.number("hidden_size"), config.number("vocab_size")
    kinds = family.kinds(config, config.number("num_hidden_layers"))
    tied = config.flag("tie_word_embeddings")
    root = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not tied:
        root["lm_head.weight"] = (vocab, hidden)
    return ModelSizes(
        family=name,
        layers=tuple(_layer(family, config, index, kind) for index, kind in enumerate(kinds)),
        root=_tensors("", root),
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        max_positions=config.optional("max_position_embeddings"),
    )


def _text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal config. Whether its head is tied is said outside, where it is said."""
    inner = values.get("text_config")
    if not isinstance(inner, Mapping):
        return values
    text = dict(cast("Mapping[str, Any]", inner))
    text.setdefault("model_type", f"{values.get('model_type', 'unnamed')}_text")
    if isinstance(values.get("tie_word_embeddings"), bool):
        text["tie_word_embeddings"] = values["tie_word_embeddings"]
    return text


def _tensors(prefix: str, shapes: _Shapes) -> tuple[TensorSize, ...]:
    return tuple(TensorSize(name=prefix + name, shape=shape) for name, shape in shapes.items())


def _layer(family: Family, config: Values, index: int, kind: Kind) -> LayerSize:
    hidden = config.number("hidden_size")
    experts, width = _mlp_kind(family, config, index)
    shared = config.number("shared_expert_intermediate_size") if experts and family.shared_expert else 0
    linear = kind[0] == "linear"
    shapes = _linear_attention(config) if linear else _attention(family, config)
    if experts:
        shapes |= _experts(hidden, experts, width, shared)
    else:
        bias = family.mlp_bias and config.flag("mlp_bias")
        shapes |= _mlp("mlp.", hidden, width, fused=family.fused, bias=bias)
    shapes |= {f"{norm}.weight": (hidden,) for norm in family.norms}
    heads, kv_heads, head_dim, value_dim = (_linear_heads if linear else _heads)(config)
    keys, values = kv_heads * head_dim, heads * value_dim
    return LayerSize(
        parameters=_tensors(f"model.layers.{index}.", shapes),
        attention=kind[0],
        window=kind[1],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        intermediate=width,
        gated=True,
        experts=experts,
        experts_per_token=config.number("num_experts_per_tok") if experts else 0,
        shared_intermediate=shared,
        state_bytes_per_sequence=_state_bytes(config) if linear else 0,
        # Queries, keys, values and gate z; b and a; and queries, keys, values once more from the convolution.
        linear_width=4 * keys + 3 * values + 2 * heads if linear else 0,
    )


def _heads(config: Values) -> tuple[int, int, int, int]:
    heads = config.number("num_attention_heads")
    kv_heads = config.optional("num_key_value_heads") or heads
    head_dim = config.optional("head_dim") or config.number("hidden_size") // heads
    return heads, kv_heads, head_dim, head_dim


def _attention(family: Family, config: Values) -> _Shapes:
    heads, kv_heads, head_dim, _ = _heads(config)
    hidden = config.number("hidden_size")
    queries, keys = heads * head_dim, kv_heads * head_dim
    if family.fused:
        widths = {"qkv_proj": queries + 2 * keys}
    else:
        widths = {"q_proj": queries * (2 if family.query_gate else 1), "k_proj": keys, "v_proj": keys}
    shapes: _Shapes = {f"self_attn.{name}.weight": (width, hidden) for name, width in widths.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    if family.bias == "qkv" or (family.bias == "config" and config.flag("attention_bias")):
        shapes |= {f"self_attn.{name}.bias": (width,) for name, width in widths.items()}
        if family.bias == "config":
            shapes["self_attn.o_proj.bias"] = (hidden,)
    if family.query_key_norm:
        shapes |= {f"self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def _mlp_kind(family: Family, config: Values, index: int) -> tuple[int, int]:
    """Experts of a layer (0: dense) and the width of one, or of the dense MLP."""
    if family.experts is not None:
        number, width = family.experts
        experts = config.count(number, *_EXPERTS)
        if experts and not (family.sparse and _is_dense(config, index)):
            return experts, config.number(width)
    return 0, config.number("intermediate_size")


def _is_dense(config: Values, index: int) -> bool:
    dense = config.entries("mlp_only_layers") or ()
    return index in dense or (index + 1) % config.number("decoder_sparse_step") != 0


def _mlp(prefix: str, hidden: int, width: int, *, fused: bool = False, bias: bool = False) -> _Shapes:
    ups = {"gate_up_proj": 2 * width} if fused else {"gate_proj": width, "up_proj": width}
    shapes: _Shapes = {f"{prefix}{name}.weight": (rows, hidden) for name, rows in ups.items()}
    shapes[f"{prefix}down_proj.weight"] = (hidden, width)
    if bias:
        shapes |= {f"{prefix}{name}.bias": (rows,) for name, rows in ups.items()}
        shapes[f"{prefix}down_proj.bias"] = (hidden,)
    return shapes


def _experts(hidden: int, experts: int, width: int, shared: int) -> _Shapes:
    shapes: _Shapes = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
        "mlp.experts.down_proj": (experts, hidden, width),
    }
    if shared:
        shapes |= _mlp("mlp.shared_expert.", hidden, shared)
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _linear_heads(config: Values) -> tuple[int, int, int, int]:
    return (
        config.number("linear_num_value_heads"),
        config.number("linear_num_key_heads"),
        config.number("linear_key_head_dim"),
        config.number("linear_value_head_dim"),
    )


def _linear_attention(config: Values) -> _Shapes:
    heads, key_heads, key_dim, value_dim = _linear_heads(config)
    hidden, keys, values = config.number("hidden_size"), key_heads * key_dim, heads * value_dim
    return {
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, config.number("linear_conv_kernel_dim")),
        "linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        "linear_attn.in_proj_ba.weight": (2 * heads, hidden),
        "linear_attn.norm.weight": (value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _state_bytes(config: Values) -> int:
    """Convolution's last inputs in the model's dtype (config.json's, float32 where it says none), state in fp32."""
    heads, key_heads, key_dim, value_dim = _linear_heads(config)
    channels = 2 * key_heads * key_dim + heads * value_dim
    itemsize = 2 if config.get("dtype", "torch_dtype") in ("bfloat16", "float16") else 4
    return channels * config.number("linear_conv_kernel_dim") * itemsize + heads * key_dim * value_dim * 4


def _gpt2(config: Values) -> ModelSizes:
    """Biases everywhere, positions that are weights, matrices of [in, out]."""
    hidden, vocab = config.number("n_embd", "hidden_size"), config.number("vocab_size")
    heads = config.number("n_head", "num_attention_heads")
    positions = config.number("n_positions", "max_position_embeddings")
    width = config.optional("n_inner") or 4 * hidden
    tied = config.flag("tie_word_embeddings")
    if config.flag("add_cross_attention"):
        raise config.refusal("has `add_cross_attention`, which a decoder on its own has not")
    shapes: _Shapes = {}
    for norm in ("ln_1", "ln_2"):
        shapes |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
    matrices = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, width),
        "mlp.c_proj": (width, hidden),
    }
    for name, shape in matrices.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[1:]}
    root: _Shapes = {"wte.weight": (vocab, hidden), "wpe.weight": (positions, hidden)}
    root |= {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}
    head: _Shapes = {} if tied else {"lm_head.weight": (vocab, hidden)}
    return ModelSizes(
        family="gpt2",
        layers=tuple(
            LayerSize(
                parameters=_tensors(f"transformer.h.{index}.", shapes),
                attention="full",
                window=None,
                heads=heads,
                kv_heads=heads,
                head_dim=hidden // heads,
                value_dim=hidden // heads,
                intermediate=width,
                gated=False,
                experts=0,
                experts_per_token=0,
                shared_intermediate=0,
                state_bytes_per_sequence=0,
            )
            for index in range(config.number("n_layer", "num_hidden_layers"))
        ),
        root=_tensors("transformer.", root) + _tensors("", head),
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        max_positions=positions,
    )

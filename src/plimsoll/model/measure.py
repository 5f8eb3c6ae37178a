"""The sizes of a model from the model itself, for families whose config.json has no rules of ours."""

from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from plimsoll.model.sizes import LayerSize, ModelSizes, TensorSize
from plimsoll.model.spec import decoder_layers

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", *_HEADS)
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_dim", "d_ff")


def sizes_of(lm: PreTrainedModel) -> ModelSizes:
    """Of a model on any device (the meta device will do). Parameters are exact; attention is taken as full, the MLP as
    dense, and what config.json does not say as the usual share of the hidden size."""
    values = cast("Mapping[str, Any]", lm.config.get_text_config().to_dict())
    hidden = _number(values, _HIDDEN, 0)
    heads = _number(values, _HEADS, 1)
    head_dim = values.get("head_dim")
    head_dim = head_dim if isinstance(head_dim, int) else max(hidden // heads, 1)
    layers = decoder_layers(lm)
    seen: set[int] = set()
    sized = [_tensors(layer, seen) for layer in layers]
    root = _tensors(lm, seen)
    vocab = int(values["vocab_size"])
    return ModelSizes(
        family=str(values.get("model_type", type(lm).__name__)),
        layers=tuple(
            LayerSize(
                parameters=parameters,
                attention="full",
                window=None,
                heads=heads,
                kv_heads=_number(values, _KV_HEADS, heads),
                head_dim=head_dim,
                value_dim=head_dim,
                intermediate=_number(values, _INTERMEDIATE, 4 * hidden),
                gated=True,
                experts=0,
                experts_per_token=0,
                shared_intermediate=0,
                state_bytes_per_sequence=0,
            )
            for parameters in sized
        ),
        root=root,
        hidden=hidden,
        vocab=vocab,
        tied=bool(values.get("tie_word_embeddings")),
        max_positions=None,
    )


def _tensors(module: nn.Module, seen: set[int]) -> tuple[TensorSize, ...]:
    """Parameters that no earlier part has."""
    found: list[TensorSize] = []
    for name, parameter in module.named_parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found.append(TensorSize(name=name, shape=tuple(parameter.shape)))
    return tuple(found)


def _number(values: Mapping[str, Any], names: tuple[str, ...], otherwise: int) -> int:
    return next((values[name] for name in names if isinstance(values.get(name), int)), otherwise)

"""The KV cache of the native engine: how many bytes, how many slots, and the tensors themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from plimsoll.errors import RefusedError

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", *_HEADS)
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


def _first(values: Mapping[str, Any], names: Sequence[str], what: str) -> int:
    """The first of several names that a family may use for one number."""
    for name in names:
        if isinstance(value := values.get(name), int):
            return value
    raise RefusedError(
        f"rollout.engine=native: config.json of model type {values.get('model_type')!r} does not say {what}"
        f" (looked for {', '.join(names)}), so the KV cache cannot be sized"
    )


def kv_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes that keys and values of one token take over all layers: layers x 2 x KV heads x head size x bytes.

    Correct for grouped-query attention and for an explicit `head_dim`. A family for which it does not hold (heads that
    differ by layer, say) is refused when the engine is built, where the true shapes are seen.
    """
    values = config.get_text_config().to_dict()
    layers = _first(values, _LAYERS, "the number of layers")
    heads = _first(values, _HEADS, "the number of attention heads")
    kv_heads = _first(values, _KV_HEADS, "the number of key-value heads")
    head_dim = values.get("head_dim")
    if not isinstance(head_dim, int):
        head_dim = _first(values, _HIDDEN, "the hidden size") // heads
    return layers * 2 * kv_heads * head_dim * dtype.itemsize


def num_layers(config: PreTrainedConfig) -> int:
    """Layers of the language model."""
    return _first(config.get_text_config().to_dict(), _LAYERS, "the number of layers")


def max_positions(config: PreTrainedConfig) -> int | None:
    """Positions that the model knows; None when config.json does not say."""
    values = config.get_text_config().to_dict()
    return next((values[name] for name in _POSITIONS if isinstance(values.get(name), int)), None)


def plan_slots(*, kv_memory: int, slot_bytes: int, num_sequences: int) -> int:
    """Slots of the native engine: what fits into `kv_memory` bytes, and no more than the work can use.

    slot_bytes: bytes of one slot, `slot_tokens x kv_bytes_per_token`; num_sequences: sequences of one rollout.
    RefusedError when not even one slot fits.
    """
    assert min(slot_bytes, num_sequences) > 0
    fitting = kv_memory // slot_bytes
    if fitting < 1:
        raise RefusedError(
            f"rollout.kv_memory: {kv_memory} bytes do not hold one sequence, which needs {slot_bytes} bytes"
            " (longest prompt + rollout.max_response_tokens); raise rollout.kv_memory or shorten the sequences"
        )
    return min(fitting, num_sequences)


@dataclass(slots=True, kw_only=True, frozen=True)
class LayerShape:
    """What one attention layer stores for a token."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class LayerCache:
    """Keys [slots, heads, tokens, key size] and values [slots, heads, tokens, value size] of one layer.

    Heads before tokens: a decode step multiplies a slot's query heads with all its tokens, and this order makes the
    view `[:rows, :, :length]` a batch of matrices without a copy.
    """

    def __init__(self, shape: LayerShape, *, num_slots: int, slot_tokens: int) -> None:
        size = (num_slots, shape.kv_heads, slot_tokens)
        # Zeros, not empty: a masked position has weight 0, and 0 times a stray NaN is NaN.
        self.keys = torch.zeros((*size, shape.key_dim), dtype=shape.dtype, device=shape.device)
        self.values = torch.zeros((*size, shape.value_dim), dtype=shape.dtype, device=shape.device)

    def copy(self, sources: Tensor, destinations: Tensor, length: int) -> None:
        """First `length` tokens of slots `sources` [n] into slots `destinations` [n]; the two sets are disjoint."""
        for store in (self.keys[:, :, :length], self.values[:, :, :length]):
            store.index_copy_(0, destinations, store.index_select(0, sources))

    def vacate(self) -> None:
        """Free the memory of both tensors; they keep their shapes. Nothing to do when it was done before."""
        for store in (self.keys, self.values):
            store.untyped_storage().resize_(0)

    def fill(self) -> None:
        """Take the memory again; zeros, as in the beginning."""
        for store in (self.keys, self.values):
            store.untyped_storage().resize_(store.nbytes)
            store.zero_()

    @property
    def num_bytes(self) -> int:
        """Memory of both tensors now."""
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

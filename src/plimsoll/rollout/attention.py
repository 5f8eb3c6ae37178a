"""Attention over slots, hooked into transformers by name.

transformers asks two registries, by `config._attn_implementation`: one for the masks of a forward pass, one for the
attention of a layer. Both entries of ours look up the call in progress (a context variable, so neither a family that
drops keyword arguments nor another thread matters) and do what it is about: look at the model (`ProbeCall`), fill slots
with prompts (`PrefillCall`), or advance every slot by one token (`DecodeCall`). Which layer sees which mask stays the
family's own decision.

Shapes: B prompts, S slots, T query tokens, L cached tokens, H query heads, K key-value heads, D head size.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from plimsoll.errors import RefusedError
from plimsoll.rollout.kv import LayerCache, LayerShape

IMPLEMENTATION = "plimsoll_slots"

_HARMLESS = frozenset(
    {"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"}
)
"""Keyword arguments of attention functions that change nothing here. Any other that is set is refused."""


class Call(Protocol):
    """What a forward pass is about."""

    def mask(self, window: int | None, num_queries: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The mask of layers with this sliding window (None: full attention)."""
        ...

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
    ) -> Tensor:
        """query [B, H, T, D], key and value [B, K, T, D] → [B, T, H, D]."""
        ...


_current: ContextVar[Call | None] = ContextVar("plimsoll_slots_call", default=None)


@contextmanager
def calling(call: Call) -> Generator[None]:
    """Forward passes of models with our implementation are about `call` inside."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


def _call() -> Call:
    call = _current.get()
    assert call is not None, "a model that belongs to an engine was called by someone else"
    return call


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    call = _call()
    if isinstance(call, ProbeCall):
        call.check(module, attention_mask, kwargs)
    return call.attend(module, query, key, value, attention_mask, scaling), None


def _mask(
    *, q_length: int, dtype: torch.dtype, device: torch.device, local_size: int | None = None, **_: Any
) -> Tensor | None:
    return _call().mask(local_size, q_length, dtype, device)


def register() -> None:
    """Make the implementation known to transformers; again is harmless."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


class ProbeCall:
    """Sees two tokens go through the model and notes what every attention layer would store.

    The mask it hands out is not a mask but carries the window as its value, so that the layer's own idea of its window
    can be compared with the mask that the family gave to it.
    """

    def __init__(self) -> None:
        self.layers: dict[nn.Module, LayerShape] = {}

    def mask(self, window: int | None, num_queries: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        return torch.full((1, 1, num_queries, num_queries), window or 0, dtype=torch.int64, device=device)

    def check(self, module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
        """RefusedError, naming it, for anything that the slots do not compute."""
        name = type(module).__name__
        window = kwargs.pop("sliding_window", None)
        unknown = [k for k, v in kwargs.items() if k not in _HARMLESS and v is not None and v is not False]
        if unknown:
            raise _refused(f"{name} uses {', '.join(sorted(unknown))}")
        if kwargs.get("is_causal") is False:
            raise _refused(f"{name} is not causal")
        if module in self.layers:
            raise _refused(f"a layer ({name}) runs twice in one pass")
        masked = None if mask is None else int(mask.flatten()[0])
        if masked is None or (window is not None and window != masked):
            raise _refused(f"{name} has window {window}, its mask {masked} (0: full attention)")

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
    ) -> Tensor:
        self.layers[module] = LayerShape(
            kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            dtype=key.dtype,
            device=key.device,
        )
        return _causal(query, key, value, None, scaling)


class PrefillCall:
    """Prompts, padded on the right, go through the model; their keys and values into slots.

    Padding needs no mask: it stands behind every real token, so no real token sees it. What it leaves in the slot is
    overwritten before it can be seen.
    """

    def __init__(self, layers: dict[nn.Module, LayerCache], slots: Tensor) -> None:
        self._layers = layers
        self._slots = slots  # [B] int64

    def mask(self, window: int | None, num_queries: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if window is None or num_queries <= window:
            return None
        distance = torch.arange(num_queries, device=device)[:, None] - torch.arange(num_queries, device=device)
        return ((distance >= 0) & (distance < window))[None, None]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
    ) -> Tensor:
        cache, length = self._layers[module], key.shape[2]
        cache.keys[:, :, :length].index_copy_(0, self._slots, key)
        cache.values[:, :, :length].index_copy_(0, self._slots, value)
        return _causal(query, key, value, mask, scaling)


class DecodeCall:
    """One token for every slot below `rows`; row i of the batch is slot i.

    positions [S]: of the input tokens; writes [S]: where their keys and values go (another place for idle rows, which
    must not touch a prompt that is kept in their slot); length: L, no active position reaches it.
    """

    def __init__(
        self, layers: dict[nn.Module, LayerCache], *, positions: Tensor, writes: Tensor, length: int, slot_tokens: int
    ) -> None:
        self._layers = layers
        self._positions = positions
        self._writes = writes
        self._rows = positions.shape[0]
        self._length = length
        self._slot_tokens = slot_tokens
        self._flat: dict[int, Tensor] = {}

    def mask(self, window: int | None, num_queries: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Additive, [S, 1, 1, L], of the compute dtype: what the fused kernels like."""
        token = torch.arange(self._length, device=device)
        hidden = token > self._positions[:, None]
        if window is not None:
            hidden |= token <= self._positions[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        return mask[:, None, None, :]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
    ) -> Tensor:
        assert mask is not None  # the probe saw one in every layer
        cache, (rows, kv_heads, _, _) = self._layers[module], key.shape
        index = self._flat_index(kv_heads)
        cache.keys.view(-1, key.shape[3]).index_copy_(0, index, key.reshape(-1, key.shape[3]))
        cache.values.view(-1, value.shape[3]).index_copy_(0, index, value.reshape(-1, value.shape[3]))
        keys = cache.keys[:rows, :, : self._length]
        values = cache.values[:rows, :, : self._length]
        # Query heads of one key-value head become the rows of one matrix, so keys are neither repeated nor copied.
        grouped = query.reshape(rows, kv_heads, -1, query.shape[3])
        if query.dtype.itemsize < 4:
            # The fused kernel keeps scores in fp32; a plain product would round them to the compute dtype.
            out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask.to(query.dtype), scale=scaling)
        else:
            scale = query.shape[3] ** -0.5 if scaling is None else scaling
            scores = torch.matmul(grouped * scale, keys.transpose(2, 3)).add_(mask)
            out = torch.matmul(scores.softmax(dim=-1), values)
        return out.reshape(rows, 1, -1, value.shape[3])

    def _flat_index(self, kv_heads: int) -> Tensor:
        """Rows of the cache seen as [slots x heads x tokens, D], [S x K]; the same for every layer of a step."""
        if kv_heads not in self._flat:
            row = torch.arange(self._rows * kv_heads, device=self._writes.device) * self._slot_tokens
            self._flat[kv_heads] = (row.view(self._rows, kv_heads) + self._writes[:, None]).view(-1)
        return self._flat[kv_heads]


def _causal(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention of whole prompts: causal, or by a mask that says so."""
    groups = query.shape[1] // key.shape[1]
    fused_groups = groups > 1 and mask is None and query.is_cuda  # elsewhere it falls back to the slow exact kernel
    if groups > 1 and not fused_groups:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=fused_groups
    )
    return out.transpose(1, 2).contiguous()


def _refused(reason: str) -> RefusedError:
    return RefusedError(
        f"rollout.engine=native cannot run this model: {reason}. It runs causal models with full or sliding attention;"
        " choose another rollout.engine or another model"
    )

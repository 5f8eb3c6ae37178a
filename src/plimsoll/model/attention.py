"""Attention over packed rows, registered with transformers under two names.

`plimsoll_varlen` uses torch's variable-length kernel (GPU, 16-bit). `plimsoll_padded` pads inside attention only: the
[1, T] row is gathered into [S, heads, Lmax, head_dim], attended causally, and scattered back; everything else of the
model runs without padding. Both read the `PackedRows` that `PackedPolicy` passes through the model's keyword arguments.

No mask function is registered beside them: transformers then builds no [T, T] mask and hands None to attention.
Dropout inside attention is off: a ratio of policies is only 1 when the same tokens give the same numbers twice.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from plimsoll.errors import RefusedError
from plimsoll.model.compat import causal_varlen_attention
from plimsoll.model.rows import PackedRows

VARLEN = "plimsoll_varlen"
PADDED = "plimsoll_padded"

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Keyword arguments that change the scores and that these kernels do not apply. Ignoring one would be wrong."""


def padded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedRows | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D]; key, value [1, kv_heads, T, D]; returns [1, T, heads, D]."""
    rows = _checked(module, packed, kwargs)
    queries, keys, values = (_pad(states, rows) for states in (query, key, value))
    windowed = sliding_window is not None and rows.max_length > sliding_window
    out = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=_window_mask(rows.max_length, sliding_window, query.device) if windowed else None,  # pyright: ignore[reportArgumentType]
        is_causal=not windowed,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    flat = out.transpose(1, 2).reshape(-1, *out.shape[1::2])  # [S * Lmax, heads, D]
    if rows.scatter is not None:
        flat = flat.index_select(0, rows.scatter)
    return flat[None], None


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedRows | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D]; key, value [1, kv_heads, T, D]; returns [1, T, heads, D]. CUDA, float16 or bfloat16."""
    rows = _checked(module, packed, kwargs)
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    out = causal_varlen_attention(
        queries, keys, values, rows.cu_seqlens, rows.max_length, scale=scaling, window=sliding_window
    )
    return out[None], None


def _pad(states: Tensor, packed: PackedRows) -> Tensor:
    """[1, heads, T, D] → [S, heads, Lmax, D]."""
    rows = states[0].transpose(0, 1)  # [T, heads, D]
    if packed.gather is not None:
        rows = rows.index_select(0, packed.gather)
    return rows.reshape(packed.num_sequences, packed.max_length, *rows.shape[1:]).transpose(1, 2)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """[Lmax, Lmax] bool, True where a query may look: itself and the `window` - 1 tokens before it."""
    index = torch.arange(length, device=device)
    distance = index[:, None] - index[None, :]
    return (distance >= 0) & (distance < window)


def _checked(module: nn.Module, packed: PackedRows | None, kwargs: dict[str, object]) -> PackedRows:
    if packed is None:
        raise RefusedError(
            f"{type(module).__name__} does not hand keyword arguments on to attention, which attention over packed "
            "rows needs; set model.packing=single"
        )
    found = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if found:
        raise RefusedError(
            f"{type(module).__name__} passes {', '.join(found)} to attention, which attention over packed rows does "
            "not apply; set model.packing=single"
        )
    return packed


_KERNELS: dict[str, Callable[..., tuple[Tensor, None]]] = {VARLEN: varlen_attention, PADDED: padded_attention}
for _name, _kernel in _KERNELS.items():
    # Not traced when layers are compiled: lengths change with every micro-batch, and each would be compiled again.
    AttentionInterface.register(_name, cast("Callable[..., object]", torch.compiler.disable(_kernel)))

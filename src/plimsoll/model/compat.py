"""What differs between the versions of torch and transformers that we support, in one place."""

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

# torch 2.11 takes fewer key-value heads as they are; torch 2.13 wants to be told so.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def causal_varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """query [T, heads, D], key and value [T, kv_heads, D], cu_seqlens int32 [S + 1]; returns [T, heads, D].

    `window` counts the query's own token; the kernel counts those to the left of it.
    """
    bounds = (-1 if window is None else window - 1, 0)
    grouped = _GROUPED if query.shape[1] != key.shape[1] else {}
    out = varlen_attn(
        query, key, value, cu_seqlens, cu_seqlens, max_length, max_length, scale=scale, window_size=bounds, **grouped
    )
    assert isinstance(out, torch.Tensor)
    return out

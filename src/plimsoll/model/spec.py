"""What a model family needs from us, read from its config and its modules, and refused by name where we cannot give it.

The chunked head computes logits from hidden states itself, so it must know everything that stands between the two. The
probe (`plimsoll.model.probe`) compares it with the model's own logits: a transformation that is missing here is found.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from plimsoll.errors import RefusedError

_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})


@dataclass(slots=True, kw_only=True, frozen=True)
class ModelSpec:
    """Facts of one model."""

    softcap: float | None
    """Logits are softcap·tanh(logits / softcap); None: off."""
    logit_scale: float
    """Factor on the logits (Cohere's `logit_scale`, 1 / Granite's `logits_scaling`); 1: off."""
    layer_types: tuple[str, ...]
    """Distinct kinds of attention; empty: the family has one kind, full."""
    own_attention: str
    """Attention that transformers chose for the model."""

    @property
    def unpackable(self) -> tuple[str, ...]:
        """Kinds of layers that mix tokens in a way that packed rows do not separate (recurrent state, chunks)."""
        return tuple(kind for kind in self.layer_types if kind not in _PACKABLE_LAYERS)


def model_spec(lm: PreTrainedModel) -> ModelSpec:
    """Read the facts; RefusedError names what the chunked head cannot reproduce."""
    values = cast("Mapping[str, Any]", lm.config.to_dict())
    head = cast("nn.Module", lm.get_output_embeddings())
    if not isinstance(head, nn.Linear):
        raise RefusedError(
            f"model.path: {type(lm).__name__} has no linear output head ({type(head).__name__}); log-probabilities are "
            "computed from hidden states and the head's weight, so this family cannot be trained in this version"
        )
    softcap = values.get("final_logit_softcapping")
    scale = _logit_scale(values)
    if softcap is not None and scale != 1.0:
        raise RefusedError(f"model.path: {type(lm).__name__} caps and scales its logits; only one of them is supported")
    return ModelSpec(
        softcap=None if softcap is None else float(softcap),
        logit_scale=scale,
        layer_types=tuple(sorted(set(values.get("layer_types") or ()))),
        own_attention=own_attention(lm.config),
    )


def own_attention(config: PreTrainedConfig) -> str:
    """Name of the attention in use (`sdpa`, `eager`, …)."""
    return cast("str", config._attn_implementation)  # pyright: ignore[reportPrivateUsage]  # there is no public reader


def decoder_layers(lm: PreTrainedModel) -> nn.ModuleList:
    """The stack of layers: the one ModuleList of the base model with `num_hidden_layers` entries."""
    wanted = int(lm.config.num_hidden_layers)
    found = [child for child in lm.base_model.children() if isinstance(child, nn.ModuleList) and len(child) == wanted]
    if len(found) != 1:
        raise RefusedError(
            f"model.path: {type(lm).__name__} has {len(found)} stacks of {wanted} layers where one is needed; "
            "this family cannot be sharded in this version"
        )
    return found[0]


def _logit_scale(values: Mapping[str, Any]) -> float:
    if values.get("logit_scale") is not None:  # Cohere multiplies
        return float(values["logit_scale"])
    if values.get("logits_scaling") is not None:  # Granite divides
        return 1.0 / float(values["logits_scaling"])
    return 1.0

"""Before the first step: does this model, on this device, do what the update relies on?

Three questions, each answered by a forward or two over very short rows:

1. Packed rows: do the numbers of a sequence change when its neighbour's tokens change? (They must not, at all: shapes
   and kernels are the same.) Recurrent layers leak here.
2. Positions: does a packed sequence give what it gives alone under the model's own attention?
3. Head: does the chunked head give what the model's own logits give?

A no to 1 or 2 makes `model.packing: auto` fall back to one sequence a forward, said once, and refuses an explicit
setting. A no to 3 is refused: nothing else can compute this model's log-probabilities.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from plimsoll.errors import RefusedError
from plimsoll.model.policy import PACKED_ATTENTION, PackedPolicy
from plimsoll.model.rows import PackedRows, pack_rows

logger = logging.getLogger(__name__)

_LENGTHS = (13, 7)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Mean |difference| of log-probabilities that rounding explains. Not the largest one: two right kernels in bfloat16
differ by a step of the logits at single tokens, and logits of magnitude 20 step by 0.125; what is wrong is wrong at
most tokens."""
_LEAK = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""The same shapes and kernels give the same bits nearly everywhere; this allows for kernels that add in any order."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ProbeReport:
    """What was found."""

    packing: str
    """The packing in force after the probe."""
    packed_difference: float | None
    """Mean |log-prob packed - alone| of the worse sequence; None where packing was not asked for."""
    leak: float | None
    """Largest change of a sequence's log-probs when its neighbour's tokens change."""
    head_difference: float
    """Mean |chunked - the model's own logits|, of log-probs or of entropies, whichever is more."""


@torch.no_grad()
def probe(
    policy: PackedPolicy, *, requested: str, vocab: int, dtype: torch.dtype, device: torch.device, temperature: float
) -> ProbeReport:
    """Run the questions; `requested` is the recipe's `model.packing`. May change the policy's packing (auto only).

    Every rank of a sharded policy must call it: forwards are collective.
    """
    packing = policy.packing
    policy.set_packing("single")
    alone = [policy(_rows([i], vocab, device), temperature=temperature) for i in (0, 1)]
    own = policy(_rows([0], vocab, device), temperature=temperature, own_logits=True)
    head = max(_mean(own[0], alone[0][0]), _mean(own[1], alone[0][1]))
    if head > _TOLERANCE[dtype]:
        raise RefusedError(
            f"model.path: log-probabilities of {type(policy.lm).__name__} computed from its hidden states differ from "
            f"those of its own logits by {head:.3g}; it changes its logits in a way that is not known here"
        )
    if packing not in PACKED_ATTENTION:
        return ProbeReport(packing=packing, packed_difference=None, leak=None, head_difference=head)
    difference = leak = None
    reason = _unpackable(policy)
    if reason is None:
        policy.set_packing(packing)
        try:
            pair = policy(_rows([0, 1], vocab, device), temperature=temperature)[0]
            other = policy(_rows([2, 1], vocab, device), temperature=temperature)[0]
        except RefusedError as error:
            reason = str(error)
        except TypeError as error:
            if "packed" not in str(error):  # anything else is a fault, not a family without keyword arguments
                raise
            reason = str(error)
        else:
            first = len(alone[0][0])
            difference = max(_mean(pair[:first], alone[0][0]), _mean(pair[first:], alone[1][0]))
            leak = _largest(pair[first:], other[first:])
            if leak > _LEAK[dtype]:
                reason = f"a sequence changes by {leak:.3g} with the tokens of its neighbour"
            elif difference > _TOLERANCE[dtype]:
                reason = f"a sequence differs by {difference:.3g} between packed and alone"
    if reason is not None:
        _fall_back(policy, requested, packing, reason)
    return ProbeReport(packing=policy.packing, packed_difference=difference, leak=leak, head_difference=head)


def _fall_back(policy: PackedPolicy, requested: str, packing: str, reason: str) -> None:
    name = type(policy.lm).__name__
    if requested != "auto":
        raise RefusedError(
            f"model.packing={requested}: {name} cannot go through packed rows here ({reason}); "
            "set model.packing=auto or single"
        )
    logger.warning("%s goes one sequence a forward instead of %s rows: %s", name, packing, reason)
    policy.set_packing("single")


def _unpackable(policy: PackedPolicy) -> str | None:
    kinds = policy.spec.unpackable
    return f"its {', '.join(kinds)} layers do not separate packed rows" if kinds else None


def _rows(which: list[int], vocab: int, device: torch.device) -> PackedRows:
    """Rows 0 and 1 are the pair; row 2 has the length of row 0 and other tokens."""
    ids: list[Tensor] = []
    for row in which:
        length = _LENGTHS[row % 2]
        ids.append((torch.arange(length) * (7 + 4 * row) + 3 + row) % vocab)
    sampled = [torch.arange(len(row)) > 0 for row in ids]
    return pack_rows(ids, sampled, device)


def _mean(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().mean())


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())

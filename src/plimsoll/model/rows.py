"""Packed rows: the sequences of one micro-batch behind one another, without padding.

Shapes: T packed tokens, S sequences, N tokens that the policy sampled (N <= T), Lmax longest sequence.

Example, lengths (3, 2):

    token_ids    [a0 a1 a2 b0 b1]     positions [0 1 2 0 1]
    sampled      [ 0  1  1  0  1]     predicted [1 2 4]   sources [0 1 3]

`predicted` are the tokens whose log-probability is wanted; the hidden state that predicts token i is that at i - 1, so
`sources` = `predicted` - 1. The first token of a sequence can never be predicted: nothing comes before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True, frozen=True)
class PackedRows:
    """What one forward needs. Reaches attention as a keyword argument, so recomputation sees the same object."""

    token_ids: Tensor  # [1, T] int64
    positions: Tensor  # [1, T] int64, restarting at 0 with every sequence
    predicted: Tensor  # [N] int64, indices into T of the sampled tokens
    sequence_index: Tensor  # [N] int64, sequence of each predicted token
    lengths: tuple[int, ...]  # S
    cu_seqlens: Tensor  # [S + 1] int32, for variable-length kernels
    gather: Tensor | None  # [S * Lmax] int64, index into T of every padded slot; None: all lengths equal
    scatter: Tensor | None  # [T] int64, index into S * Lmax of every token; None: all lengths equal

    @property
    def max_length(self) -> int:
        """Lmax."""
        return max(self.lengths)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def sources(self) -> Tensor:
        """Indices into T of the hidden states that predict `predicted`, shape [N]."""
        return self.predicted - 1


def pack_rows(token_ids: Sequence[Tensor], sampled: Sequence[Tensor], device: torch.device) -> PackedRows:
    """`token_ids` and `sampled`: one [L] int64 and one [L] bool column a sequence."""
    lengths = tuple(len(ids) for ids in token_ids)
    assert min(lengths, default=0) > 0, "a packed row needs at least one sequence, each with at least one token"
    longest, count, total = max(lengths), len(lengths), sum(lengths)
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    sequence = torch.repeat_interleave(torch.arange(count), sizes)
    positions = torch.arange(total) - starts[sequence]
    predicted = torch.cat(list(sampled)).nonzero().squeeze(-1)
    assert not bool((positions[predicted] == 0).any()), "the first token of a sequence cannot be a sampled one"
    gather = scatter = None
    if longest * count != total:
        # A slot behind the end of its sequence repeats the last token: with causal attention no real query sees it.
        slot = torch.minimum(torch.arange(longest)[None, :], sizes[:, None] - 1)
        gather = (starts[:, None] + slot).flatten().to(device)
        scatter = (sequence * longest + positions).to(device)
    return PackedRows(
        token_ids=torch.cat(list(token_ids))[None].to(device),
        positions=positions[None].to(device),
        predicted=predicted.to(device),
        sequence_index=sequence[predicted].to(device),
        lengths=lengths,
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(torch.int32).to(device),
        gather=gather,
        scatter=scatter,
    )

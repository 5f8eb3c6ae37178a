"""The policy: a causal language model of transformers whose forward gives log-probabilities instead of logits."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plimsoll.loss.chunked import chunked_logprobs
from plimsoll.model.attention import PADDED, VARLEN
from plimsoll.model.rows import PackedRows
from plimsoll.model.spec import ModelSpec

PACKED_ATTENTION = {"packed": VARLEN, "padded": PADDED}
"""Attention by `packing`; `single` keeps the model's own."""


class PackedPolicy(nn.Module):
    """Wraps the model as `.lm`. This module is the root that FSDP2 shards.

    The head's weight is read inside this forward on purpose: only there is the root group's weight unsharded and cast,
    and only there does its gradient join the root's reduction. With tied embeddings it is the embedding's weight.
    """

    def __init__(self, lm: PreTrainedModel, spec: ModelSpec, *, packing: str, chunk: int) -> None:
        super().__init__()
        self.lm = lm
        self.spec = spec
        self.chunk = chunk
        self.packing = ""
        self.set_packing(packing)
        self.eval()  # dropout off for good: a second forward over the same tokens must give the same numbers

    def set_packing(self, packing: str) -> None:
        """`packed` (variable-length kernel), `padded` (inside attention only), `single` (one sequence a forward)."""
        self.packing = packing
        self.lm.set_attn_implementation(PACKED_ATTENTION.get(packing, self.spec.own_attention))

    def forward(self, rows: PackedRows, *, temperature: float, own_logits: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of every sampled token, shape [N] each, fp32 (float64 from a float64 model).

        The distribution is softmax(logits / temperature): the one place of the trainer where temperature is applied.
        `own_logits` takes them from the model's own [T, V] logits instead; the probe compares the two.
        """
        if own_logits:
            return self._from_own_logits(rows, temperature)
        hidden = self.hidden(rows)  # [T, H]
        head = cast("nn.Module", self.lm.get_output_embeddings())
        assert isinstance(head, nn.Linear)
        return chunked_logprobs(
            hidden.index_select(0, rows.sources),
            head.weight,
            rows.token_ids[0].index_select(0, rows.predicted),
            temperature=temperature / self.spec.logit_scale,
            chunk=self.chunk,
            bias=head.bias,
            softcap=self.spec.softcap,
        )

    def hidden(self, rows: PackedRows) -> Tensor:
        """Last hidden states [T, H], after the final norm."""
        return self.lm.base_model(**self._inputs(rows)).last_hidden_state[0]

    def _inputs(self, rows: PackedRows) -> dict[str, Any]:
        inputs = {"input_ids": rows.token_ids, "position_ids": rows.positions, "use_cache": False}
        if self.packing in PACKED_ATTENTION:
            return {**inputs, "packed": rows}
        assert rows.num_sequences == 1, "packing 'single' takes one sequence a forward"
        return inputs

    def _from_own_logits(self, rows: PackedRows, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self.lm(**self._inputs(rows)).logits[0]  # [T, V]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        logprobs = wide.index_select(0, rows.sources).log_softmax(-1)
        targets = rows.token_ids[0].index_select(0, rows.predicted)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)

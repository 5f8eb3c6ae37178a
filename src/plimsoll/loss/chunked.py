"""Log-probabilities and entropy from hidden states, without a [T, V] tensor.

Shape suffixes: T tokens, H hidden, V vocabulary, C tokens of one chunk.

One head position: raw = hidden · weightᵀ + bias, capped = softcap · tanh(raw / softcap), s = capped / temperature,

    logprob = s[target] - lse(s)                    d logprob / d s_j = 1[j = target] - p_j
    entropy = lse(s) - Σ_j p_j s_j                  d entropy / d s_j = -p_j (log p_j + entropy)

Forward keeps, of all this, two numbers a token (lse, entropy). Backward computes a chunk's logits again. The matmuls
run in the inputs' dtype; softmax, and the sum of the head's gradient over chunks, in float32 (float64 for float64).
Letting autograd add a bf16 weight gradient chunk by chunk rounds at every chunk: the more chunks, the worse.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunked_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    chunk: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and entropy of each distribution, both [T] and both differentiable.

    `hidden_TH` row i is the state that predicts `targets_T[i]`; pass only the rows that are needed (sampled tokens).
    `weight_VH` is a plain tensor in the dtype of `hidden_TH` (under FSDP2: the unsharded parameter). `temperature`
    divides the logits here and nowhere else. `chunk` tokens have logits at one time: two float32 [chunk, V] buffers at
    the peak, three in backward with `softcap`; backward holds one float32 [V, H] besides. `softcap` bounds logits to
    ±softcap by tanh (Gemma 2, arXiv:2408.00118 §2). Results are float32, or float64 for float64 inputs. Autocast is
    not consulted.
    """
    assert temperature > 0, f"temperature {temperature}"
    assert chunk > 0, f"chunk {chunk}"
    assert hidden_TH.dtype == weight_VH.dtype, f"hidden is {hidden_TH.dtype}, weight is {weight_VH.dtype}"
    assert len(hidden_TH) == len(targets_T), f"{len(hidden_TH)} hidden states, {len(targets_T)} targets"
    outputs = _ChunkedLogprobs.apply(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        hidden_TH, weight_VH, bias, targets_T, temperature, chunk, softcap
    )
    return cast(tuple[Tensor, Tensor], outputs)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        temperature: float,
        chunk: int,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(hidden_TH.dtype, torch.float32)
        logprobs_T, entropy_T, lse_T = (hidden_TH.new_empty(len(hidden_TH), dtype=precise) for _ in range(3))
        for start in range(0, len(hidden_TH), chunk):
            rows = slice(start, start + chunk)
            raw_CV = _raw_logits(hidden_TH[rows], weight_VH, bias_V, precise)
            logprobs_T[rows], entropy_T[rows], lse_T[rows] = _chunk_logprobs(
                raw_CV, targets_T[rows], temperature=temperature, softcap=softcap
            )
            del raw_CV  # or it lives on beside the next chunk's logits
        ctx.set_materialize_grads(False)  # an unused output's gradient stays None, and costs nothing
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, lse_T, entropy_T)
        ctx.temperature, ctx.chunk, ctx.softcap = temperature, chunk, softcap
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, bias_V, targets_T, lse_T, entropy_T = ctx.saved_tensors
        precise = lse_T.dtype
        if grad_logprobs_T is None:
            grad_logprobs_T = torch.zeros_like(lse_T)
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden_TH = torch.empty_like(hidden_TH) if want_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=precise) if want_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=precise) if want_bias else None
        for start in range(0, len(hidden_TH), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            grad_raw_CV = _grad_raw_logits(
                _raw_logits(hidden_TH[rows], weight_VH, bias_V, precise),
                targets_T[rows],
                lse_T[rows],
                entropy_T[rows],
                grad_logprobs_T[rows],
                None if grad_entropy_T is None else grad_entropy_T[rows],
                temperature=ctx.temperature,
                softcap=ctx.softcap,
            )
            if grad_bias_V is not None:
                grad_bias_V.add_(grad_raw_CV.sum(0))
            if grad_hidden_TH is not None:
                grad_hidden_TH[rows] = grad_raw_CV.to(hidden_TH.dtype) @ weight_VH
            if grad_weight_VH is not None:
                _add_outer(grad_weight_VH, grad_raw_CV, hidden_TH[rows])
            del grad_raw_CV  # or it lives on beside the next chunk's logits
        return (
            grad_hidden_TH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            *(None,) * 4,
        )


def _raw_logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, precise: torch.dtype) -> Tensor:
    """Logits of one chunk [C, V]: matmul in the inputs' dtype, result (safe to change in place) in `precise`."""
    logits_CV = (hidden_CH @ weight_VH.t()).to(precise)
    return logits_CV if bias_V is None else logits_CV.add_(bias_V)


def _chunk_logprobs(
    raw_CV: Tensor, targets_C: Tensor, *, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy and log-sum-exp of one chunk, each [C]. Uses up `raw_CV`."""
    if softcap is not None:
        raw_CV.div_(softcap).tanh_().mul_(softcap)
    raw_CV.div_(temperature)
    max_C1 = raw_CV.amax(-1, keepdim=True)
    raw_CV.sub_(max_C1)
    exp_CV = raw_CV.exp()
    sum_C = exp_CV.sum(-1)
    log_sum_C = sum_C.log()
    logprobs_C = raw_CV.gather(1, targets_C[:, None]).squeeze(1) - log_sum_C
    entropy_C = log_sum_C - exp_CV.mul_(raw_CV).sum(-1) / sum_C
    return logprobs_C, entropy_C, log_sum_C.add_(max_C1.squeeze(1))


def _grad_raw_logits(
    raw_CV: Tensor,
    targets_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
    *,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Gradient of one chunk's raw logits [C, V]. Uses up `raw_CV`."""
    tanh_CV = None
    if softcap is not None:
        tanh_CV = raw_CV.div_(softcap).tanh_()
        raw_CV = tanh_CV * softcap
    logp_CV = raw_CV.div_(temperature).sub_(lse_C[:, None])
    if grad_entropy_C is None:
        grad_CV = logp_CV.exp_().mul_(-grad_logprobs_C[:, None])
    else:
        # -g p - h p (log p + entropy) = p (-h log p - (g + h entropy)): no third [C, V] buffer
        grad_CV = logp_CV.exp()
        shift_C = grad_logprobs_C + grad_entropy_C * entropy_C
        grad_CV.mul_(logp_CV.mul_(-grad_entropy_C[:, None]).sub_(shift_C[:, None]))
    grad_CV.scatter_add_(1, targets_C[:, None], grad_logprobs_C[:, None])
    grad_CV.div_(temperature)
    return grad_CV if tanh_CV is None else grad_CV.mul_(tanh_CV.square_().neg_().add_(1))


def _add_outer(total_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor) -> None:
    """total += gradᵀ · hidden, in the precision of `total`, without a second [V, H] buffer.

    The CUDA form multiplies in the inputs' dtype and adds in float32 inside the matmul; the CPU has no such kernel.
    """
    if hidden_CH.is_cuda and hidden_CH.dtype != total_VH.dtype:
        grad_VC = grad_CV.to(hidden_CH.dtype).t()
        torch.addmm(total_VH, grad_VC, hidden_CH, out_dtype=total_VH.dtype, out=total_VH)
    else:
        total_VH.addmm_(grad_CV.t(), hidden_CH.to(total_VH.dtype))

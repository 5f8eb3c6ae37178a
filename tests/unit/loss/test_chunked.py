"""Chunked log-probs against one-shot log_softmax: values, gradients, precision, what is held."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.loss.chunked import chunked_logprobs

T, H, V = 29, 16, 83
SOFTCAPS = [None, 3.0]


def inputs(dtype: torch.dtype, *, tokens: int = T, hidden: int = H, vocab: int = V) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + vocab)
    hidden_TH = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype)
    weight_VH = (torch.randn(vocab, hidden, generator=generator, dtype=torch.float64) / hidden**0.5).to(dtype)
    targets_T = torch.randint(vocab, (tokens,), generator=generator)
    return hidden_TH.requires_grad_(), weight_VH.requires_grad_(), targets_T


def one_shot(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logp = torch.log_softmax(logits / temperature, dim=-1)
    return logp[torch.arange(len(targets)), targets], torch.distributions.Categorical(logits=logp).entropy()


def upstream(values: Tensor, seed: int) -> Tensor:
    return torch.randn(values.shape, generator=torch.Generator().manual_seed(seed), dtype=values.dtype)


def gradients(outputs: tuple[Tensor, Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    logprobs, entropy = outputs
    return torch.autograd.grad((logprobs * upstream(logprobs, 1) + entropy * upstream(entropy, 2)).sum(), leaves)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("chunk", [1, 7, T, 10 * T])
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_the_one_shot_result(
    dtype: torch.dtype, atol: float, chunk: int, softcap: float | None, with_bias: bool
) -> None:
    hidden, weight, targets = inputs(dtype)
    bias = torch.linspace(-1, 1, V, dtype=dtype).requires_grad_() if with_bias else None
    leaves = [hidden, weight] if bias is None else [hidden, weight, bias]
    got = chunked_logprobs(hidden, weight, targets, temperature=0.7, chunk=chunk, bias=bias, softcap=softcap)
    expected = one_shot(hidden, weight, targets, temperature=0.7, bias=bias, softcap=softcap)
    for a, b in zip((*got, *gradients(got, leaves)), (*expected, *gradients(expected, leaves)), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_numerical_gradients_agree_in_float64(softcap: float | None) -> None:
    hidden, weight, targets = inputs(torch.float64, tokens=5, hidden=3, vocab=6)
    bias = torch.zeros(6, dtype=torch.float64, requires_grad=True)

    def function(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return chunked_logprobs(h, w, targets, temperature=1.3, chunk=2, bias=b, softcap=softcap)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_alone_has_its_own_gradient(used: int) -> None:
    hidden, weight, targets = inputs(torch.float64)
    got = chunked_logprobs(hidden, weight, targets, temperature=0.7, chunk=7)[used]
    expected = one_shot(hidden, weight, targets, temperature=0.7)[used]
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), [hidden, weight]),
        torch.autograd.grad(expected.square().sum(), [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_the_other_the_same_one(frozen: str) -> None:
    hidden, weight, targets = inputs(torch.float64)
    both = gradients(chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk=7), [hidden, weight])
    live, expected = (weight, both[1]) if frozen == "hidden" else (hidden, both[0])
    (weight if frozen == "weight" else hidden).requires_grad_(False)
    (alone,) = gradients(chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk=7), [live])
    torch.testing.assert_close(alone, expected, atol=0, rtol=0)


def test_no_tokens_give_empty_outputs_and_zero_weight_gradient() -> None:
    hidden, weight, targets = inputs(torch.float32, tokens=0)
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk=7)
    assert logprobs.shape == entropy.shape == (0,)
    grad_hidden, grad_weight = torch.autograd.grad((logprobs + entropy).sum(), [hidden, weight])
    assert grad_hidden.shape == (0, H)
    assert torch.equal(grad_weight, torch.zeros(V, H))


def test_temperature_divides_the_logits_once() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    identity = torch.eye(3, dtype=torch.float64)
    for temperature, first, second in ((0.5, -0.142932, -2.142932), (1.0, -0.407606, -1.407606)):
        for target, expected in ((0, first), (1, second)):
            logprob, _ = chunked_logprobs(logits, identity, torch.tensor([target]), temperature=temperature, chunk=1)
            assert logprob.item() == pytest.approx(expected, abs=1e-6)


def test_same_temperature_on_both_sides_gives_ratio_one_exactly() -> None:
    hidden, weight, targets = inputs(torch.float32)
    new, _ = chunked_logprobs(hidden, weight, targets, temperature=0.5, chunk=7)
    with torch.no_grad():
        old, _ = chunked_logprobs(hidden, weight, targets, temperature=0.5, chunk=7)
    assert torch.equal((new - old).exp(), torch.ones(T))


def test_softmax_runs_in_float32_for_bfloat16_inputs_of_a_large_vocabulary() -> None:
    vocab = 151_936
    hidden, weight, targets = inputs(torch.bfloat16, tokens=4, hidden=8, vocab=vocab)
    with torch.no_grad():
        logits = hidden @ weight.t()  # what the head gives; everything after it must be exact
        truth = torch.log_softmax(logits.double(), -1).gather(1, targets[:, None]).squeeze(1)
        rounded = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
        got, _ = chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk=2)
    assert got.dtype == torch.float32
    assert (got - truth).abs().max() < 1e-5
    assert (rounded - truth).abs().max() > 0.01  # enough to bend an importance ratio: why the test exists


@pytest.mark.parametrize("chunk", [128, 512])
def test_head_gradient_in_bfloat16_is_as_good_as_without_chunks(chunk: int) -> None:
    hidden, weight, targets = inputs(torch.bfloat16, tokens=2048, hidden=32, vocab=256)

    def weight_gradient(dtype: torch.dtype, chunk: int | None) -> Tensor:
        h, w = (leaf.detach().to(dtype).requires_grad_() for leaf in (hidden, weight))
        if chunk is None:
            outputs = one_shot(h, w, targets)
        else:
            outputs = chunked_logprobs(h, w, targets, temperature=1.0, chunk=chunk)
        logprobs = outputs[0]
        (gradient,) = torch.autograd.grad((logprobs * upstream(logprobs.double(), 1).to(logprobs.dtype)).sum(), [w])
        return gradient.double()

    truth = weight_gradient(torch.float64, None)
    error, unchunked = ((weight_gradient(torch.bfloat16, c) - truth).norm() / truth.norm() for c in (chunk, None))
    assert error <= 1.2 * unchunked


class Sizes(TorchDispatchMode):
    """Records the number of elements of every tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


def test_no_tensor_of_all_tokens_by_vocabulary_is_ever_made() -> None:
    hidden, weight, targets = inputs(torch.float32, tokens=64, hidden=4, vocab=50)
    with Sizes() as sizes:
        gradients(chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk=8), [hidden, weight])
    assert sizes.largest == 8 * 50


def test_only_inputs_and_token_columns_are_saved_for_backward() -> None:
    hidden, weight, targets = inputs(torch.float32, tokens=64, hidden=4, vocab=50)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunked_logprobs(hidden, weight, targets, temperature=1.0, chunk=8)
    inputs_saved = {hidden.data_ptr(), weight.data_ptr(), targets.data_ptr()}
    assert all(t.data_ptr() in inputs_saved or t.shape == (64,) for t in saved)
    assert len(saved) == 5  # hidden, weight, targets, log-sum-exp, entropy

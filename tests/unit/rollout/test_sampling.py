import numpy as np
import pytest
import torch

from plimsoll.rollout import sampling
from plimsoll.rollout.sampling import RowParams, sample, truncate


def _params(rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> RowParams:
    return RowParams.build(
        np.full(rows, temperature, dtype=np.float32),
        np.full(rows, top_k, dtype=np.int64),
        np.full(rows, top_p, dtype=np.float64),
        torch.device("cpu"),
    )


def _grid(rows: int) -> torch.Tensor:
    """Evenly spaced numbers in (0, 1): the best possible uniform sample."""
    return (torch.arange(rows, dtype=torch.float64) + 0.5) / rows


def test_frequencies_and_logprobs_are_those_of_the_full_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    tokens, logprobs = sample(logits.expand(10_000, 4), _params(10_000), _grid(10_000))
    probs = logits.softmax(-1)
    torch.testing.assert_close(tokens.bincount(minlength=4) / 10_000, probs, atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[tokens])
    assert logprobs[0].item() == pytest.approx(-0.44019, abs=1e-5)  # by hand: 2 - log(e^2 + e + 1 + 1/e)


def test_chi_square_of_random_draws():
    logits = torch.linspace(-3, 3, 20)
    uniform = torch.from_numpy(np.random.default_rng(0).random(20_000))
    tokens, _ = sample(logits.expand(20_000, 20), _params(20_000, temperature=1.7), uniform)
    expected = (logits / 1.7).softmax(-1) * 20_000
    chi_square = ((tokens.bincount(minlength=20) - expected) ** 2 / expected).sum()
    assert chi_square < 59  # 99.9995 % with 19 degrees of freedom


def test_token_is_the_first_whose_cumulative_probability_exceeds_the_number():
    probs = torch.tensor([0.25, 0.0, 0.5, 0.25])
    uniform = torch.tensor([0.0001, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2.0**-53], dtype=torch.float64)
    tokens, _ = sample(probs.log().expand(6, 4), _params(6), uniform)
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("uniform", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_zero_probability_is_never_drawn(uniform: float):
    logits = torch.full((1, 9), float("-inf"))
    logits[0, 4] = 0.0
    tokens, logprobs = sample(logits, _params(1), torch.tensor([uniform], dtype=torch.float64))
    assert tokens.tolist() == [4]
    assert logprobs.tolist() == [0.0]


def test_greedy_rows_are_certain_and_others_beside_them_are_not_touched():
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(0))
    uniform = torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64)
    mixed = RowParams.build(
        np.array([0, 1, 0, 1], dtype=np.float32), np.zeros(4, dtype=np.int64), np.ones(4), torch.device("cpu")
    )
    tokens, logprobs = sample(logits, mixed, uniform)
    plain, plain_logprobs = sample(logits, _params(4), uniform)
    greedy, greedy_logprobs = sample(logits, _params(4, temperature=0.0), uniform)
    assert tokens[[1, 3]].tolist() == plain[[1, 3]].tolist()
    assert tokens[[0, 2]].tolist() == greedy[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    assert logprobs[[1, 3]].tolist() == plain_logprobs[[1, 3]].tolist()
    assert logprobs[[0, 2]].tolist() == [0, 0]
    assert greedy_logprobs.tolist() == [0] * 4


def _brute_force(logits: list[float], top_k: int, top_p: float) -> list[int]:
    """Ids that stay, one after another from the most likely."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = [float(np.exp(logits[i])) for i in order]
    kept: list[int] = []
    reached = 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and reached >= top_p:
            break
        kept.append(token)
        reached += weight / sum(weights)
    return sorted(kept)


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (3, 1.0), (0, 0.5), (0, 0.05), (5, 0.8), (99, 0.999)])
def test_truncation_equals_brute_force(top_k: int, top_p: float):
    logits = torch.randn(30, 13, generator=torch.Generator().manual_seed(1))
    logits[:, 7] = logits[:, 2]  # a tie
    params = _params(30, top_k=top_k, top_p=top_p)
    kept = truncate(logits, params.top_k, params.top_p)
    for row in range(30):
        expected = _brute_force(logits[row].tolist(), top_k, top_p if top_p < 1 else 2.0)
        assert kept[row].isfinite().nonzero()[:, 0].tolist() == expected
        assert kept[row, expected].tolist() == logits[row, expected].tolist()


def test_logprobs_are_renormalised_on_what_truncation_leaves():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    _, logprobs = sample(logits, _params(1, top_k=2), torch.tensor([0.1], dtype=torch.float64))
    assert logprobs.item() == pytest.approx(-0.31326, abs=1e-5)  # by hand: 2 - log(e^2 + e)


def test_rows_in_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch):
    logits = torch.randn(7, 10, generator=torch.Generator().manual_seed(2))
    whole = sample(logits, _params(7), _grid(7))
    monkeypatch.setattr(sampling, "_CHUNK", 20)
    parts = sample(logits, _params(7), _grid(7))
    assert [t.tolist() for t in whole] == [t.tolist() for t in parts]


def test_logits_that_are_not_finite_are_visible_in_the_logprob():
    logits = torch.zeros(3, 4)
    logits[0, 1] = float("nan")
    logits[1, 2] = float("inf")
    for temperature in (1.0, 0.0):
        tokens, logprobs = sample(logits, _params(3, temperature=temperature), _grid(3))
        assert logprobs.isnan().tolist() == [True, True, False]
        assert (tokens < 4).all()
        assert (tokens >= 0).all()

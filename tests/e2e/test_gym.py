"""Training on problems of reasoning-gym, with its scorers."""

import pytest

from tests.e2e.small import Small, metrics, rollouts
from tests.extras import needs

pytest.importorskip("reasoning_gym")

pytestmark = needs("tasks")

GYM = (
    "data.train=gym:chain_sum,gcd",
    "data.eval=gym:chain_sum",
    "data.task={chain_sum: {max_terms: 2, max_digits: 1, weight: 3}, train_size: 16, eval_size: 5}",
    "data.max_prompt_tokens=512",
    "reward.function=reasoning_gym",
    "reward.timeout=60",
)


def test_two_steps_of_training(small: Small) -> None:
    run = small.train(*GYM, "train.eval_every=1")
    assert [row["step"] for row in metrics(run) if "reward/mean" in row] == [1, 2]
    rows = rollouts(run, 1)
    assert rows
    assert all(0.0 <= row["reward"] <= 1.0 for row in rows)


def test_a_wrong_name_is_refused_with_the_nearest(small: Small, capfd: pytest.CaptureFixture[str]) -> None:
    small.train(*GYM, "data.eval=gym:chain_sums", expect=2)
    assert "nearest: chain_sum" in capfd.readouterr().err

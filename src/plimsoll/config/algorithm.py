"""`algorithm`: a preset of advantage, loss, aggregation and KL. An explicit leaf wins over the preset.

A leaf annotated with `Preset` has no default here: its only default is its row in `presets.py`.
"""

from typing import Literal

from pydantic import Field

from plimsoll.config.base import Section

AlgorithmName = Literal[
    "dapo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gspo", "cispo", "ppo"
]


class AlgorithmConfig(Section):
    """Advantage, policy loss, KL, entropy, dynamic sampling, overlong shaping, importance correction."""

    name: AlgorithmName = "dapo"
    """Preset. It fills the leaves that the recipe leaves out."""
    normalize_std: bool
    """Divide group advantages by the standard deviation of the group's rewards (with n - 1)."""
    clip_low: float = Field(ge=0.0)
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(ge=0.0)
    """Ratio is clipped above at 1 + clip_high (DAPO's clip-higher when larger than clip_low)."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound c of dual clip: with a negative advantage the loss is at most -c·A. Default: off."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"]
    """`token_mean`: sum over tokens ÷ tokens of the mini-batch. `sequence_mean`: mean over sequences of token means.
    `sequence_sum`: sum over tokens ÷ (sequences × rollout.max_response_tokens). One global denominator each."""
    kl_coefficient: float = Field(ge=0.0)
    """Weight of the KL against the reference; 0: no reference model is read."""
    kl_estimator: Literal["k1", "k2", "k3"]
    """k1 = log(p/ref), k2 = k1²/2, k3 = exp(-k1) - 1 + k1. In the loss k2 has the gradient of the KL, k3 a biased
    one and k1 none (refused); in the reward only k1 has it (the others are refused)."""
    kl_in: Literal["loss", "reward"]
    """Where the KL term goes."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus; 0 only measures."""
    dynamic_sampling: bool
    """Replace groups without signal (all rewards equal) by other prompts until the batch is full."""
    dynamic_max_rounds: int = Field(default=10, ge=1)
    """Rounds of generation for one step before dynamic sampling gives up and says why."""
    overlong_filter: bool
    """Leave responses that hit rollout.max_response_tokens out of the loss (they stay in their group's statistics)."""
    overlong_buffer: int = Field(ge=0)
    """Tokens before rollout.max_response_tokens over which the penalty rises linearly; 0: off."""
    overlong_penalty: float = Field(default=1.0, ge=0.0)
    """Largest penalty of overlong shaping, taken off the score at full length."""
    importance_correction: Literal["none", "token", "sequence"] = "token"
    """Truncated importance sampling between trainer and rollout log-probs: weight min(exp(old - rollout), cap)."""
    importance_cap: float = Field(default=2.0, gt=0.0)
    """Upper bound of the importance weight."""

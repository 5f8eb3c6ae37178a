"""Learning rate as a pure function of the optimizer step."""

import math

from plimsoll.config.train import TrainConfig


def learning_rate(step: int, config: TrainConfig, total_steps: int) -> float:
    """Rate of optimizer step `step` (0 is the first) out of `total_steps`.

    Warm-up: peak · (step + 1) / warmup_steps. Then constant, or from the peak at step `warmup_steps` down to
    peak · min_learning_rate_ratio at step `total_steps` - 1, on a line or on half a cosine; it stays there after.
    """
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    span = total_steps - 1 - config.warmup_steps
    progress = min((step - config.warmup_steps) / span, 1.0) if span > 0 else 0.0
    fall = progress if config.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))
    return peak * (1.0 - (1.0 - config.min_learning_rate_ratio) * fall)

"""Numbers of a step that the driver knows: rewards, lengths, what was not scored, how long the rollout took."""

from collections.abc import Sequence

from plimsoll.advantage.keep import DropCounts
from plimsoll.rollout.collector import Collected
from plimsoll.rollout.evaluation import part_means
from plimsoll.types import FinishReason, Group, Sample


def rollout_metrics(groups: Sequence[Group], rounds: Sequence[Collected], no_signal: DropCounts) -> dict[str, float]:
    """Metrics of the groups that are trained on; counts marked `rollout/` are over every round."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = [sample.response_length for sample in samples]
    sampled = [sample for r in rounds for group in r.groups for sample in group.samples]
    seconds = sum(r.generate_seconds for r in rounds)
    num_tokens = sum(r.num_tokens for r in rounds)
    statuses = [sample.score.status for sample in sampled]
    return {
        **_reward_metrics(samples),
        "reward/unscored": float(statuses.count("unscored")),
        "reward/timeouts": float(statuses.count("timeout")),
        "reward/errors": float(statuses.count("error")),
        "response/length_mean": _mean(lengths),
        "response/length_max": float(max(lengths, default=0)),
        "response/truncated_share": _mean([sample.finish_reason is FinishReason.LENGTH for sample in samples]),
        "response/masked": float(sum(sample.masked for sample in samples)),
        "rollout/rounds": float(len(rounds)),
        "rollout/groups": float(sum(len(r.groups) for r in rounds)),
        "rollout/no_signal_groups": float(no_signal.total),
        "rollout/tokens": float(num_tokens),
        "time/generate": seconds,
        "time/reward": sum(r.score_seconds for r in rounds),
        "speed/tokens_per_second": num_tokens / seconds if seconds > 0 else 0.0,
    }


def _reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Nothing when no response was scored: a mean of nothing is not 0."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if not rewards:
        return {}
    scores = [sample.score.value for sample in samples if sample.score.value is not None]
    parts = part_means([sample.score for sample in samples])
    return {
        "reward/mean": _mean(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "reward/score_mean": _mean(scores),  # before overlong shaping
        **{f"reward/part/{name}": mean for name, mean in parts.items()},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""Names of keys elsewhere: those that are read here too, and those that are only understood."""

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "train.lr": "train.learning_rate",
    "train.max_steps": "train.steps",
}
"""Other name → key. The other name alone works and is said on stderr; both together are refused."""

KNOWN_ELSEWHERE: Mapping[str, str] = {
    "n": "rollout.samples_per_prompt",
    "num_generations": "rollout.samples_per_prompt",
    "rollout_n": "rollout.samples_per_prompt",
    "train_batch_size": "data.prompts_per_step",
    "rollout_batch_size": "data.prompts_per_step",
    "train_files": "data.train",
    "val_files": "data.eval",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "adv_estimator": "algorithm.name",
    "kl_loss_coef": "algorithm.kl_coefficient",
    "kl_coef": "algorithm.kl_coefficient",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "ppo_epochs": "train.epochs_per_rollout",
    "ppo_max_token_len_per_gpu": "train.token_budget",
    "total_epochs": "train.epochs",
    "total_training_steps": "train.steps",
    "save_freq": "checkpoint.every",
    "test_freq": "train.eval_every",
    "reward_funcs": "reward.function",
}
"""Last part of a key in other frameworks' configurations → the key that a user of those looks for. Never read."""

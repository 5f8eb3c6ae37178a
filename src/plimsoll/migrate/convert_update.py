"""verl's algorithm and optimizer → `algorithm` and `train`."""

from plimsoll.config.presets import PRESETS
from plimsoll.migrate.converted import Converted
from plimsoll.migrate.settings import ACTOR, MODEL, ROLLOUT
from plimsoll.migrate.verl_job import has_critic

AGGREGATION = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "sequence_sum",
}
ESTIMATOR = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_ADVANTAGE = "algorithm.adv_estimator"
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"


def convert_algorithm(made: Converted, module: str | None) -> None:
    """Every leaf is written out, so that no default of a preset changes the maths."""
    settings = made.settings
    dynamic = settings.flag("algorithm.filter_groups.enable")
    dapo = module == "main_dapo" or dynamic or settings.text("reward.reward_manager.name") == "dapo"
    made.put("algorithm.name", "dapo" if dapo else "grpo")
    _advantage(made)
    made.put("algorithm.normalize_std", settings.flag("algorithm.norm_adv_by_std_in_grpo", default=True))
    both = settings.number(f"{ACTOR}.clip_ratio", 0.2)
    made.put("algorithm.clip_low", settings.number(f"{ACTOR}.clip_ratio_low", both))
    made.put("algorithm.clip_high", settings.number(f"{ACTOR}.clip_ratio_high", both))
    dual = settings.number(f"{ACTOR}.clip_ratio_c", 3.0)
    made.put("algorithm.dual_clip", dual if dual > 1 else None)
    mode = settings.text(f"{ACTOR}.loss_agg_mode", "token-mean")
    made.put("algorithm.aggregation", AGGREGATION.get(mode, "token_mean"))
    if mode == "seq-mean-token-sum":
        made.leave(f"{ACTOR}.loss_agg_mode", "`sequence_sum` also divides by the longest response: scale the rate")
    elif mode not in AGGREGATION:
        made.leave(f"{ACTOR}.loss_agg_mode", "not in this version; `token_mean` was taken")
    _kl(made)
    made.put("algorithm.entropy_coefficient", settings.number(f"{ACTOR}.entropy_coeff", 0.0))
    made.put("algorithm.dynamic_sampling", dynamic)
    rounds = settings.whole("algorithm.filter_groups.max_num_gen_batches", 0)
    if dynamic and rounds > 0:
        made.put("algorithm.dynamic_max_rounds", rounds)
    elif dynamic:
        made.leave("algorithm.filter_groups.max_num_gen_batches", "rounds are always bounded; 10 by default")
    enabled = settings.flag(f"{_OVERLONG}.enable")
    made.put("algorithm.overlong_filter", False)
    made.put("algorithm.overlong_buffer", settings.whole(f"{_OVERLONG}.len", 0) if enabled else 0)
    if enabled:
        made.put("algorithm.overlong_penalty", settings.number(f"{_OVERLONG}.penalty_factor", 1.0))
    _importance(made)
    if settings.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla") != "vanilla":
        made.leave(f"{ACTOR}.policy_loss.loss_mode", "the clipped loss is the only one in this version; it was taken")


def _advantage(made: Converted) -> None:
    settings = made.settings
    estimator = settings.text(_ADVANTAGE, "gae")
    if has_critic(settings):
        made.leave(
            _ADVANTAGE,
            "PPO's critic is not in this version; the plan below is of the same job without it, with group advantages",
            always=True,
        )
    elif estimator not in PRESETS:
        made.leave(_ADVANTAGE, "not in this version; group advantages (`grpo`) were taken")
    samples, prompts = settings.whole(f"{ROLLOUT}.n", 1), settings.whole("data.train_batch_size", 1024)
    if samples < 2:
        made.put("rollout.samples_per_prompt", 2)
        made.put("data.prompts_per_step", max(1, prompts // 2))
        reason = "group advantages compare at least 2 samples of a prompt: 2 of half as many prompts, as many in all"
        made.leave(f"{ROLLOUT}.n", reason, always=True)


def _kl(made: Converted) -> None:
    settings = made.settings
    in_loss, in_reward = settings.flag(f"{ACTOR}.use_kl_loss"), settings.flag("algorithm.use_kl_in_reward")
    loss_coefficient = settings.number(f"{ACTOR}.kl_loss_coef", 0.001)
    reward_coefficient = settings.number("algorithm.kl_ctrl.kl_coef", 0.001)
    loss_type = settings.text(f"{ACTOR}.kl_loss_type", "low_var_kl").rstrip("+")
    penalty = settings.text("algorithm.kl_penalty", "kl")
    coefficient = loss_coefficient if in_loss else reward_coefficient if in_reward else 0.0
    made.put("algorithm.kl_coefficient", coefficient)
    made.put("algorithm.kl_in", "reward" if in_reward and not in_loss else "loss")
    if in_reward and not in_loss:
        estimator = "k1"
        if ESTIMATOR.get(penalty) != "k1":
            made.leave("algorithm.kl_penalty", "in the reward only k1 has the gradient of the KL; k1 was taken")
    else:
        estimator = ESTIMATOR.get(loss_type, "k3")
        if estimator == "k1":
            made.leave(f"{ACTOR}.kl_loss_type", "k1 in the loss has no gradient of the KL; k2, which has, was taken")
            estimator = "k2"
        elif loss_type not in ESTIMATOR:
            made.leave(f"{ACTOR}.kl_loss_type", "no such estimator here; k3 was taken")
    made.put("algorithm.kl_estimator", estimator)
    if in_loss and in_reward:
        made.leave("algorithm.use_kl_in_reward", "one KL term here: that in the loss was taken")
    if settings.text("algorithm.kl_ctrl.type", "fixed") != "fixed":
        made.leave("algorithm.kl_ctrl.type", "the coefficient is fixed here")


def _importance(made: Converted) -> None:
    settings = made.settings
    kind = settings.text("algorithm.rollout_correction.rollout_is")
    cap = settings.number("algorithm.rollout_correction.rollout_is_threshold", 2.0)
    older = settings.number(f"{ACTOR}.tis_imp_ratio_cap", -1.0)
    if not kind and older > 0:
        kind, cap = "token", older
    if kind not in ("", "token", "sequence"):
        made.leave("algorithm.rollout_correction.rollout_is", "no such correction here; none was taken")
        kind = ""
    made.put("algorithm.importance_correction", kind or "none")
    if kind:
        made.put("algorithm.importance_cap", cap)


def convert_train(made: Converted) -> None:
    """Steps, optimizer, micro-batches."""
    settings = made.settings
    steps = settings.whole("trainer.total_training_steps", 0)
    if steps > 0:
        made.put("train.steps", steps)
        made.leave("trainer.total_epochs", "`train.steps` is set and decides")
    else:
        made.put("train.epochs", settings.whole("trainer.total_epochs", 30))
    _optimizer(made)
    prompts = settings.whole("data.train_batch_size", 1024)
    mini = max(1, settings.whole(f"{ACTOR}.ppo_mini_batch_size", 256))
    made.put("train.mini_batches_per_step", max(1, -(-prompts // mini)))
    if prompts % mini:
        made.leave(
            f"{ACTOR}.ppo_mini_batch_size", "does not divide the batch: parts of equal size here, one more of them"
        )
    epochs = settings.whole(f"{ACTOR}.ppo_epochs", 1)
    if epochs > 1:
        made.put("train.epochs_per_rollout", epochs)
    made.put("train.token_budget", _token_budget(made))
    recompute = settings.flag(f"{MODEL}.enable_gradient_checkpointing", default=True)
    made.put("train.activation_checkpointing", "full" if recompute else "none")


def _optimizer(made: Converted) -> None:
    settings, optim = made.settings, f"{ACTOR}.optim"
    made.put("train.learning_rate", settings.number(f"{optim}.lr", 1e-6))
    made.put("train.weight_decay", settings.number(f"{optim}.weight_decay", 0.01))
    warmup = settings.whole(f"{optim}.lr_warmup_steps", -1)
    if warmup > 0:
        made.put("train.warmup_steps", warmup)
    elif settings.number(f"{optim}.lr_warmup_steps_ratio", 0.0) > 0:
        made.leave(f"{optim}.lr_warmup_steps_ratio", "warm-up is in steps: set `train.warmup_steps`")
    schedule = settings.text(f"{optim}.lr_scheduler_type", settings.text(f"{optim}.warmup_style", "constant"))
    if schedule in ("constant", "cosine"):
        made.put("train.schedule", schedule)
    else:
        made.leave(f"{optim}.lr_scheduler_type", "the schedules are constant, linear and cosine; constant was taken")
    if schedule == "cosine":
        made.put("train.min_learning_rate_ratio", settings.number(f"{optim}.min_lr_ratio", 0.0))
    betas = settings.items(f"{optim}.betas")
    if len(betas) == 2:
        made.put("train.beta1", float(betas[0]))
        made.put("train.beta2", float(betas[1]))
    norm = settings.number(f"{ACTOR}.grad_clip", 1.0)
    made.put("train.max_grad_norm", norm if norm > 0 else None)


def _token_budget(made: Converted) -> int:
    """verl counts tokens on one GPU; with sequence parallelism a micro-batch is as many times larger."""
    settings = made.settings
    parallel = settings.whole(f"{ACTOR}.ulysses_sequence_parallel_size", 1)
    sequence = settings.whole("data.max_prompt_length", 512) + settings.whole("data.max_response_length", 512)
    if settings.flag(f"{ACTOR}.use_dynamic_bsz"):
        return settings.whole(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384) * parallel
    return max(1, settings.whole(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 1)) * sequence

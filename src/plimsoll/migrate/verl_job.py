"""What a verl launch asks for, as numbers: the input of what verl holds."""

from dataclasses import dataclass
from typing import Literal

from plimsoll.errors import RefusedError
from plimsoll.migrate.settings import ACTOR, MODEL, REF, ROLLOUT, Settings
from plimsoll.model.sizes import ModelSizes

MIB = 2**20


@dataclass(slots=True, kw_only=True, frozen=True)
class Worker:
    """One model of the trainer (actor, reference, critic) on its ranks."""

    sizes: ModelSizes
    itemsize: int
    """Of its parameters (`model_dtype`); its gradients and moments are of the same."""
    shard: int
    """Ranks of a shard group."""
    param_offload: bool
    optimizer_offload: bool
    checkpointing: bool
    tokens: int
    """Of one micro-batch on one rank, in the update (reference: in its log-prob pass)."""


@dataclass(slots=True, kw_only=True, frozen=True)
class VerlJob:
    """The whole job."""

    strategy: Literal["fsdp", "fsdp2"]
    ranks: int
    ranks_per_node: int
    actor: Worker
    reference: Worker | None
    critic: Worker | None
    engine: str
    tensor_parallel: int
    memory_utilization: float
    frees_cache: bool
    """The engine sleeps while the trainer works."""
    lora: bool
    logprob_tokens: int
    """Of one micro-batch of the actor's log-prob pass on one rank."""
    materialises_logits: bool
    """False: fused kernels make log-probs without logits."""
    saves_hf_model: bool
    bucket_bytes: int

    @property
    def nodes(self) -> int:
        """Nodes."""
        return self.ranks // self.ranks_per_node


def strategy_of(settings: Settings) -> Literal["fsdp", "fsdp2"]:
    """`fsdp` or `fsdp2`. RefusedError: another trainer (Megatron …)."""
    strategy = settings.text(f"{ACTOR}.strategy", settings.text("model_engine", "fsdp")).lower()
    config = settings.text("--config-name")
    for other in ("megatron", "veomni", "torchtitan", "automodel", "mindspeed"):
        if other in config:
            strategy = other
    if strategy == "dp":
        strategy = "fsdp"
    if strategy not in ("fsdp", "fsdp2"):
        raise RefusedError(
            f"the script trains with `{strategy}`; what verl holds is known here for `fsdp` and `fsdp2`: name a script "
            f"with `{ACTOR}.strategy=fsdp` or `fsdp2`"
        )
    return "fsdp2" if strategy == "fsdp2" else "fsdp"


def has_critic(settings: Settings) -> bool:
    """verl's rule: as `critic.enable` says, else with GAE."""
    if settings.raw("critic.enable") is not None:
        return settings.flag("critic.enable")
    return settings.text("algorithm.adv_estimator", "gae") == "gae"


def has_reference(settings: Settings) -> bool:
    """verl's rule: a KL term in the loss or in the reward; its coefficient may be 0."""
    return settings.flag(f"{ACTOR}.use_kl_loss") or settings.flag("algorithm.use_kl_in_reward")


def read_job(settings: Settings, sizes: ModelSizes, critic_sizes: ModelSizes) -> VerlJob:
    """The job. RefusedError: values that are none, ranks that do not divide, another trainer than FSDP."""
    per_node = settings.whole("trainer.n_gpus_per_node", 8)
    ranks = settings.whole("trainer.nnodes", 1) * per_node
    if ranks < 1:
        raise RefusedError("`trainer.nnodes` × `trainer.n_gpus_per_node` must be at least 1; mend it in the script")
    dynamic = settings.flag(f"{ACTOR}.use_dynamic_bsz")
    sequence = settings.whole("data.max_prompt_length", 512) + settings.whole("data.max_response_length", 512)
    parallel = settings.whole(f"{ACTOR}.ulysses_sequence_parallel_size", 1)
    budget = settings.whole(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)
    fused = settings.flag(f"{MODEL}.use_fused_kernels")

    def tokens(prefix: str, dynamic_key: str, budget_key: str, size_key: str, default: int) -> int:
        if settings.flag(f"{prefix}.{dynamic_key}", default=dynamic):
            return settings.whole(f"{prefix}.{budget_key}", default)
        return max(1, settings.whole(f"{prefix}.{size_key}", 1) * sequence // parallel)

    log_prob = ("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu")
    update = ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")

    def worker(prefix: str, fsdp: str, model: ModelSizes, counted: int, model_key: str, forced: bool) -> Worker:
        offload_all = settings.flag(f"{fsdp}.offload_policy")
        size_key = f"{fsdp}.fsdp_size"
        if forced and not settings.given(size_key):
            size_key = f"{ACTOR}.fsdp_config.fsdp_size"  # the reference is sharded like the actor unless it says else
        return Worker(
            sizes=model,
            itemsize=settings.itemsize(f"{fsdp}.model_dtype", "fp32"),
            shard=_shard(settings, size_key, ranks),
            param_offload=forced or offload_all or settings.flag(f"{fsdp}.param_offload"),
            optimizer_offload=offload_all or settings.flag(f"{fsdp}.optimizer_offload"),
            checkpointing=settings.flag(f"{model_key}.enable_gradient_checkpointing", default=True),
            tokens=counted,
        )

    reference = critic = None
    if has_reference(settings):
        counted = tokens(REF, *log_prob, budget)
        reference = worker(REF, f"{REF}.fsdp_config", sizes, counted, MODEL, forced=True)
    if has_critic(settings):
        counted = tokens("critic", *update, 32768)
        critic = worker("critic", "critic.fsdp", critic_sizes, counted, "critic.model", forced=False)
    return VerlJob(
        strategy=strategy_of(settings),
        ranks=ranks,
        ranks_per_node=per_node,
        actor=worker(ACTOR, f"{ACTOR}.fsdp_config", sizes, tokens(ACTOR, *update, 16384), MODEL, forced=False),
        reference=reference,
        critic=critic,
        engine=settings.text(f"{ROLLOUT}.name", "vllm"),
        tensor_parallel=settings.whole(f"{ROLLOUT}.tensor_model_parallel_size", 2),
        memory_utilization=settings.number(f"{ROLLOUT}.gpu_memory_utilization", 0.5),
        frees_cache=settings.flag(f"{ROLLOUT}.free_cache_engine", default=True),
        lora=settings.whole(f"{MODEL}.lora_rank", 0) > 0,
        logprob_tokens=tokens(ROLLOUT, *log_prob, budget),
        materialises_logits=not fused,
        saves_hf_model="hf_model" in settings.items(f"{ACTOR}.checkpoint.save_contents"),
        bucket_bytes=settings.whole(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", 2048) * MIB,
    )


def _shard(settings: Settings, key: str, ranks: int) -> int:
    size = settings.whole(key, -1)
    size = ranks if size < 0 or size >= ranks else size
    if size < 1 or ranks % size:
        raise RefusedError(
            f"`{key}={size}` does not divide the {ranks} ranks of `trainer.nnodes` × `trainer.n_gpus_per_node`; mend "
            "it in the script"
        )
    return size

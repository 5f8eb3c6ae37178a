"""Why a setting of verl has no counterpart in a recipe."""

from collections.abc import Mapping

from plimsoll.migrate.settings import ACTOR, MODEL, REF, ROLLOUT

DEFAULT = "no counterpart here, and the plan does not depend on it"

_PLANNED = "the plan decides what is moved off the device, and when"
_FIXED = "always so here"
_BUDGET = "one budget for all passes, `train.token_budget`"

BY_PREFIX: Mapping[str, str] = {
    # The first that fits counts, so the longer key stands before the shorter one.
    f"{ACTOR}.strategy": "FSDP2 is the only way of sharding here",
    f"{ACTOR}.fsdp_config.param_offload": _PLANNED,
    f"{ACTOR}.fsdp_config.optimizer_offload": "the plan decides: `train.optimizer_state`",
    f"{ACTOR}.fsdp_config.offload_policy": _PLANNED,
    f"{REF}.fsdp_config.param_offload": "the plan decides: `model.reference_placement`",
    f"{REF}.fsdp_config.fsdp_size": "the reference is sharded like the policy",
    f"{REF}.fsdp_config.model_dtype": "the reference is kept in the compute dtype",
    f"{ROLLOUT}.gpu_memory_utilization": "the plan sizes the KV cache in bytes: `rollout.kv_memory`",
    f"{ROLLOUT}.free_cache_engine": "the plan decides when the engine gives its memory back",
    f"{ROLLOUT}.mode": "the engine takes requests one by one in either case",
    f"{ROLLOUT}.max_num_seqs": "as many as the KV cache has room for",
    f"{ROLLOUT}.load_format": "weights come from the trainer with the first sync",
    f"{ROLLOUT}.checkpoint_engine": "weights go to the engine through buckets of a fixed size",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": _BUDGET,
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": _BUDGET,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": _BUDGET,
    f"{ROLLOUT}.log_prob_micro_batch_size": _BUDGET,
    f"{REF}.log_prob_use_dynamic_bsz": _BUDGET,
    f"{REF}.log_prob_max_token_len_per_gpu": _BUDGET,
    f"{REF}.log_prob_micro_batch_size_per_gpu": _BUDGET,
    f"{REF}.log_prob_micro_batch_size": _BUDGET,
    f"{REF}.ulysses_sequence_parallel_size": "the reference is split like the policy",
    f"{REF}.fsdp_config.ulysses_sequence_parallel_size": "the reference is split like the policy",
    f"{ROLLOUT}.enable_chunked_prefill": _FIXED,
    f"{ROLLOUT}.enable_prefix_caching": _FIXED,
    f"{ROLLOUT}.calculate_log_probs": _FIXED,
    f"{ROLLOUT}.multi_turn": "turns with tools are not in this version",
    f"{ACTOR}.use_dynamic_bsz": "micro-batches are always cut by tokens: `train.token_budget`",
    f"{ACTOR}.entropy_from_logits_with_chunking": "log-probs and entropy always come in chunks: `train.logprob_chunk`",
    f"{ACTOR}.entropy_checkpointing": "log-probs and entropy always come in chunks: `train.logprob_chunk`",
    f"{REF}.entropy_from_logits_with_chunking": "log-probs always come in chunks: `train.logprob_chunk`",
    f"{REF}.entropy_checkpointing": "log-probs always come in chunks: `train.logprob_chunk`",
    f"{ACTOR}.use_torch_compile": "`train.compile` compiles layers; off by default",
    f"{ACTOR}.checkpoint": "a checkpoint always holds weights, moments and state; `plimsoll export` writes a model",
    f"{MODEL}.use_fused_kernels": "log-probs are always made without whole logits",
    f"{MODEL}.use_liger": "log-probs are always made without whole logits",
    f"{MODEL}.enable_activation_offload": "activations are recomputed, not moved",
    f"{MODEL}.lora_rank": "LoRA is not in this version",
    f"{MODEL}.lora_alpha": "LoRA is not in this version",
    f"{MODEL}.lora": "LoRA is not in this version",
    f"{MODEL}.target_modules": "LoRA is not in this version",
    f"{MODEL}.trust_remote_code": "code from model folders is not run",
    f"{MODEL}.override_config": "put it into the model's config.json",
    "algorithm.gamma": "for a critic, which is not in this version",
    "algorithm.lam": "for a critic, which is not in this version",
    "algorithm.filter_groups.metric": "groups are filtered by their rewards",
    "critic": "the critic is not in this version",
    "data.gen_batch_size": "dynamic sampling asks for as many prompts as are missing",
    "reward.reward_manager": "rewards come from `reward.function`",
    "reward.reward_kwargs.max_resp_len": "taken from `rollout.max_response_tokens`",
    "reward.reward_kwargs": "options go to the reward function: `reward.options`",
    "reward.reward_model": "reward models in the process are not in this version",
    "ray_kwargs": "for Ray alone",
    "trainer.balance_batch": _FIXED,
    "trainer.default_local_dir": "checkpoints lie in the run's folder, `run_root`/`name`",
    "trainer.resume_mode": "a run resumes when it is told to: `--resume`",
    "trainer.critic_warmup": "the critic is not in this version",
    "trainer.log_val_generations": "samples are in RUN/rollouts: `observe.rollout_samples`",
    "transfer_queue": "samples stay in the plane of the run",
}
"""Key, or the section that it lies in → the reason."""

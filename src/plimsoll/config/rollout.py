"""`rollout`: how responses are sampled."""

from typing import Literal

from pydantic import ByteSize, Field

from plimsoll.config.base import Section


class EvalSampling(Section):
    """Sampling for evaluation; truncation (top-p, top-k) is allowed here."""

    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """1 is off."""
    top_k: int = Field(default=0, ge=0)
    """0 is off."""
    samples: int = Field(default=1, ge=1)
    """Samples a problem; pass@k is reported for k = 1, 2, 4, … up to this. More than 1 wants temperature > 0."""
    correct_score: float = 1.0
    """A response with at least this score counts as correct (accuracy, pass@k)."""
    correct_part: str | None = None
    """The part of the score that `rollout.eval.correct_score` is about: a name in `reward.parts`, or a further number
    of a verl-style reward. Default: the score itself."""


class RolloutConfig(Section):
    """Engine and sampling. Nothing is inherited from the model's generation_config.json."""

    engine: Literal["native", "vllm", "sglang"] = "native"
    """Inference engine. `native`: our own, for CPUs, small models and tests. `vllm` (extra `vllm`): in this process, on
    the trainer's GPU."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share one engine, each with its part of the weights and of the KV cache."""
    cuda_graphs: bool = True
    """vLLM only: capture its decode step in CUDA graphs; faster, for some hundred MiB and a minute at the start."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Samples of a group. Group estimators need at least 2."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Divides the logits, for sampling and for every log-prob of the trainer."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """1 is off. In training it must stay off while importance correction is on: the engine's log-probs are then
    renormalised on the nucleus, the trainer's are not."""
    top_k: int = Field(default=0, ge=0)
    """0 is off; the same restriction as top_p."""
    max_response_tokens: int = Field(default=256, ge=1)
    """Longest response in tokens, stop token included."""
    stop_token_ids: tuple[int, ...] | None = None
    """Ids that end a response. Default: the end-of-sequence ids of the tokenizer and the model's config."""
    kv_memory: ByteSize | None = None
    """Bytes of the KV cache. Default: what the work can use, at most a quarter of the memory that is free."""
    prefill_tokens: int = Field(default=8192, ge=1)
    """Prompt tokens that go through the model at once when requests are admitted."""
    eval: EvalSampling = EvalSampling()
    """Sampling for evaluation."""

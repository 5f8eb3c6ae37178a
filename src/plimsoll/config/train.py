"""`train`: steps, optimizer, micro-batches."""

from typing import Literal

from pydantic import Field

from plimsoll.config.base import Section


class TrainConfig(Section):
    """The update, for RL and for SFT."""

    steps: int | None = Field(default=None, ge=1)
    """Iterations of the loop. Default: as many as `train.epochs` over the data make."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the data when `train.steps` is not set. Dynamic sampling replaces groups and so passes more often."""
    learning_rate: float = Field(default=1e-6, ge=0.0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or falling to `train.min_learning_rate_ratio` at the last step."""
    min_learning_rate_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """End of the linear and cosine schedules, as a share of the peak."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """AdamW weight decay; not applied to vectors (norms, biases)."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """AdamW first moment."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """AdamW second moment."""
    epsilon: float = Field(default=1e-8, gt=0.0)
    """AdamW denominator term."""
    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Clip the global gradient norm to this. null: off."""
    token_budget: int | None = Field(default=None, ge=1)
    """Tokens of one micro-batch at most. Default: the longest sequence or 16384 (GPU) / 2048 (CPU), whichever is
    more."""
    mini_batches_per_step: int = Field(default=1, ge=1)
    """Optimizer steps one pass over the rollout is cut into."""
    epochs_per_rollout: int = Field(default=1, ge=1)
    """Passes over each rollout."""
    logprob_chunk: int = Field(default=2048, ge=1)
    """Tokens whose logits exist at the same time."""
    activation_checkpointing: Literal["auto", "none", "full", "selective"] = "auto"
    """Recompute layers in backward: none, all, every second one. `auto`: none on a CPU; on a GPU the least of `none`,
    `selective`, `full` that the memory plan finds room for."""
    compile: bool = False
    """torch.compile each layer."""
    optimizer_state: Literal["device", "streamed", "auto"] = "auto"
    """Where AdamW's moments live. `device`: beside the parameters. `streamed`: in host memory of their exact size, and
    taken through the device group by group within each step (768 MiB of it for that time); the same bits. `auto`:
    `device` where the memory plan finds room for them, else `streamed`."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations. Default: only before the first step and after the last."""
    eval_at_ends: bool = True
    """Evaluate before the first step and after the last (needs `data.eval`)."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch. Default: what torch takes (the cores, or OMP_NUM_THREADS). Equal threads give equal bits on
    a CPU."""

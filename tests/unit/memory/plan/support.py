"""Jobs, machines and small models for tests of the plan."""

from collections.abc import Mapping
from typing import Any

from plimsoll.config.algorithm import AlgorithmConfig
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import DataConfig
from plimsoll.config.memory import MemoryConfig
from plimsoll.config.model import ModelConfig
from plimsoll.config.parallel import ParallelConfig
from plimsoll.config.planned import Choices
from plimsoll.config.presets import PRESETS
from plimsoll.config.recipe import Recipe
from plimsoll.config.rollout import RolloutConfig
from plimsoll.config.train import TrainConfig
from plimsoll.memory.plan.job import GIB, Job, Machine
from plimsoll.model.sizes import ModelSizes, read_sizes

REPORT_B: Mapping[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""The model of the first measurements: a quarter of it is embedding."""

TINY: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}

REPORT_A: Mapping[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
"""80 B parameters, 3 B of them active."""


def make_recipe(**sections: dict[str, Any]) -> Recipe:
    """Keys of sections over small defaults."""

    def of(name: str, /, **defaults: Any) -> dict[str, Any]:
        return defaults | sections.get(name, {})

    return Recipe(
        name="test",
        model=ModelConfig(**of("model", path="somewhere")),
        data=DataConfig(**of("data", train="unused.jsonl")),
        rollout=RolloutConfig(**of("rollout")),
        algorithm=AlgorithmConfig(**of("algorithm", name="dapo", **PRESETS["dapo"])),
        train=TrainConfig(**of("train")),
        parallel=ParallelConfig(**of("parallel")),
        memory=MemoryConfig(**of("memory")),
        cluster=ClusterConfig(**of("cluster")),
    )


def make_job(recipe: Recipe, config: Mapping[str, Any] | ModelSizes, **changes: Any) -> Job:
    """`config`: a config.json's contents."""
    sizes = config if isinstance(config, ModelSizes) else read_sizes(config)
    rollout = recipe.rollout
    values: dict[str, Any] = {
        "recipe": recipe,
        "sizes": sizes,
        "reference": sizes if recipe.algorithm.kl_coefficient > 0 else None,
        "objective": "policy",
        "generates": True,
        "longest_prompt": recipe.data.max_prompt_tokens,
        "longest_sequence": recipe.data.max_prompt_tokens + rollout.max_response_tokens,
        "num_sequences": recipe.data.prompts_per_step * rollout.samples_per_prompt // recipe.cluster.ranks,
    }
    return Job(**(values | changes))


def gpu(gib: float, *, ranks: int = 1, ranks_per_node: int | None = None, host_gib: float = 512) -> Machine:
    """Equal GPUs."""
    return Machine(
        device="cuda",
        device_bytes=int(gib * GIB),
        host_bytes=int(host_gib * GIB),
        ranks=ranks,
        ranks_per_node=ranks_per_node or ranks,
    )


def cpu(gib: float) -> Machine:
    """One rank without a GPU."""
    num_bytes = int(gib * GIB)
    return Machine(device="cpu", device_bytes=num_bytes, host_bytes=num_bytes, ranks=1, ranks_per_node=1)


def make_choices(**changes: Any) -> Choices:
    """Of a small CPU run."""
    values: dict[str, Any] = {
        "device": "cpu",
        "compute_dtype": "float32",
        "activation_checkpointing": "none",
        "token_budget": 2048,
        "optimizer_state": "device",
        "reference_placement": "device",
        "kv_bytes": 0,
    }
    return Choices(**(values | changes))

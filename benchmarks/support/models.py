"""Random models of the benchmarks: their configurations, and their folders on disk."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS = ("untied", "tied", "moe")
SIZES = ("full", "quick", "tiny")
"""About 0.5 B parameters, 0.1 B, and 1 M (to see that a benchmark runs at all)."""

_DENSE: dict[str, dict[str, int]] = {
    "full": {"vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8},
    "quick": {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8},
    "tiny": {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4},
}
_LAYERS = {
    "full": {"untied": 24, "tied": 28, "moe": 7},
    "quick": {"untied": 6, "tied": 7, "moe": 2},
    "tiny": {"untied": 2, "tied": 3, "moe": 2},
}
_EXPERTS = {
    "full": {"num_experts": 32, "moe_intermediate_size": 512},
    "quick": {"num_experts": 32, "moe_intermediate_size": 512},
    "tiny": {"num_experts": 4, "moe_intermediate_size": 32},
}


def model_config(kind: str, size: str) -> PreTrainedConfig:
    """Qwen2 with or without a tie, or Qwen3-MoE (every expert's matrices are tensors of their own on disk)."""
    common: dict[str, Any] = {
        **_DENSE[size],
        "num_hidden_layers": _LAYERS[size][kind],
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": kind == "tied",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind != "moe":
        return Qwen2Config(**common)
    head_dim = common["hidden_size"] // common["num_attention_heads"]
    return Qwen3MoeConfig(
        **common, **_EXPERTS[size], head_dim=head_dim, num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[]
    )


def meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def fill_randomly(tensors: Iterable[Tensor], seed: int) -> None:
    """Small values, different from element to element."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors:
            tensor.random_(-100, 100, generator=generator).mul_(1e-3)


def write_checkpoint(config: PreTrainedConfig, folder: Path, file_size: str = "700MB") -> int:
    """Random bf16 weights as transformers saves them; the number of parameters."""
    model: Any = meta_model(config, torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    fill_randomly(model.parameters(), seed=0)
    model.save_pretrained(folder, max_shard_size=file_size)
    return sum(parameter.numel() for parameter in model.parameters())


def warm_page_cache(folder: Path) -> int:
    """Read every weight file once, so that no way pays the disk; bytes read."""
    num_bytes = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                num_bytes += len(block)
    return num_bytes


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Every layer, then the root with embeddings and head in one group: a tie survives that. In place."""
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)

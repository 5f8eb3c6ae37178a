"""What small models really hold, on a CPU: tensors saved for backward, and the peak of all allocations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from plimsoll.model.build import build_random
from plimsoll.model.policy import PackedPolicy
from plimsoll.model.rows import PackedRows, pack_rows
from plimsoll.model.spec import model_spec
from plimsoll.parallel.apply import apply
from plimsoll.parallel.mesh import build_mesh, ensure_process_group

CPU = torch.device("cpu")
VOCAB = 1009
"""Prime: no activation has an extent like it."""
CHUNK = 128
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
}

HEADS: dict[str, Any] = {"head_dim": 16}


def family(name: str) -> PreTrainedConfig:
    """A small config."""
    match name:
        case "llama":
            return LlamaConfig(**SIZES)
        case "qwen2":
            return Qwen2Config(**SIZES, tie_word_embeddings=True)
        case "qwen3":
            return Qwen3Config(**SIZES, head_dim=16)
        case "gemma3":
            return Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=1024)
        case "gpt2":
            return GPT2Config(n_embd=128, n_layer=4, n_head=8, vocab_size=VOCAB, n_positions=1024)
        case "mixtral":
            return MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        case _:
            return Qwen3MoeConfig(**SIZES, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)


def make_policy(config: PreTrainedConfig, dtype: torch.dtype, checkpointing: str) -> PackedPolicy:
    """Sharded over one rank, master weights in float32."""
    ensure_process_group(CPU)
    lm = build_random(config, torch.float32, CPU, 0)
    policy = PackedPolicy(lm, model_spec(lm), packing="padded", chunk=CHUNK)
    apply(
        policy,
        build_mesh(CPU, None),
        compute_dtype=dtype,
        activation_checkpointing=checkpointing,
        compile_layers=False,
    )
    return policy


def make_rows(lengths: tuple[int, ...]) -> PackedRows:
    """Sequences of random ids; all but the first token of each is trained on."""
    ids = [torch.randint(0, VOCAB, (length,)) for length in lengths]
    return pack_rows(ids, [torch.arange(length) > 0 for length in lengths], CPU)


def step(policy: PackedPolicy, rows: PackedRows) -> None:
    """Forward and backward, entropy included."""
    logprobs, entropy = policy(rows, temperature=1.0)
    ((logprobs.sum() + entropy.sum()) * 1e-3).backward()


def saved_bytes(policy: PackedPolicy, rows: PackedRows) -> int:
    """Distinct storages that a forward keeps for its backward, weights aside."""
    tensors: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = policy(rows, temperature=1.0)
    found: dict[int, int] = {}
    for tensor in tensors:
        # Gathered weights of layers are empty by now; those of the root, which stay, are known by the vocabulary.
        if VOCAB not in tensor.shape:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert isinstance(policy, FSDPModule)
    policy.reshard()
    del outputs
    return sum(found.values())


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that the allocator had given out at one time over what it had at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        work()
    results: Any = found.profiler and found.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak

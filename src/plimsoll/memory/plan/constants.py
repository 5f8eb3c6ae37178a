"""Figures that the plan counts with and the code keeps to. Bytes."""

from collections.abc import Mapping

from plimsoll.memory.plan.job import GIB, MIB

TOKEN_BUDGET: Mapping[str, int] = {"cpu": 2048, "cuda": 16384}
"""Tokens of a micro-batch when `train.token_budget` is not set; padded attention on a CPU likes small ones."""

KV_SHARE = 0.25
"""Share of a CPU's memory that the KV cache may take when `rollout.kv_memory` is not set: others live there too."""

PADDING = 1.25
"""Tokens inside padded attention for each token of a micro-batch: rows of one micro-batch are not equally long."""

ALLOCATOR_SHARE = 0.05
"""Of a GPU that the plan's own choices leave free: blocks of the caching allocator are never all of one size."""

CUDA_CONTEXT = int(0.61 * GIB)
FIRST_COMMUNICATOR = int(0.84 * GIB)
FURTHER_COMMUNICATOR = int(0.47 * GIB)
"""Measured with NCCL on H200s; nothing that torch counts."""

VLLM_BUFFERS = int(0.29 * GIB)
VLLM_GRAPHS = int(0.18 * GIB)
"""What vLLM 0.25 keeps while it sleeps, over the context and beside its sampler: its kernels, and what CUDA graphs add.
Measured on H200s with a model of 135 M parameters."""

VLLM_SEGMENTS = 40 * MIB
"""Weights of vLLM lie in a pool, in segments of 2 and 20 MiB that are never quite full."""

LIBRARY_WORKSPACE = 32 * MIB
"""cuBLAS takes so much on GPUs from Hopper on, once for each thread and stream that multiplies. They stay."""

DEVICE_STAGING = 128 * MIB
"""Eight readers of a checkpoint have a buffer of 16 MiB each on a GPU, where what they read is cast."""

SAMPLING_CHUNK = 1 << 24
"""Logits whose float64 copies the native engine makes at one time."""

DECODED_ROWS = 1024
"""Sequences that vLLM has in one decode step at most."""

"""What tests of sharded models share: a tensor-parallel plan of Llama-shaped layers, and an unpacked batch."""

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

TENSOR_PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
TOKENS = torch.arange(3, 25).reshape(2, 11)

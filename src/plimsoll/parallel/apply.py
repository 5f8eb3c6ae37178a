"""The order in which techniques are applied to a policy, on one screen.

    activation checkpointing → compile → fully_shard(each layer) → fully_shard(root)

Checkpointing is innermost, so that recomputation runs inside FSDP's unshard; compile sees the checkpointed layer; the
root takes what is left: embeddings, final norm and head. Embedding and head must be in one group, or a tie is lost.
"""

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from plimsoll.model.policy import PackedPolicy
from plimsoll.model.spec import decoder_layers


def apply(
    policy: PackedPolicy,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    activation_checkpointing: str,
    compile_layers: bool,
    trained: bool = True,
) -> None:
    """In place. Gradients are reduced in fp32 (float64 for float64), over every micro-batch.

    FSDP2 averages gradients over ranks; the update's loss is a sum over all of them, so it multiplies by the number of
    ranks (`plimsoll.update.worker`).
    """
    layers = decoder_layers(policy.lm)
    every = {"none": 0, "full": 1, "selective": 2}[activation_checkpointing]
    for index, layer in enumerate(layers):
        if every and index % every == 0:
            # No generator state to stash: dropout is off.
            layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.promote_types(compute_dtype, torch.float32)
    )
    for layer in layers:
        if compile_layers:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # Without a word from us the root keeps its gathered weights until a backward, which a frozen model never has.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=None if trained else True)

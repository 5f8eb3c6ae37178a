"""The order in which techniques are applied to a policy, on one screen.

    activation checkpointing → compile → fully_shard(each layer) → fully_shard(root)

Checkpointing is innermost, so that recomputation runs inside FSDP's unshard; compile sees the checkpointed layer; the
root takes what is left: embeddings, final norm and head. Embedding and head must be in one group, or a tie is lost.
"""

from itertools import pairwise

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from plimsoll.errors import RefusedError
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
    default_stream_gather: bool = False,
) -> None:
    """In place. Gradients are reduced in fp32 (float64 for float64), over every micro-batch.

    `default_stream_gather`: see `gather_in_default_stream`.

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
    if default_stream_gather and mesh.size() > 1:
        gather_in_default_stream(policy)


def gather_in_default_stream(policy: PackedPolicy) -> None:
    """Gather parameters in memory of the default stream; RefusedError where this torch cannot.

    FSDP2 gathers in a stream of its own, whose blocks the caching allocator keeps in a pool of their own: what one
    stream has freed the other cannot use. In the default stream that pool goes. Without a second stream the gather of
    a layer would wait for the one before, so each layer prefetches its neighbour explicitly.
    """
    if "_set_unshard_async_op" not in dir(FSDPModule):
        raise RefusedError(
            f"memory.default_stream_gather: torch {torch.__version__} has no FSDPModule._set_unshard_async_op; set "
            "memory.default_stream_gather=false"
        )
    assert isinstance(policy, FSDPModule)
    policy._set_unshard_async_op(True)  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
    layers: list[FSDPModule] = [layer for layer in decoder_layers(policy.lm) if isinstance(layer, FSDPModule)]
    policy.set_modules_to_forward_prefetch(layers[:1])
    for earlier, later in pairwise(layers):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])

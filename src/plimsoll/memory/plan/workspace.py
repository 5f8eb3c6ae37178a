"""What comes and goes inside the trainer's phases, at its highest, by part. Bytes.

A backward is widest at one of three places, and the largest counts:

    head     everything saved · root gathered · two float32 [chunk, V] · the head's gradient, float32 [V, H], then cast
    layer i  saved by the layers before i · i computed again · gradients passing through · gathered layers · reduction
    root     the root's whole gradient in the compute dtype and once more as the input of its reduction
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from plimsoll.config.planned import Choices
from plimsoll.memory.plan.activations import (
    Rows,
    layer_backward,
    layer_forward,
    layer_input,
    layer_saved,
    norm_bytes,
    rotary_bytes,
)
from plimsoll.memory.plan.constants import PADDING
from plimsoll.memory.plan.job import ITEMSIZE, Job
from plimsoll.model.sizes import LayerSize, ModelSizes, TensorSize
from plimsoll.weights.limits import STREAM_GROUP_BYTES, STREAM_SLOTS

_PER_TOKEN = 64
"""Ids, positions, log-probs, entropies, advantages and their like of one token, all columns together."""


def logits_bytes(rows: int, tokens: int, vocab: int, itemsize: int) -> int:
    """Logits of `rows` sequences of `tokens` that exist at one time: what chunks avoid."""
    return rows * tokens * vocab * itemsize


@dataclass(slots=True, kw_only=True, frozen=True)
class Sharding:
    """How the parameters of a model lie."""

    shard: int
    """Ranks of a shard group."""
    tensor: int
    """Ranks that share each layer."""
    compute: int
    """Bytes of an element in forward and backward."""
    master: int
    """Bytes of an element of parameters, gradients and moments."""

    @property
    def reduced(self) -> int:
        """Bytes of an element while gradients are reduced: float32 at least."""
        return max(self.compute, 4)

    def elements(self, tensors: Sequence[TensorSize]) -> int:
        """Of gathered tensors, on one rank. Each is padded to equal parts, as FSDP2 pads it."""
        return sum(tensor.shard_numel(self.shard) * self.shard for tensor in tensors) // self.tensor


def sharding_of(job: Job, choices: Choices) -> Sharding:
    """Of policy and reference alike."""
    return Sharding(
        shard=job.shard,
        tensor=job.recipe.parallel.tensor,
        compute=ITEMSIZE[choices.compute_dtype],
        master=ITEMSIZE[job.recipe.model.dtype],
    )


def micro_batch_tokens(job: Job, choices: Choices) -> int:
    """Tokens of the largest micro-batch of one rank: the budget, or one longer sequence, or all that a step has."""
    most = max(min(choices.token_budget, _mini_batch_tokens(job)), job.longest_sequence)
    return -(-most // job.recipe.parallel.context)


def micro_batches_add_up(job: Job, choices: Choices) -> bool:
    """Whether a mini-batch has more than one micro-batch: all but the first then find gradients."""
    return _mini_batch_tokens(job) > max(choices.token_budget, job.longest_sequence)


def _mini_batch_tokens(job: Job) -> int:
    """Of one rank, all sequences as long as they may be."""
    recipe = job.recipe
    rows = recipe.data.prompts_per_step * (recipe.rollout.samples_per_prompt if job.objective == "policy" else 1)
    data_ranks = max(recipe.cluster.ranks // (recipe.parallel.context * recipe.parallel.tensor), 1)
    return -(-rows // (data_ranks * recipe.train.mini_batches_per_step)) * job.longest_sequence


def rows_of(job: Job, choices: Choices) -> Rows:
    """The largest micro-batch."""
    return Rows(
        tokens=micro_batch_tokens(job, choices),
        itemsize=ITEMSIZE[choices.compute_dtype],
        padding=PADDING if pads(job, choices) else 1.0,
        tensor=job.recipe.parallel.tensor,
        longest=job.longest_sequence,
    )


def pads(job: Job, choices: Choices) -> bool:
    """Whether attention pads: everywhere but in the variable-length kernel, which one row at a time needs no more."""
    packing = job.recipe.model.packing
    if packing == "auto":
        return not (choices.device == "cuda" and choices.compute_dtype == "bfloat16")
    return packing == "padded"


def logprob_workspace(sizes: ModelSizes, job: Job, choices: Choices) -> dict[str, int]:
    """A forward without gradient."""
    rows, sharding = rows_of(job, choices), sharding_of(job, choices)
    different = {layer_shape(layer): layer for layer in sizes.layers}.values()
    layer = max(
        (forward_row(sizes, layer, rows, sharding) for layer in different), key=lambda parts: sum(parts.values())
    )
    head = {
        "activations": 3 * layer_input(sizes, rows) + rotary_bytes(sizes, rows),
        "logits_chunk": chunk_bytes(sizes, job, choices, backward=False),
    }
    fixed = {"gathered_root": sharding.compute * sharding.elements(sizes.root), "columns": rows.tokens * _PER_TOKEN}
    return max(({**layer, **fixed}, {**head, **fixed}), key=lambda parts: sum(parts.values()))


def forward_row(sizes: ModelSizes, layer: LayerSize, rows: Rows, sharding: Sharding) -> dict[str, int]:
    """One layer without gradient. On several ranks the gathered bytes exist flat beside the parameters made of them,
    until the next layer is gathered."""
    copies = 2 if sharding.shard > 1 else 1
    return {
        "activations": layer_forward(sizes, layer, rows) + rotary_bytes(sizes, rows),
        "gathered_layers": copies * sharding.compute * sharding.elements(layer.parameters),
    }


def chunk_bytes(sizes: ModelSizes, job: Job, choices: Choices, *, backward: bool) -> int:
    """Logits of one chunk: in float32 twice, in backward with a soft cap three times. A backward without entropy in the
    loss changes them in place, and has them once in float32 beside a copy in the compute dtype."""
    tokens = min(job.recipe.train.logprob_chunk, micro_batch_tokens(job, choices))
    narrow = ITEMSIZE[choices.compute_dtype]
    wide = max(narrow, 4)
    capped = backward and sizes.family.startswith(_SOFT_CAPPED)
    second = wide
    if backward and not job.trains_entropy:
        second = narrow if narrow < wide else 0
    return logits_bytes(1, tokens, sizes.vocab, wide + second + (wide if capped else 0))


_SOFT_CAPPED = ("gemma2", "gemma3n")
"""Families that bound their logits by tanh."""


def saved_by_layer(sizes: ModelSizes, rows: Rows, checkpointing: str) -> list[int]:
    """Bytes that each layer keeps for the backward."""
    every = {"none": 0, "full": 1, "selective": 2}[checkpointing]
    kept = layer_input(sizes, rows)
    whole: dict[LayerShape, int] = {}  # of many layers few are different

    def saved(layer: LayerSize) -> int:
        shape = layer_shape(layer)
        if shape not in whole:
            whole[shape] = layer_saved(sizes, layer, rows)
        return whole[shape]

    return [kept if every and index % every == 0 else saved(layer) for index, layer in enumerate(sizes.layers)]


def saved_bytes(sizes: ModelSizes, rows: Rows, checkpointing: str) -> int:
    """What a micro-batch keeps from forward to backward: layers, final norm, and the rows that the head reads."""
    return sum(saved_by_layer(sizes, rows, checkpointing)) + _saved_by_head(sizes, rows) + rotary_bytes(sizes, rows)


def _saved_by_head(sizes: ModelSizes, rows: Rows) -> int:
    return norm_bytes(sizes, rows) + rows.tokens * 28


def gradients_workspace(job: Job, choices: Choices) -> dict[str, int]:
    """Forward and backward of the largest micro-batch, at the widest place of the three, over all gradients.

    The only micro-batch of a mini-batch makes them on its way: what is not there yet at a place is taken off its
    activations.
    """
    sizes, rows = job.sizes, rows_of(job, choices)
    saved = saved_by_layer(sizes, rows, choices.activation_checkpointing)
    before = list(accumulate(saved, initial=0))
    to_come = _gradients_to_come(job, choices)
    places = [(_at_head(job, choices, rows, before[-1]), to_come[-1]), (_at_root(job, choices, rows), to_come[0])]
    for index in _wide_layers(sizes):
        places.append((_at_layer(job, choices, rows, index, before[index]), to_come[index + 1]))
    found = [_less(parts, missing) for parts, missing in places]
    return max(found, key=lambda parts: sum(parts.values()))


def _gradients_to_come(job: Job, choices: Choices) -> list[int]:
    """Bytes that are missing while the root's gradients are made, the first layer's, …, the last one's: theirs and all
    that come after them."""
    sizes, sharding = job.sizes, sharding_of(job, choices)
    if micro_batches_add_up(job, choices):
        return [0] * (len(sizes.layers) + 1)

    def shard(tensors: Sequence[TensorSize]) -> int:
        return sum(tensor.shard_numel(sharding.shard) for tensor in tensors) * sharding.master // sharding.tensor

    return list(accumulate((shard(layer.parameters) for layer in sizes.layers), initial=shard(sizes.root)))


def _less(parts: dict[str, int], missing: int) -> dict[str, int]:
    """The parts, the first of them smaller, and if need be the others."""
    left: dict[str, int] = {}
    for name, size in parts.items():
        taken = min(size, missing)
        left[name] = size - taken
        missing -= taken
    return left


def _wide_layers(sizes: ModelSizes) -> set[int]:
    """The last layer of each kind: what the layers before it have saved only grows. And the first one, which finds most
    gradients: the two trade places from layer to layer."""
    last: dict[LayerShape, int] = {}
    for index, layer in enumerate(sizes.layers):
        last[layer_shape(layer)] = index
    # The last one of all is free of the reduction of a layer after it; the one before is not.
    return {*last.values(), max(len(sizes.layers) - 2, 0), 0}


def _at_head(job: Job, choices: Choices, rows: Rows, saved: int) -> dict[str, int]:
    """The end of the forward, or the beginning of the backward with the head's gradient."""
    sizes, sharding = job.sizes, sharding_of(job, choices)
    head = _head_elements(sizes, sharding)
    kept = saved + _saved_by_head(sizes, rows) + rotary_bytes(sizes, rows) + layer_input(sizes, rows)
    common = {
        "activations": kept,
        "gathered_root": sharding.compute * sharding.elements(sizes.root),
        "columns": rows.tokens * _PER_TOKEN,
    }
    forward = {"logits_chunk": chunk_bytes(sizes, job, choices, backward=False)}
    backward = {
        # After the last chunk its logits are gone, and the gradient is cast.
        "logits_chunk": max(chunk_bytes(sizes, job, choices, backward=True), head * rows.itemsize),
        "head_gradient": head * max(rows.itemsize, 4),
        "activations": kept + layer_input(sizes, rows),
    }
    return max(({**common, **parts} for parts in (forward, backward)), key=lambda parts: sum(parts.values()))


def _at_layer(job: Job, choices: Choices, rows: Rows, index: int, saved: int) -> dict[str, int]:
    """The widest place of the layer's own backward, or the reduction of its gradients when that is done."""
    sizes, sharding = job.sizes, sharding_of(job, choices)
    layer = sizes.layers[index]
    elements = sharding.elements(layer.parameters)
    kept = saved + rotary_bytes(sizes, rows) + layer_input(sizes, rows)
    own = layer_saved(sizes, layer, rows) + layer_backward(sizes, layer, rows)
    if rows.itemsize >= 4:
        own -= layer_input(sizes, rows)  # the norm needs no wider copy of it
    after = sizes.layers[index + 1] if index + 1 < len(sizes.layers) else None
    # On a GPU the reduction of the layer after this one still runs while this one's backward is queued.
    still = 0 if after is None or choices.device == "cpu" else sharding.elements(after.parameters)
    down = sizes.hidden * layer.intermediate * max(layer.experts, 1) // sharding.tensor  # comes first in a backward
    gather, head = sharding.compute * elements, _head_elements(sizes, sharding)
    common = {
        "gathered_root": sharding.compute * sharding.elements(sizes.root),
        "columns": rows.tokens * _PER_TOKEN,
    }
    inside = {
        "activations": kept + own,
        "gathered_layers": (2 if sharding.shard > 1 else 1) * gather,
        "gradients": sharding.compute * (min(down, elements) + head),
        "reduction": _reduction(sharding, still),
    }
    reduced = {
        "activations": kept,
        "gathered_layers": gather if sharding.shard > 1 else 0,
        "gradients": sharding.compute * (elements + head),
        "reduction": _reduction(sharding, elements),
    }
    return max(({**parts, **common} for parts in (inside, reduced)), key=lambda parts: sum(parts.values()))


def _at_root(job: Job, choices: Choices, rows: Rows) -> dict[str, int]:
    sizes, sharding = job.sizes, sharding_of(job, choices)
    root = sharding.elements(sizes.root)
    return {
        "activations": layer_input(sizes, rows),
        "gradients": sharding.compute * root,
        "reduction": _reduction(sharding, root),
        "columns": rows.tokens * _PER_TOKEN,
    }


def _reduction(sharding: Sharding, elements: int) -> int:
    """Input of a reduce-scatter and its output, this rank's part."""
    return sharding.reduced * (elements + -(-elements // sharding.shard))


def _head_elements(sizes: ModelSizes, sharding: Sharding) -> int:
    """Of the head's gradient, which waits for the root's reduction."""
    return sizes.vocab * sizes.hidden // sharding.tensor


def step_workspace(job: Job, choices: Choices) -> dict[str, int]:
    """Moments on their way through the device. The fused kernel makes no temporary tensors, and clipping none."""
    if choices.optimizer_state == "device":
        return {}
    sharding = sharding_of(job, choices)
    moments = 2 * job.sizes.parameter_bytes(sharding.master, sharding.shard) // sharding.tensor
    return {"streamed_moments": min(STREAM_SLOTS * STREAM_GROUP_BYTES, moments)}


LayerShape = tuple[tuple[int, ...], ...]


def layer_shape(layer: LayerSize) -> LayerShape:
    """Equal for layers that hold and do the same."""
    return (*(tensor.shape for tensor in layer.parameters), (layer.window or 0, layer.experts))

"""What generating takes on the device: weights, KV cache, what an engine keeps, and what comes and goes. Bytes.

Our native engine has slots of the longest sequence, and computes as transformers does. vLLM and SGLang have a pool of
blocks, keep buffers of their own also while they sleep, and need room for their largest batch.
"""

from plimsoll.config.planned import Choices
from plimsoll.memory.plan.activations import Rows, layer_forward, rotary_bytes
from plimsoll.memory.plan.constants import (
    DECODED_ROWS,
    LIBRARY_WORKSPACE,
    SAMPLING_CHUNK,
    VLLM_BUFFERS,
    VLLM_GRAPHS,
    VLLM_SEGMENTS,
)
from plimsoll.memory.plan.job import ITEMSIZE, Job
from plimsoll.memory.plan.workspace import layer_shape
from plimsoll.model.sizes import ModelSizes


def is_native(job: Job) -> bool:
    """Whether it is our own engine."""
    return job.recipe.rollout.engine == "native"


def borrows_parameters(job: Job, choices: Choices) -> bool:
    """Whether the engine generates with the trainer's own parameters."""
    return (
        is_native(job)
        and job.recipe.cluster.ranks == 1
        and ITEMSIZE[job.recipe.model.dtype] == ITEMSIZE[choices.compute_dtype]
    )


def rollout_parameters(job: Job, choices: Choices) -> int:
    """What weights of the engine's own take, in the compute dtype: all of them, or a tensor-parallel part.

    vLLM makes a head before it ties it to the embedding, and its pool keeps the room.
    """
    if not job.generates or borrows_parameters(job, choices):
        return 0
    itemsize, sizes = ITEMSIZE[choices.compute_dtype], job.sizes
    whole = sizes.parameter_bytes(itemsize)
    if is_native(job):
        return whole
    untied = sizes.vocab * sizes.hidden * itemsize if sizes.tied else 0
    return -(-(whole + untied) // job.recipe.rollout.tensor_parallel) + VLLM_SEGMENTS


def engine_buffers(job: Job) -> int:
    """What the engine keeps whether it sleeps or not."""
    if not job.generates or is_native(job):
        return 0
    found = VLLM_BUFFERS + (VLLM_GRAPHS if job.recipe.rollout.cuda_graphs else 0) + LIBRARY_WORKSPACE
    if not _has_older_runner(job.sizes):
        found += _decoded_rows(job) * job.sizes.vocab * 33 // 8  # counts of tokens for penalties, int32, and a mask
    return found


def _decoded_rows(job: Job) -> int:
    """Sequences of a decode step of vLLM."""
    return min(DECODED_ROWS, job.num_sequences)


def _has_older_runner(sizes: ModelSizes) -> bool:
    """Whether vLLM runs the model with its older code: mixtures of experts, and layers of linear attention."""
    return any(layer.experts or layer.attention == "linear" for layer in sizes.layers)


def sequence_tokens(job: Job) -> int:
    """Tokens of the longest sequence that is generated."""
    return job.longest_prompt + job.recipe.rollout.max_response_tokens


def sequence_bytes(job: Job, choices: Choices) -> int:
    """Cache of one such sequence: keys and values, and the state of linear layers."""
    parts = 1 if is_native(job) else job.recipe.rollout.tensor_parallel
    sizes = job.sizes
    tokens = sequence_tokens(job) * sizes.kv_bytes_per_token(ITEMSIZE[choices.compute_dtype])
    return -(-(tokens + sizes.state_bytes_per_sequence()) // parts)


def useful_kv(job: Job, choices: Choices) -> int:
    """What all sequences of a step or an evaluation need at their longest."""
    return job.num_sequences * sequence_bytes(job, choices)


def held_kv(job: Job, choices: Choices, room: int) -> int:
    """Of `room` bytes, what a cache takes: whole slots in the native engine, and no more than the work can use."""
    room = min(room, useful_kv(job, choices))
    if not is_native(job):
        return max(room, 0)
    each = sequence_bytes(job, choices)
    return max(room, 0) // each * each


def rollout_workspace(job: Job, choices: Choices, *, evaluating: bool = False) -> dict[str, int]:
    """Prefill or decode and sampling, whichever is more."""
    if is_native(job):
        return _native_workspace(job, choices, evaluating=evaluating)
    itemsize, sizes = ITEMSIZE[choices.compute_dtype], job.sizes
    sampled = _decoded_rows(job)
    tokens, parts = max(job.recipe.rollout.prefill_tokens, sampled), job.recipe.rollout.tensor_parallel
    # Logits exist for the rows alone that are sampled from, once the layers are done; and the same in float32. The
    # older runner makes their softmax, their log-softmax and the noise too, where the newer one has a kernel.
    wide = 4 if _has_older_runner(sizes) else 1
    forward = {"activations": _forward(sizes, Rows(tokens=tokens, itemsize=itemsize, tensor=parts))}
    sampling = {
        "activations": tokens * sizes.hidden * itemsize,
        "logits": sampled * sizes.vocab * (itemsize + wide * 4),
    }
    return max((forward, sampling), key=lambda each: sum(each.values()))


def _native_workspace(job: Job, choices: Choices, *, evaluating: bool) -> dict[str, int]:
    itemsize, sizes = ITEMSIZE[choices.compute_dtype], job.sizes
    rollout = job.recipe.rollout
    slots = max(choices.kv_bytes // max(sequence_bytes(job, choices), 1), 1)
    prompts = max(min(rollout.prefill_tokens, slots * job.longest_prompt), job.longest_prompt)
    prefill = {"activations": _forward(sizes, Rows(tokens=prompts, itemsize=itemsize, padding=2.0))}
    sampled = min(slots, max(SAMPLING_CHUNK // sizes.vocab, 1))
    # float32 logits, scaled and normalized; then two float64 or int64 copies at a time on the way to counts.
    each = (4 if itemsize < 4 else 0) + 2 * 4 + 2 * 8
    sampling = rollout.eval if evaluating else rollout
    if sampling.top_k > 0 or sampling.top_p < 1:
        each += 4 + 8 + 2 * 8  # sorted logits, their order, probabilities and their sums
    decode = {
        "activations": _forward(sizes, Rows(tokens=slots, itemsize=itemsize)),
        "logits": slots * sizes.vocab * itemsize + sampled * sizes.vocab * each,
        "scores": _scores(job, choices, slots),
    }
    return max((prefill, decode), key=lambda parts: sum(parts.values()))


def _scores(job: Job, choices: Choices, slots: int) -> int:
    """Attention of a decode step outside a fused kernel: scores and their softmax; and the mask."""
    itemsize = ITEMSIZE[choices.compute_dtype]
    tokens = sequence_tokens(job)
    mask = slots * tokens * (itemsize + 1)
    if itemsize < 4:
        return mask
    heads = max(layer.heads for layer in job.sizes.layers)
    return mask + 2 * slots * heads * tokens * itemsize


def _forward(sizes: ModelSizes, rows: Rows) -> int:
    different = {layer_shape(layer): layer for layer in sizes.layers}.values()
    return max(layer_forward(sizes, layer, rows) for layer in different) + rotary_bytes(sizes, rows)

"""What one decoder layer holds for a token: saved for backward, and while it is computed.

Bytes follow from the operations of transformers' layers, tensor by tensor (c: itemsize of the compute dtype, H hidden,
I width of the MLP, q, k, v, o: width of all heads together):

    RMS norm           input in float32 4H, normalized cH, product with the weight cH (what a projection then reads)
    Gemma's norm       input and normalized in float32 8H, cH where a projection reads it
    layer norm         input and output, 2cH
    norm of q and k    like the others, on q + k elements, without what a projection would read
    attention          c(q + k + v + o) inside the kernel, padded where it pads, and 4 bytes a head
    gated MLP          gate, activation, up, product: 4cI;   GPT-2's tanh in five operations: 5cI
    experts            for each of a token's experts: its row before and after 2cH, gate and up, both again, product 4cI
"""

from dataclasses import dataclass

from plimsoll.model.sizes import LayerSize, ModelSizes

_WIDE_NORMS = ("gemma", "qwen3_next", "qwen3_5")
"""Families, by the beginning of their names, whose norms multiply by the weight in float32."""

_WIDE_ROUTING = ("mixtral",)
"""Families that weigh the experts' outputs in float32."""

_DELTA_CHUNK = 64
"""Tokens of a chunk of the gated delta rule."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Rows:
    """A packed row and the way it is computed."""

    tokens: int
    """Of this rank."""
    itemsize: int
    """Bytes of an element of the compute dtype."""
    padding: float = 1.0
    """Tokens inside attention for each token: 1 with a variable-length kernel or rows of one length."""
    tensor: int = 1
    """Ranks that share each layer."""
    longest: int = 0
    """Tokens of the longest sequence, for masks of sliding windows."""


def norm_bytes(sizes: ModelSizes, rows: Rows, *, read: bool = True) -> int:
    """One norm over the hidden size. `read`: a projection keeps its output."""
    hidden, c = sizes.hidden, rows.itemsize
    if _has_layer_norm(sizes):
        return rows.tokens * (c * hidden * (2 if read else 1) + 2 * c)
    if _is_wide(sizes):
        return rows.tokens * (8 * hidden + (c * hidden if read else 0) + 4)
    return rows.tokens * (4 * hidden + c * hidden * (2 if read else 1) + 4)


def layer_saved(sizes: ModelSizes, layer: LayerSize, rows: Rows) -> int:
    """Bytes that a layer without checkpointing keeps for its backward."""
    norms = max(sum(1 for t in layer.parameters if _is_block_norm(t.name, t.shape, sizes.hidden)), 2)
    block = 2 * norm_bytes(sizes, rows) + (norms - 2) * norm_bytes(sizes, rows, read=False)
    return block + attention_saved(sizes, layer, rows) + mlp_saved(sizes, layer, rows)


def attention_saved(sizes: ModelSizes, layer: LayerSize, rows: Rows) -> int:
    """The mixer between tokens, without the norm before it."""
    if layer.attention == "linear":
        return _linear_saved(layer, rows)
    c, tokens = rows.itemsize, rows.tokens
    query, key, value, out = _widths(layer, rows.tensor)
    heads = layer.heads // rows.tensor
    inside = int(tokens * rows.padding) * (c * (query + key + value + out) + 4 * heads)
    gathered = tokens * c * out if rows.padding > 1 else 0
    total = inside + gathered
    if _has_head_norms(layer):
        each = 8 if _is_wide(sizes) else 4 + c
        total += tokens * (each * (query + key) + 4 * (heads + layer.kv_heads))
    if _has_gate(layer):
        total += tokens * 2 * c * out
    if rows.padding > 1 and layer.window is not None and rows.longest > layer.window:
        total += (1 + c) * rows.longest**2
    return total


def mlp_saved(sizes: ModelSizes, layer: LayerSize, rows: Rows) -> int:
    """The part that looks at one token at a time, without the norm before it."""
    c, hidden = rows.itemsize, sizes.hidden
    width = layer.intermediate // rows.tensor
    if not layer.experts:
        return rows.tokens * c * width * (4 if layer.gated else 5)
    pairs = rows.tokens * layer.experts_per_token
    routed = pairs * (c * (2 * hidden + 4 * width) + 48) + rows.tokens * 4 * layer.experts
    shared = layer.shared_intermediate // rows.tensor
    return routed + (rows.tokens * c * (4 * shared + hidden + 1) if shared else 0)


def layer_input(sizes: ModelSizes, rows: Rows) -> int:
    """What a checkpointed layer keeps."""
    return rows.tokens * rows.itemsize * sizes.hidden


def layer_backward(sizes: ModelSizes, layer: LayerSize, rows: Rows) -> int:
    """Gradients on their way through a layer, over what it saved, at the widest place."""
    c, hidden, tokens = rows.itemsize, sizes.hidden, rows.tokens
    width = layer.intermediate // rows.tensor
    pairs = tokens * max(layer.experts_per_token, 1)
    # Where the product of gate and up is taken apart: three gradients of its width, and the product itself is gone.
    mlp = c * (2 * pairs * width + 2 * tokens * hidden)
    if layer.experts:
        mlp += pairs * hidden * (16 if sizes.family in _WIDE_ROUTING else 2 * c)
    if layer.attention == "linear":
        mixer = _linear_saved(layer, rows) // 2
    else:
        mixer = 2 * int(tokens * rows.padding) * c * sum(_widths(layer, rows.tensor))
    mixer += tokens * (12 + 2 * c) * hidden - mlp_saved(sizes, layer, rows)
    return max(mlp, mixer)


def layer_forward(sizes: ModelSizes, layer: LayerSize, rows: Rows) -> int:
    """The most that exists at one time while a layer is computed without gradient: its input, the residual, the norm's
    output, the embeddings (which the loop over layers still holds), and the widest place of one of its halves."""
    c, hidden, tokens = rows.itemsize, sizes.hidden, rows.tokens
    width = layer.intermediate // rows.tensor
    stream = tokens * c * hidden * (6 if _has_layer_norm(sizes) else 4)
    if layer.experts:
        pairs = tokens * layer.experts_per_token
        mlp = pairs * max(c * (hidden + 4 * width), 2 * c * hidden + 8 * hidden)
    else:
        mlp = tokens * c * width * (3 if layer.gated else 4)
    if layer.attention == "linear":
        mixer = 3 * _linear_saved(layer, rows) // 5
    else:
        query, key, value, out = _widths(layer, rows.tensor)
        padded = int(tokens * rows.padding) if rows.padding > 1 else 0
        mixer = c * (tokens * (3 * query + 2 * key + value + out) + padded * (query + key + value + out))
    return stream + max(mlp, mixer, 12 * tokens * hidden)


def rotary_bytes(sizes: ModelSizes, rows: Rows) -> int:
    """Cosines and sines of all positions; once for all layers."""
    return 2 * rows.tokens * rows.itemsize * max(layer.head_dim for layer in sizes.layers)


def _linear_saved(layer: LayerSize, rows: Rows) -> int:
    """Gated delta rule in chunks, as transformers computes it without special kernels: most of it is in float32."""
    c = rows.itemsize
    keys = layer.kv_heads * layer.head_dim // rows.tensor
    values = layer.heads * layer.value_dim // rows.tensor
    narrow = c * (2 * (2 * keys + values) + 3 * values)
    heads = layer.heads // rows.tensor
    wide = 4 * heads * (6 * layer.head_dim + 10 * layer.value_dim + 5 * _DELTA_CHUNK + 12)
    return rows.tokens * (narrow + wide)


def _widths(layer: LayerSize, tensor: int) -> tuple[int, int, int, int]:
    """Elements of query, key, value and output of a token."""
    heads, kv_heads = layer.heads // tensor, max(layer.kv_heads // tensor, 1)
    return (
        heads * layer.head_dim,
        kv_heads * layer.head_dim,
        kv_heads * layer.value_dim,
        heads * layer.value_dim,
    )


def _is_block_norm(name: str, shape: tuple[int, ...], hidden: int) -> bool:
    parent = name.split(".")[-2] if "." in name else name
    inside = parent in ("q_norm", "k_norm") or ".self_attn." in name or ".linear_attn." in name
    named = "norm" in parent or parent.startswith("ln_")
    return named and not inside and name.endswith(".weight") and shape == (hidden,)


def _has_head_norms(layer: LayerSize) -> bool:
    return any(".q_norm." in tensor.name for tensor in layer.parameters)


def _has_gate(layer: LayerSize) -> bool:
    return any(
        tensor.name.endswith("q_proj.weight") and tensor.shape[0] == 2 * layer.heads * layer.head_dim
        for tensor in layer.parameters
    )


def _has_layer_norm(sizes: ModelSizes) -> bool:
    return any(
        tensor.name.endswith(".bias") and ("norm" in tensor.name.split(".")[-2] or ".ln_" in tensor.name)
        for tensor in sizes.layers[0].parameters
    )


def _is_wide(sizes: ModelSizes) -> bool:
    return sizes.family.startswith(_WIDE_NORMS)

"""Sizes of a tensor, of a decoder layer and of a model, and their arithmetic."""

from dataclasses import dataclass
from math import prod
from typing import Literal

CHUNK = 64
"""Tokens of a chunk in which the gated delta rule is computed, in transformers and in its kernels."""

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "wpe.weight")


@dataclass(slots=True, kw_only=True, frozen=True)
class TensorSize:
    """One parameter as the built model has it (experts stacked as transformers stacks them)."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def is_experts(self) -> bool:
        """Whether dim 0 counts experts."""
        return ".experts." in self.name

    def shard_numel(self, ranks: int) -> int:
        """Elements of the fullest rank when dim 0 is cut over `ranks` (FSDP2: ceil, the last ranks get less)."""
        return -(-self.shape[0] // ranks) * prod(self.shape[1:])


@dataclass(slots=True, kw_only=True, frozen=True)
class LayerSize:
    """One decoder layer: what FSDP2 gathers at once, and what its forward works with.

    In a linear layer `kv_heads` and `head_dim` are those of its keys, `heads` and `value_dim` those of its values.
    """

    parameters: tuple[TensorSize, ...]
    attention: Literal["full", "sliding", "linear"]
    window: int | None
    """Tokens that a sliding layer looks at; None: all."""
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    """Head size of the values; that of the keys in most families."""
    intermediate: int
    """Width of the dense MLP, or of one expert."""
    gated: bool
    """Whether the MLP multiplies two projections (SwiGLU); GPT-2's does not."""
    experts: int
    """0: a dense layer."""
    experts_per_token: int
    shared_intermediate: int
    """Width of the shared expert; 0: none."""
    state_bytes_per_sequence: int
    """Recurrent state of a linear layer, in its own dtypes; 0: none."""
    linear_width: int = 0
    """Elements a token that a linear layer's projections and convolution make; 0: not a linear layer."""

    @property
    def num_parameters(self) -> int:
        """Elements of the layer."""
        return sum(tensor.numel for tensor in self.parameters)

    @property
    def active_parameters(self) -> int:
        """Elements without the experts that a token is not sent to."""
        return sum(self._active(tensor) for tensor in self.parameters)

    @property
    def kv_elements_per_token(self) -> int:
        """Keys and values that the layer keeps of one token; 0 for a linear layer."""
        return 0 if self.attention == "linear" else self.kv_heads * (self.head_dim + self.value_dim)

    def forward_flops(self, context: float) -> float:
        """FLOPs of one token that attends to `context` tokens in the mean; `ModelSizes.forward_flops` derives them."""
        matrices = 2 * sum(self._active(tensor) for tensor in self.parameters if len(tensor.shape) > 1)
        if self.attention == "linear":
            keys, values = self.head_dim, self.value_dim
            return matrices + self.heads * (6 * keys * values + CHUNK * (5 * keys + 3 * values))
        seen = context if self.window is None else min(context, self.window)
        return matrices + 2 * self.heads * (self.head_dim + self.value_dim) * seen

    def _active(self, tensor: TensorSize) -> int:
        return tensor.numel * self.experts_per_token // self.experts if tensor.is_experts else tensor.numel


@dataclass(slots=True, kw_only=True, frozen=True)
class ModelSizes:
    """A model. `root` is what FSDP2 leaves to the root group: embeddings, final norm, head (absent when tied)."""

    family: str
    layers: tuple[LayerSize, ...]
    root: tuple[TensorSize, ...]
    hidden: int
    vocab: int
    tied: bool
    max_positions: int | None

    @property
    def num_parameters(self) -> int:
        """Elements, a tied head counted once."""
        return sum(layer.num_parameters for layer in self.layers) + sum(tensor.numel for tensor in self.root)

    @property
    def active_parameters(self) -> int:
        """Elements that one token is multiplied with: all but the experts that it is not sent to, and the embedding.

        A tied head is one of them: the matrix of the embedding is multiplied with as the head.
        """
        root = sum(tensor.numel for tensor in self.root if not tensor.name.endswith(_EMBEDDINGS))
        head = self.hidden * self.vocab if self.tied else 0
        return sum(layer.active_parameters for layer in self.layers) + root + head

    def parameter_bytes(self, itemsize: int, ranks: int = 1) -> int:
        """Bytes of the fullest rank's shard; exact for FSDP2, which cuts each tensor along dim 0."""
        tensors = [tensor for layer in self.layers for tensor in layer.parameters] + list(self.root)
        return sum(tensor.shard_numel(ranks) for tensor in tensors) * itemsize

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Keys and values of one token over all layers that keep them, windows not used to save anything."""
        return sum(layer.kv_elements_per_token for layer in self.layers) * itemsize

    def state_bytes_per_sequence(self) -> int:
        """Recurrent state of one sequence over all linear layers."""
        return sum(layer.state_bytes_per_sequence for layer in self.layers)

    def forward_flops(self, tokens: int, context: float) -> float:
        """FLOPs of a forward over `tokens`, each attending to `context` tokens in the mean, head included.

        A multiplication and its addition are two. Counted are matrix products, a token at a time:

        - A token goes once through each matrix of its path: 2 x elements. Of E experts it is sent to k: 2 x k/E x
          elements. A depthwise convolution [channels, 1, kernel] is the same: 2 x channels x kernel.
        - Softmax attention. Each of `heads` query heads is multiplied with the key of every token that it sees (2 x
          head_dim), and sums their values (2 x value_dim): 2 x heads x (head_dim + value_dim) x context. Shared
          key-value heads save memory, not products. `context` is the caller's: (n + 1) / 2 for a causal kernel on n
          tokens, n where the whole square is computed. A window caps it: an upper bound, since the mean of what
          is capped is at most the cap of the mean.
        - The gated delta rule, per value head with a state [K, V], in chunks of C = 64. In a chunk: keys with keys
          and queries with keys, 2·C·K a token each; two triangular systems of size C, C·K and C·V; sums of values,
          2·C·V. Against the state: keys and queries with it, and what is added to it, 2·K·V each. Together
          6·K·V + C·(5·K + 3·V), whatever the context.
        - The head: 2 x hidden x vocabulary, tied or not. The embedding is a lookup: nothing.

        Norms, activations, rotary positions, softmax and the router's choice are left out: they move bytes rather
        than multiply. A backward is twice a forward; recomputed activations are one forward of the layers more.
        """
        return tokens * (sum(layer.forward_flops(context) for layer in self.layers) + 2 * self.hidden * self.vocab)

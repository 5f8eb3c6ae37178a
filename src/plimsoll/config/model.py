"""`model`: what is trained and in which precision."""

from typing import Literal

from plimsoll.config.base import Section


class ModelConfig(Section):
    """The policy model."""

    path: str | None = None
    """Hugging Face folder (config.json, safetensors, tokenizer), or a run folder: its newest complete checkpoint."""
    config: str | None = None
    """config.json, or a folder that holds one; enough for `plan`, and for a model that starts from random weights."""
    tokenizer: str | None = None
    """Folder of the tokenizer. Default: the folder of `model.path`, else that of `model.config`."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` reads weights from `model.path`, each rank its own shard; `random` builds `model.config` with fresh
    weights from `seed`, whole on the host of every rank first: for small models."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Master weights and optimizer state. float64 is for checking numerics."""
    compute_dtype: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Forward and backward. `auto`: bfloat16 on a GPU, the master dtype on a CPU."""
    packing: Literal["auto", "packed", "padded", "single"] = "auto"
    """Attention over packed rows: `packed` (varlen kernel, GPU), `padded` (padded inside attention only), `single` (one
    sequence a row). `auto` takes the first that the device and the model family can do; a probe at start checks it."""
    reference: str | None = None
    """Hugging Face folder of the frozen reference. Default: `model.path`, or with `model.init=random` the policy's
    first weights. Read only when a KL coefficient is set."""
    reference_placement: Literal["auto", "device", "page_cache", "ring", "arena"] = "auto"
    """Where the frozen reference is between passes. `device`: its shard stays (compute dtype x parameters / ranks of a
    shard group). `page_cache`: nowhere; copied for each pass from a map of its files, fast while the node's page cache
    holds them. `ring`: nowhere; read for each pass through 192 MiB of host memory. `arena`: a copy of the shard in host
    memory, pinned on a GPU. `auto`: `device` where the memory plan finds room for it; else `page_cache` (`ring` where a
    map cannot be registered), or `arena` for a reference that no file holds."""

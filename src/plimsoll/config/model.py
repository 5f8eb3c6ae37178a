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
    """`pretrained` reads weights from `model.path`; `random` builds `model.config` with fresh weights from `seed`."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Master weights and optimizer state. float64 is for checking numerics."""
    compute_dtype: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Forward and backward. `auto`: bfloat16 on a GPU, the master dtype on a CPU."""
    packing: Literal["auto", "packed", "padded", "single"] = "auto"
    """Attention over packed rows: `packed` (varlen kernel, GPU), `padded` (padded inside attention only), `single` (one
    sequence a row). `auto` takes the first that the device and the model family can do; a probe at start checks it."""
    reference: str | None = None
    """Hugging Face folder of the frozen reference. Default: `model.path`. Read only when a KL coefficient is set."""

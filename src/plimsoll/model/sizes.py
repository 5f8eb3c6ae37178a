"""How large a model is, from its config.json alone: parameters, bytes, FLOPs, KV cache. Imports neither torch nor
transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plimsoll.model.size_decoder import read_decoder
from plimsoll.model.size_types import LayerSize, ModelSizes, TensorSize
from plimsoll.model.size_values import load_values

__all__ = ["LayerSize", "ModelSizes", "TensorSize", "read_sizes"]


def read_sizes(config: Path | Mapping[str, Any]) -> ModelSizes:
    """From a config.json, a folder that holds one, or its contents. RefusedError: a family that is not known here, or
    a number that is missing, named.

    Of a multimodal config only the language model is read (`text_config`). Tied weights are counted once where the
    config ties them; a folder whose files hold two different matrices is untied when it is built, which no config says.
    """
    return read_decoder(load_values(config))

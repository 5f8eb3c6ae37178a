"""GGUF files, as llama.cpp has them, for `plimsoll export`: weights, config and tokenizer as transformers reads them.

transformers needs the libraries `gguf` and `accelerate` for it (extra `gguf`).
"""

import struct
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from plimsoll.config.extras import how_to_install, installed
from plimsoll.config.files import gguf_files
from plimsoll.errors import RefusedError
from plimsoll.model.build import quiet_transformers
from plimsoll.update.construct import own_tensors
from plimsoll.weights.export import write_hf_folder

_MAGIC = b"GGUF"
_LIBRARIES = ("gguf", "accelerate")

# What transformers, gguf and numpy raise for a file that is cut off, damaged, or of an architecture they do not know.
_UNREADABLE = (ValueError, KeyError, IndexError, TypeError, NotImplementedError, OSError, EOFError, struct.error)


@dataclass(slots=True, kw_only=True, frozen=True)
class GgufModel:
    """What a GGUF file holds."""

    lm: PreTrainedModel  # plain tensors: blocks of the file's quantization are unpacked
    tokenizer: PreTrainedTokenizerBase

    def tensors(self) -> dict[str, Tensor]:
        """By the names that transformers saves, a tied head left out."""
        return own_tensors(self.lm)

    def write(self, folder: Path, dtype: torch.dtype) -> None:
        """Write a Hugging Face folder: weights, config, tokenizer with its chat template, generation config."""
        config = self.lm.config
        config.__dict__.pop("quantization_config", None)  # the weights are plain now
        write_hf_folder(
            folder, self.tensors(), config, dtype, architecture=type(self.lm).__name__, tokenizer_folder=None
        )
        self.tokenizer.save_pretrained(str(folder))
        self.lm.generation_config.save_pretrained(str(folder))


def find_gguf(path: Path) -> Path | None:
    """`path` where it is a .gguf file, or the only one of a folder that holds no other model; None: not about GGUF.

    RefusedError where a folder holds several.
    """
    if path.is_file() or path.suffix == ".gguf":
        return path
    files = gguf_files(path)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise RefusedError(f"{path} holds {len(files)} GGUF files ({names}): name one of them")
    return files[0] if files else None


def check_gguf(file: Path) -> None:
    """RefusedError where `file` is not a GGUF file, or a library that reads it is not installed."""
    if not file.is_file():
        raise RefusedError(f"{file} does not exist; name a .gguf file or a run folder")
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise RefusedError(f"{file} is not a GGUF file: it does not begin with the letters GGUF")
    missing = [name for name in _LIBRARIES if not installed(name)]
    if missing:
        raise RefusedError(
            f"{file}: reading GGUF needs {' and '.join(missing)}, not installed here: {how_to_install('gguf')}"
        )


def load_gguf(file: Path, dtype: torch.dtype) -> GgufModel:
    """Read all of `file`, the weights unpacked to `dtype`. RefusedError: transformers cannot read it, or not all of it.

    Memory: the whole model in `dtype`.
    """
    quiet_transformers()
    source = {"pretrained_model_name_or_path": str(file.absolute().parent), "gguf_file": file.name}
    with _refusing(file, *_UNREADABLE):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source,
            quantization_config=GgufConfig(dequantize=True),  # packed blocks can be neither trained nor saved
            dtype=dtype,
            output_loading_info=True,
            local_files_only=True,
        )
    with _refusing(file, Exception):  # the Rust library raises plain Exception
        tokenizer = cast("object", AutoTokenizer.from_pretrained(**source))
    lm, info = loaded
    assert isinstance(lm, PreTrainedModel), type(lm)
    assert isinstance(tokenizer, PreTrainedTokenizerBase), type(tokenizer)
    if missing := sorted(str(key) for key in info["missing_keys"]):  # transformers fills them with random numbers
        raise RefusedError(f"{file} has {len(missing)} missing tensors: {', '.join(missing[:8])}")
    return GgufModel(lm=lm, tokenizer=tokenizer)


@contextmanager
def _refusing(file: Path, *kinds: type[Exception]) -> Generator[None]:
    try:
        yield
    except kinds as error:
        raise RefusedError(
            f"transformers cannot read {file} ({type(error).__name__}: {error}); take the model's Hugging Face folder "
            "as `model.path` instead, or a whole file of an architecture that transformers reads from GGUF"
        ) from error

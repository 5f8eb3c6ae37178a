"""GGUF files, as llama.cpp has them, as Hugging Face folders: weights, config and tokenizer as transformers reads them.

Names and per-family processing of tensors are those of transformers, applied to one tensor at a time. transformers
needs the libraries `gguf` and `accelerate` for it (extra `gguf`).
"""

import json
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.gguf.utils import is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,  # pyright: ignore[reportUnknownVariableType]
    load_gguf_checkpoint,  # pyright: ignore[reportUnknownVariableType]
)

from plimsoll.config.extras import how_to_install, installed
from plimsoll.config.files import GGUF_LIBRARIES, gguf_files
from plimsoll.errors import RefusedError
from plimsoll.model.build import build_meta, quiet_transformers
from plimsoll.update.construct import own_tensors
from plimsoll.weights.convert import write_in_shards
from plimsoll.weights.tensors import TensorSpec

_MAGIC = b"GGUF"

# What transformers, gguf and numpy raise for a file that is cut off, damaged, or of an architecture they do not know.
_UNREADABLE = (ValueError, KeyError, IndexError, TypeError, NotImplementedError, OSError, EOFError, struct.error)

_SPLIT_ARCHITECTURES = ("gpt-oss", "gpt_oss")
"""One stored tensor becomes many: transformers has no processing of one tensor for these."""


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
    missing = [name for name in GGUF_LIBRARIES if not installed(name)]
    if missing:
        raise RefusedError(
            f"{file}: reading GGUF needs {' and '.join(missing)}, not installed here: {how_to_install('gguf')}"
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class GgufModel:
    """A GGUF file that was looked into; its weights are read when they are written. Made by `open_gguf`."""

    file: Path
    config: PreTrainedConfig
    shapes: PreTrainedModel  # on the meta device
    specs: tuple[TensorSpec, ...] | None  # by the names that transformers saves; None: it can only be read whole
    dtype: torch.dtype  # of floating-point weights, as they are written

    @property
    def num_tensors(self) -> int:
        """Tensors that are written; a tied head is none."""
        return len(own_tensors(self.shapes))

    @property
    def num_bytes(self) -> int:
        """Of the weights, as they are written."""
        return sum(tensor.numel() * self.dtype.itemsize for tensor in own_tensors(self.shapes).values())

    def write_companions(self, folder: Path) -> None:
        """Write config, generation config, and tokenizer with its chat template: all but the weights."""
        quiet_transformers()
        with _refusing(self.file, Exception):  # the Rust library raises plain Exception
            tokenizer = cast("object", AutoTokenizer.from_pretrained(**_source(self.file)))
        assert isinstance(tokenizer, PreTrainedTokenizerBase), type(tokenizer)
        values = self.config.to_diff_dict()
        values |= {"architectures": [type(self.shapes).__name__], "dtype": str(self.dtype).removeprefix("torch.")}
        for key in ("_name_or_path", "quantization_config"):  # a path of this machine; the weights are plain now
            values.pop(key, None)
        text = json.dumps(values, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        tokenizer.save_pretrained(str(folder))
        self.shapes.generation_config.save_pretrained(str(folder))

    def write_weights(self, folder: Path, say: Callable[[str], None]) -> int:
        """Write the safetensors files of `folder`; returns the number of tensors.

        Memory: a few times the largest tensor in float32. Where the family can only be read whole (said): the model.
        """
        specs = self.specs
        if specs is None:
            say(f"{self.file}: transformers reads this family only as a whole, so the whole model is in memory once")
            specs = _whole(self.file, self.dtype)
        write_in_shards(folder, specs)
        return len(specs)


def open_gguf(file: Path, dtype: torch.dtype) -> GgufModel:
    """Read what `file` says about its model, and no weights. `dtype`: what floating-point weights are written as.

    RefusedError: the file is no GGUF file, or not one that transformers reads all of a causal language model from.
    """
    check_gguf(file)
    quiet_transformers()
    with _refusing(file, *_UNREADABLE):
        config = cast("PreTrainedConfig", AutoConfig.from_pretrained(**_source(file)))
        shapes = build_meta(config, dtype)
        specs = _planned(file, shapes, dtype)
    if specs is not None and (missing := sorted(own_tensors(shapes).keys() - {spec.name for spec in specs})):
        raise RefusedError(f"{file} has {len(missing)} missing tensors: {', '.join(missing[:8])}")
    return GgufModel(file=file, config=config, shapes=shapes, specs=specs, dtype=dtype)


def _source(file: Path) -> dict[str, Any]:
    return {
        "pretrained_model_name_or_path": str(file.absolute().parent),
        "gguf_file": file.name,
        "local_files_only": True,
    }


def _planned(file: Path, shapes: PreTrainedModel, dtype: torch.dtype) -> tuple[TensorSpec, ...] | None:
    """How each tensor of the model is made from tensors of the file; None: not one by one."""
    from gguf import GGUFReader  # an extra: everything else here works without it

    reader: Any = GGUFReader(file)
    family = str(reader.fields["general.architecture"].contents())
    if is_gguf_arch_supported(family) or family in _SPLIT_ARCHITECTURES:
        return None
    # Only what the file itself says: a default of the config's class would turn processing on where it must not be.
    said = cast("dict[str, Any]", load_gguf_checkpoint(str(file), return_tensors=False)["config"])
    processor = TENSOR_PROCESSORS.get(family, TensorProcessor)(config=said)
    names = cast("dict[str, str]", get_gguf_hf_weights_map(shapes, processor))
    sources: dict[str, list[Any]] = {}
    for stored in reader.tensors:
        # Stacked experts have no ".weight" in transformers; two of them (gate, up) go into one tensor.
        target = names.get(stored.name) or names.get(stored.name.removesuffix(".weight"))
        if target is not None:  # others (rope factors, say) are recomputed
            sources.setdefault(target, []).append(stored)
    return tuple(
        TensorSpec(
            name=name,
            dtype=dtype,
            shape=tuple(tensor.shape),
            read=_Reading(file, name, tuple(tensor.shape), sources[name], processor, names, dtype),
        )
        for name, tensor in own_tensors(shapes).items()
        if name in sources
    )


@dataclass(slots=True, frozen=True)
class _Reading:
    """Unpacks the stored tensors that one tensor of the model is made of."""

    file: Path
    name: str
    shape: tuple[int, ...]
    stored: Sequence[Any]
    processor: TensorProcessor
    names: Mapping[str, str]
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        # Only what reading raises: a disk that is full while this is written is no fault of the file.
        with _refusing(self.file, *_UNREADABLE):
            tensor = self._unpacked()
        if tuple(tensor.shape) != self.shape:
            raise RefusedError(
                f"{self.file}: {self.name} has the shape {tuple(tensor.shape)}, and {self.shape} by the file's config"
            )
        return tensor.to(self.dtype)

    def _unpacked(self) -> Tensor:
        from gguf import dequantize

        made: dict[str, Tensor] = {}
        for stored in self.stored:
            done: Any = self.processor.process(  # merged tensors are put into `made` by the processor itself
                weights=dequantize(stored.data, stored.tensor_type),
                name=stored.name,
                tensor_key_mapping=self.names,
                parsed_parameters={"tensors": made},
            )
            if done.name in self.names:
                weights = done.weights if done.weights.flags.writeable else np.copy(done.weights)
                made[self.names[done.name]] = torch.from_numpy(weights)
        return made[self.name]


def _whole(file: Path, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """All tensors, read by transformers itself."""
    with _refusing(file, *_UNREADABLE):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **_source(file),
            quantization_config=GgufConfig(dequantize=True),  # packed blocks can be neither trained nor saved
            dtype=dtype,
            output_loading_info=True,
        )
    lm, info = loaded
    assert isinstance(lm, PreTrainedModel), type(lm)
    if missing := sorted(str(key) for key in info["missing_keys"]):  # transformers fills them with random numbers
        raise RefusedError(f"{file} has {len(missing)} missing tensors: {', '.join(missing[:8])}")
    return tuple(
        TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), read=tensor.detach)
        for name, tensor in own_tensors(lm).items()
    )


@contextmanager
def _refusing(file: Path, *kinds: type[Exception]) -> Generator[None]:
    try:
        yield
    except kinds as error:
        raise RefusedError(
            f"transformers cannot read {file} ({type(error).__name__}: {error}); take the model's Hugging Face folder "
            "as `model.path` instead, or a whole file of an architecture that transformers reads from GGUF"
        ) from error

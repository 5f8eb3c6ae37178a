"""Causal language models from a Hugging Face folder, or fresh from a config and a seed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from plimsoll.errors import RefusedError
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.hf_names import declared_ties, dtype_exceptions
from plimsoll.weights.load import fitting_tables
from plimsoll.weights.names import checkpoint_tables, module_tensors
from plimsoll.weights.ties import broken_ties, untie

ModelKind: TypeAlias = Literal["causal", "sequence_classification", "token_classification"]

_CLASSES: Mapping[str, Any] = {
    "causal": AutoModelForCausalLM,
    "sequence_classification": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
}

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def quiet_transformers() -> None:
    """Its progress bars go to stderr past our console; warnings stay."""
    disable_progress_bar()


def model_folder(path: str | Path) -> Path:
    """`path`, once it is seen to be a Hugging Face folder; RefusedError when it is not.

    A run folder is not one: `checkpoint.locate` finds the model of a run.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise RefusedError(f"model.path: {folder} is not a Hugging Face folder: it holds no config.json")
    return folder


def read_config(path: str | Path) -> PreTrainedConfig:
    """The config of a folder or of one config.json file. RefusedError when it is not one that transformers knows."""
    source = Path(path)
    folder = source.parent if source.is_file() else source
    if not (folder / "config.json").is_file():
        raise RefusedError(f"model.config: {source} is neither a config.json nor a folder with one")
    try:
        return cast("PreTrainedConfig", AutoConfig.from_pretrained(source))
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split("\n\n")[0].split())  # what follows are commands that would leave our range
        raise RefusedError(f"model.config: transformers cannot read {source}: {reason}") from error


def check_weights(folder: Path, dtype: torch.dtype) -> None:
    """RefusedError, from headers alone, when the weights in `folder` are not those of the model of its config.json."""
    with WeightFiles(folder) as files:
        fitting_tables(build_meta(folder, dtype, files=files), files)


def build_meta(
    source: Path | PreTrainedConfig,
    dtype: torch.dtype,
    *,
    auto_class: ModelKind = "causal",
    num_labels: int | None = None,
    files: WeightFiles | None = None,
) -> PreTrainedModel:
    """The model of a Hugging Face folder, or of a config, without memory (meta device), in evaluation mode.

    Weights are tied as the config says, unless the files of the folder hold both names with different values: then the
    model is untied, as `from_pretrained` leaves it. (Of a config alone that cannot be known; give `files` if there are
    any.) `num_labels`: outputs of a new classification head; a value head is a token classification with one.
    `files`: where the weights are, when not in the folder itself. The attention is the family's own default.
    """
    folder = source if isinstance(source, Path) else None
    config = read_config(source) if isinstance(source, Path) else _fresh(source)
    _check_class(config, folder or Path(config.name_or_path or "model.config"), auto_class)
    if num_labels is not None:
        config.num_labels = num_labels
    with torch.device("meta"):
        model = cast("PreTrainedModel", _CLASSES[auto_class].from_config(config, dtype=dtype))
    if exceptions := dtype_exceptions(model, dtype):
        tensors = module_tensors(model)
        for name, kept in exceptions.items():
            tensors[name].data = tensors[name].data.to(kept)  # in place: a tie stays
    if files is not None:
        _untie_as_stored(model, files)
    elif folder is not None:
        with WeightFiles(folder) as opened:
            _untie_as_stored(model, opened)
    if folder is not None and model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _untie_as_stored(model: PreTrainedModel, files: WeightFiles) -> None:
    if not declared_ties(model):
        return
    for pair in broken_ties(files, checkpoint_tables(model, files.tensors), module_tensors(model)):
        untie(model, pair.name)


def build_random(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, seed: int) -> PreTrainedModel:
    """Fresh weights, a function of config, seed and dtype alone; the global generator is left as it was."""
    _check_causal(config, Path(config.name_or_path or "model.config"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = cast("nn.Module", AutoModelForCausalLM.from_config(config, dtype=dtype))
    return cast("PreTrainedModel", lm.to(device))


def build_rollout_skeleton(
    config: PreTrainedConfig, dtype: torch.dtype, buffers: Mapping[str, Tensor]
) -> PreTrainedModel:
    """The same class without memory for its parameters (meta device), for an engine that borrows or copies weights.

    `buffers`: the trained model's, by name. Those that no checkpoint holds (rotary frequencies, embedding scales) exist
    nowhere else: on the meta device they are only shapes, and memory made for them later would hold garbage.
    The attention is the family's own default, whatever the trained model uses.
    """
    with torch.device("meta"):
        skeleton = cast("PreTrainedModel", AutoModelForCausalLM.from_config(_fresh(config), dtype=dtype))
    for name, _ in list(skeleton.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        persistent = name in skeleton.state_dict()
        source = buffers[name]
        skeleton.get_submodule(owner).register_buffer(leaf, source.detach().clone(), persistent=persistent)
    return skeleton.eval()


def place(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put `parameter` at the dotted `name` of `module`."""
    owner, _, leaf = name.rpartition(".")
    module.get_submodule(owner).register_parameter(leaf, parameter)


def _fresh(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy that carries no choice of attention: to_dict leaves it out."""
    return type(config).from_dict(config.to_dict())


def _check_causal(config: PreTrainedConfig, source: Path) -> None:
    _check_class(config, source, "causal")


def _check_class(config: PreTrainedConfig, source: Path, kind: ModelKind) -> None:
    if type(config) not in _CLASSES[kind]._model_mapping:
        what = "causal language model" if kind == "causal" else f"model for {kind.replace('_', ' ')}"
        raise RefusedError(
            f"model.path: {source} is of type {config.model_type!r}, which has no {what} in transformers"
        )

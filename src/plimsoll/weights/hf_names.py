"""The only place that knows how transformers maps the names of a checkpoint: private, and moving between versions.

What is used here has the same names and meaning in transformers 5.17 and 5.24.
"""

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,  # pyright: ignore[reportUnknownVariableType]
    revert_weight_conversion,
)

natural_key = dot_natural_key
"""Sort key of names: numbers by value, so expert 10 comes after expert 2."""


@dataclass(slots=True)
class Group:
    """Stored tensors that one conversion turns into one or more parameters."""

    first_target: str
    transform: WeightRenaming | WeightConverter
    """Without tensors in it."""
    collected: list[tuple[str, str]] = field(default_factory=lambda: [])
    """(pattern that matched, stored name), in the order in which transformers collects."""

    def convert(self, model: PreTrainedModel, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Run transformers' operations on tensors, or on what stands for them, by stored name → by target name."""
        if not isinstance(self.transform, WeightConverter):  # most are: the same under another name, or even its own
            return {self.first_target: tensors[self.collected[0][1]]}
        transform = deepcopy(self.transform)
        for pattern, name in self.collected:
            transform.add_tensor(self.first_target, name, pattern, tensors[name])
        with torch.no_grad():
            converted = cast("dict[str, Any]", transform.convert(self.first_target, model=model, config=model.config))
        return {name: _single(value) for name, value in converted.items()}

    @property
    def operations(self) -> str:
        """For messages."""
        if not isinstance(self.transform, WeightConverter):
            return "renaming"
        return ", ".join(type(operation).__name__ for operation in self.transform.operations)


@dataclass(slots=True, frozen=True)
class Grouped:
    """Stored names as transformers maps them."""

    groups: tuple[Group, ...]
    unmatched: Mapping[str, str]
    """Stored name → what it was renamed to, for names that lead to nothing in the module."""


def group_names(model: PreTrainedModel, stored: Mapping[str, Any], module_state: Mapping[str, Any]) -> Grouped:
    """What `from_pretrained` does with the names. Notes in the model which conversions were used, as it does."""
    with plain_classes(model):
        transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    state = cast("dict[str, Any]", module_state)
    groups: dict[str, Group] = {}
    unmatched: dict[str, str] = {}
    for name in sorted(stored, key=natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:  # it has the module's name already
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            unmatched[name] = target
            continue
        if target not in groups:
            transform = WeightRenaming(name, target) if pattern is None else deepcopy(by_pattern[pattern])
            groups[target] = Group(first_target=target, transform=transform)
        groups[target].collected.append((name if pattern is None else pattern, name))
    # save_pretrained reverts only what was used: a checkpoint that was stacked already is saved stacked.
    used: Any = [transform for transform in transforms if transform.was_used()]
    model._weight_conversions = used  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    return Grouped(groups=tuple(groups.values()), unmatched=unmatched)


def saved_state(model: PreTrainedModel, state: Mapping[str, Any]) -> dict[str, Any]:
    """`save_pretrained`'s names for a state without doubles of tied weights; the operations run on what is given."""
    ignored = cast("list[str] | None", model._keys_to_ignore_on_save) or ()  # pyright: ignore[reportPrivateUsage]
    kept: dict[str, Any] = {name: value for name, value in state.items() if name not in ignored}
    with plain_classes(model), torch.no_grad():
        reverted = cast("dict[str, Any]", revert_weight_conversion(model, kept))
    return {name: _single(value) for name, value in reverted.items()}


def failed_operation(error: Exception) -> str:
    """The conversion operation inside of which an error came up, for messages; transformers' errors do not say it."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    found = [frame.f_locals.get("self") for frame in frames]
    return next((type(entry).__name__ for entry in reversed(found) if isinstance(entry, ConversionOps)), "renaming")


def declared_ties(model: PreTrainedModel) -> dict[str, str]:
    """Name → the name that it is tied to, as the config says and as far as nobody untied it since."""
    return cast("dict[str, str]", model.all_tied_weights_keys)


def forgiven_missing(model: PreTrainedModel) -> re.Pattern[str] | None:
    """Names that a checkpoint may lack."""
    return _any_of(cast("Any", model._keys_to_ignore_on_load_missing))  # pyright: ignore[reportPrivateUsage]


def forgiven_unexpected(model: PreTrainedModel) -> re.Pattern[str] | None:
    """Names that a checkpoint may hold without use; old ones hold buffers that are recomputed today."""
    patterns: set[str] = set(cast("Any", model._keys_to_ignore_on_load_unexpected) or ())  # pyright: ignore[reportPrivateUsage]
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return _any_of(patterns)


def dtype_exceptions(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Parameters and persistent buffers that the family keeps in another dtype than the one asked for, as
    `from_pretrained` does."""
    plan = cast("dict[str, torch.dtype]", model._get_dtype_plan(dtype))  # pyright: ignore[reportPrivateUsage]
    patterns = [(re.compile(pattern.replace("*", ".*")), wanted) for pattern, wanted in plan.items()]
    return {
        name: wanted
        for name in model.state_dict()
        for wanted in [next((wanted for pattern, wanted in patterns if pattern.search(name)), None)]
        if wanted is not None
    }


@contextmanager
def plain_classes(model: nn.Module) -> Generator[None]:
    """While it lasts, modules have the classes that they had before `fully_shard`.

    It gives a module a class "FSDP…" of another package: transformers finds no conversions under that name and takes
    the model for foreign code, which it gives none at all.
    """
    sharded = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, _ in sharded:
            module.__class__ = plain_class(module)  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        for module, sharded_class in sharded:
            module.__class__ = sharded_class


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Class of a module before `fully_shard`."""
    return next(cls for cls in type(module).__mro__ if issubclass(cls, nn.Module) and not issubclass(cls, FSDPModule))


def mark_initialized(tensor: Tensor) -> None:
    """transformers' initialisation passes over it."""
    tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]


def _single(value: Any) -> Any:
    return cast("list[Any]", value)[0] if isinstance(value, list) else value


def _any_of(patterns: Any) -> re.Pattern[str] | None:
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns))) if patterns else None

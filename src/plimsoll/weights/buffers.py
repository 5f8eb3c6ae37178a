"""What no checkpoint holds: buffers that are computed from the config (rotary tables, embedding scales, masks), and new
heads.

Both come from transformers' own initialisation, run on a shadow of the model: the same modules, with meta tensors for
what is not wanted, so that it cannot write where loaded weights are. Nothing is broadcast: every rank computes the
same.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plimsoll.errors import RefusedError
from plimsoll.weights.hf_names import mark_initialized, plain_class
from plimsoll.weights.layout import local_boxes, local_tensor
from plimsoll.weights.names import plain_name


def rebuild_buffers(model: PreTrainedModel, device: torch.device, values: Mapping[str, Tensor] | None = None) -> None:
    """Give every buffer that no checkpoint holds the value that `from_pretrained` gives it, on `device`.

    Call it after memory was made for the model (`empty_on`, `to_empty`), which holds garbage in those buffers.
    `values`: of buffers by name that transformers does not know how to compute; they go before what it computes.
    RefusedError names buffers that nothing computed, and tensors on the meta device that are not even buffers.
    """
    given = dict(values or {})
    homes = {
        plain_name(f"{owner}.{leaf}" if owner else leaf): (module, leaf) for owner, module, leaf in _computed(model)
    }
    wanted = {name: module.get_buffer(leaf) for name, (module, leaf) in homes.items()}
    causes = [f"values: the model has no computed buffer {name}" for name in given if name not in wanted]
    causes += [
        f"{name} is a tensor that is neither parameter nor buffer: built on the meta device it has no value"
        for name in _meta_attributes(model)
    ]
    computed = _compute(model, {name: buffer for name, buffer in wanted.items() if name not in given})
    causes += [
        f"buffer {name} is in no checkpoint and transformers' initialisation does not compute it: give its value"
        " (`values` of rebuild_buffers)"
        for name, value in computed.items()
        if value is None
    ]
    if causes:
        raise RefusedError(causes)
    for name, value in (computed | given).items():
        assert value is not None
        _set_buffer(*homes[name], name, value, device)


def init_fresh(model: PreTrainedModel, names: Sequence[str], seed: int) -> None:
    """Initialise what the checkpoint lacks (a new head), in place, as transformers does for their module.

    Each one is made whole by a generator on the CPU that starts from the seed and the name, and the part of this rank
    is kept: equal for every number of ranks and every mesh. `names`: full names of parameters or buffers in the module.
    """
    if not names:
        return
    every = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    members = {plain_name(name): tensor for name, tensor in every}
    if unknown := [name for name in names if name not in members]:
        raise RefusedError(f"the model has no parameter {', '.join(unknown)}")
    for name in names:
        target = members[name]
        full = _compute(model, {name: target}, seed=(seed + crc32(name.encode())) % 2**63)[name]
        if full is None:
            raise RefusedError(f"transformers' initialisation of {type(model).__name__} does not know {name}")
        local = local_tensor(target)
        for part in local_boxes(target):
            local[part.local.slices].copy_(full[part.full.slices])


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return cast("Iterator[tuple[str, nn.Module]]", model.named_modules())


def _computed(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name of the module, module, name in it) of every buffer that is in no state_dict."""
    for owner, module in _modules(model):
        for leaf in sorted(module._non_persistent_buffers_set):  # pyright: ignore[reportPrivateUsage]
            if module._buffers.get(leaf) is not None:  # pyright: ignore[reportPrivateUsage]
                yield owner, module, leaf


def _meta_attributes(model: nn.Module) -> list[str]:
    return [
        plain_name(f"{owner}.{attribute}" if owner else attribute)
        for owner, module in _modules(model)
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
    ]


def _compute(model: PreTrainedModel, wanted: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor | None]:
    """Values on the CPU; None where the initialisation did not write every element.

    Run twice over memory with different contents: what differs afterwards was not written.
    """
    runs: list[dict[str, Tensor]] = []
    for content in (0x00, 0xFF):
        made = {name: _filled(buffer, content) for name, buffer in wanted.items()}
        _initialize(model, made, seed)
        runs.append(made)
    first, second = runs
    return {name: value if _same_bytes(value, second[name]) else None for name, value in first.items()}


def _filled(like: Tensor, content: int) -> Tensor:
    if like.dtype is torch.bool:
        return torch.full(like.shape, bool(content), dtype=torch.bool)
    filled = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    filled.reshape(-1).view(torch.uint8).fill_(content)
    return filled


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _set_buffer(module: nn.Module, leaf: str, name: str, value: Tensor, device: torch.device) -> None:
    buffer = module.get_buffer(leaf)
    if value.shape != buffer.shape:
        raise RefusedError(f"buffer {name} is {list(buffer.shape)}, and its given value {list(value.shape)}")
    if buffer.device.type == device.type and device.index in (None, buffer.device.index):
        buffer.copy_(value)  # its memory may be known elsewhere
        return
    module.register_buffer(leaf, value.to(device=device, dtype=buffer.dtype, copy=True), persistent=False)


def _initialize(model: PreTrainedModel, wanted: Mapping[str, Tensor], seed: int) -> None:
    """Run transformers' initialisation of the whole model, which writes into `wanted` (by name) and nowhere else."""
    shadow = cast("PreTrainedModel", _shadow(model, "", wanted, {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shadow.initialize_weights()


def _shadow(module: nn.Module, prefix: str, wanted: Mapping[str, Tensor], made: dict[int, nn.Module]) -> nn.Module:
    """A module of the same class and attributes whose tensors are `wanted`'s, by name, or on the meta device."""
    if id(module) in made:
        return made[id(module)]
    shadow = object.__new__(plain_class(module))
    made[id(module)] = shadow
    contents: dict[str, Any] = dict(vars(module))
    contents.pop("_is_hf_initialized", None)  # building on the meta device set it
    contents["_parameters"] = {
        leaf: None if tensor is None else _stand_in(prefix + leaf, tensor, wanted, parameter=True)
        for leaf, tensor in contents["_parameters"].items()
    }
    contents["_buffers"] = {
        leaf: None if tensor is None else _stand_in(prefix + leaf, tensor, wanted)
        for leaf, tensor in contents["_buffers"].items()
    }
    contents["_modules"] = {
        leaf: None if child is None else _shadow(child, plain_name(f"{prefix}{leaf}."), wanted, made)
        for leaf, child in contents["_modules"].items()
    }
    vars(shadow).update(contents)
    return shadow


def _stand_in(name: str, tensor: Tensor, wanted: Mapping[str, Tensor], *, parameter: bool = False) -> Tensor:
    found = wanted.get(name)
    stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if found is None else found
    if parameter:
        stand_in = nn.Parameter(stand_in, requires_grad=False)
    if found is None:
        mark_initialized(stand_in)
    return stand_in

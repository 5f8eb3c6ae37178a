"""The mode of torch's CUDA allocator: decided per process, before torch is imported, and read back for the ledger.

Trainers run with expandable segments: a segment grows instead of being cut up, so that reserved stays near allocated.
Processes of an engine run without: the pools that their sleep mode uses cannot hold expandable segments, and they
inherit the variables of whoever starts them. torch reads the mode from two variables, the older of which engines look
at; both are handled.

The module imports no torch: the command line and the launchers call `environment` first.
"""

import os
from collections.abc import Mapping
from typing import Literal

CURRENT_NAME = "PYTORCH_ALLOC_CONF"
OLD_NAME = "PYTORCH_CUDA_ALLOC_CONF"
_OPTION = "expandable_segments"

Role = Literal["trainer", "rollout"]


def environment(role: Role, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables to set for a process of this role before it imports torch; `env` is left as it is.

    `env` is what the process would inherit (None: the environment of this process). A trainer gets expandable segments
    under both names. A rollout process gets them switched off under each name that mentions them (set to False rather
    than removed, so that `os.environ.update` is enough), and nothing where none does. Other options are kept; where
    the two names disagree, a trainer gets what the current name says, as torch would.
    """
    inherited = os.environ if env is None else env
    if role == "trainer":
        merged = parse_options(inherited.get(OLD_NAME, "")) | parse_options(inherited.get(CURRENT_NAME, ""))
        text = _format_options(merged | {_OPTION: "True"})
        return {OLD_NAME: text, CURRENT_NAME: text}
    changed: dict[str, str] = {}
    for name in (OLD_NAME, CURRENT_NAME):
        options = parse_options(inherited.get(name, ""))
        if _OPTION in options:
            changed[name] = _format_options(options | {_OPTION: "False"})
    return changed


def parse_options(text: str) -> dict[str, str]:
    """`a:1,b:[256:1,512:2]` to {"a": "1", "b": "[256:1,512:2]"}; commas inside brackets do not separate."""
    options: dict[str, str] = {}
    depth = start = 0
    for index, char in enumerate(text + ","):
        if char == "," and depth == 0:
            key, _, value = text[start:index].partition(":")
            if key.strip():
                options[key.strip()] = value.strip()
            start = index + 1
        else:
            depth += (char == "[") - (char == "]")
    return options


def _format_options(options: Mapping[str, str]) -> str:
    return ",".join(f"{key}:{value}" if value else key for key, value in options.items())


AllocatorMode = Literal["none", "plain", "expandable", "mixed"]


def allocator_mode(device_index: int | None) -> AllocatorMode:
    """The mode as found: by the segments that exist, else by the variables. "none" where there is no CUDA device.

    The segments are the truth: a library in this process may have switched the mode after the start.
    """
    if device_index is None:
        return "none"
    import torch

    found = {
        bool(segment["is_expandable"]) for segment in torch.cuda.memory_snapshot() if segment["device"] == device_index
    }
    if not found:
        options = parse_options(os.environ.get(CURRENT_NAME) or os.environ.get(OLD_NAME, ""))
        return "expandable" if options.get(_OPTION) == "True" else "plain"
    if len(found) == 2:
        return "mixed"
    return "expandable" if True in found else "plain"

"""The generators of this process, to and from `RngState`."""

import base64
import random
from typing import Any, Literal

import numpy as np
import torch

from plimsoll.checkpoint.state import RngState
from plimsoll.errors import CheckpointError


def capture_rng(device: Literal["cpu", "cuda"]) -> RngState:
    """State of the generators of random, numpy, torch and, on a GPU, of the current device."""
    python_version, python_words, python_gauss = random.getstate()
    # Any: numpy types the state of every bit generator at once.
    numpy_state: Any = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"numpy's global generator is {numpy_state['bit_generator']}; only its default, MT19937, can be saved"
        )
    return RngState(
        python_version=python_version,
        python_words=tuple(python_words),
        python_gauss=python_gauss,
        numpy_words=tuple(int(word) for word in numpy_state["state"]["key"]),
        numpy_position=int(numpy_state["state"]["pos"]),
        numpy_has_gauss=int(numpy_state["has_gauss"]),
        numpy_gauss=float(numpy_state["gauss"]),
        torch_cpu=_encode(torch.get_rng_state()),
        torch_cuda=_encode(torch.cuda.get_rng_state()) if device == "cuda" else None,
    )


def seed_rng(seed: int) -> None:
    """Set the generators to a function of `seed`: a run starts like its last start, whatever a library draws."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**64)  # also those of every CUDA device


def restore_rng(state: RngState, device: Literal["cpu", "cuda"]) -> None:
    """Set the generators to `state`.

    Raises:
        CheckpointError: the state was captured on the other kind of device.
    """
    if (state.torch_cuda is not None) != (device == "cuda"):
        saved = "cuda" if state.torch_cuda is not None else "cpu"
        raise CheckpointError(f"the checkpoint was written on {saved}, this run is on {device}; resume it on {saved}")
    random.setstate((state.python_version, state.python_words, state.python_gauss))
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {
                "key": np.array(state.numpy_words, dtype=np.uint32),
                "pos": state.numpy_position,
            },
            "has_gauss": state.numpy_has_gauss,
            "gauss": state.numpy_gauss,
        }
    )
    torch.set_rng_state(_decode(state.torch_cpu))
    if state.torch_cuda is not None:
        torch.cuda.set_rng_state(_decode(state.torch_cuda))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

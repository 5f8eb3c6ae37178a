"""A file in memory without a copy: its pages in the page cache, from which a device can copy while they are registered.

Nothing of it is anonymous memory, and all ranks of a node share the pages. While they are registered the system cannot
drop them, so that is kept to the time of one pass.
"""

import mmap
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.errors import RunError
from plimsoll.weights.registered import count_registered

_READ_ONLY = 8
"""cudaHostRegisterReadOnly. Only shared maps that are read-only can be registered with it."""


class RegistrationRefusedError(RunError):
    """A map could not be registered with CUDA: not on this device or driver, or a limit of locked memory."""


class MappedFile:
    """A shared read-only map of a whole file."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            # torch has no tensors that cannot be written to; nothing of ours writes to this one.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self.bytes: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
            """uint8 [bytes of the file]. Writing to it is a fault that ends the process."""

    @contextmanager
    def registered(self, device: torch.device) -> Generator[None]:
        """Inside, copies to the device run at full speed and do not block. RegistrationRefusedError at its start."""
        pointer, num_bytes = self.bytes.data_ptr(), self.bytes.numel()
        runtime = cast("Any", torch.cuda.cudart())  # torch does not type it
        with torch.cuda.device(device):
            code = int(runtime.cudaHostRegister(pointer, num_bytes, _READ_ONLY))
        if code:
            _clear_error(device)
            raise RegistrationRefusedError(
                f"CUDA does not register a map of a file of {num_bytes} bytes (cudaError {code})"
            )
        count_registered(pointer, num_bytes)
        try:
            yield
        finally:
            count_registered(pointer, 0)
            with torch.cuda.device(device):
                torch.cuda.synchronize()
                runtime.cudaHostUnregister(pointer)


def _clear_error(device: torch.device) -> None:
    """CUDA keeps the last error until somebody asks for it, and the next kernel would be blamed for it."""
    try:
        torch.zeros(1, device=device).add_(1)
    except RuntimeError:
        return

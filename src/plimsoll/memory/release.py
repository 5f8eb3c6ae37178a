"""Give cached device memory back, so that others on the device (an engine's pool, NCCL) can have it."""

import torch

from plimsoll.memory.malloc import trim_heap


def release_device_cache(device: torch.device) -> None:
    """What torch's allocator holds of `device` and no tensor uses goes back to the driver. On a CPU that is the C
    library's heap, and the system's memory."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    else:
        trim_heap()

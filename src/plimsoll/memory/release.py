"""Give cached device memory back, so that others on the device (an engine's pool, NCCL) can have it."""

import torch


def release_device_cache(device: torch.device) -> None:
    """What torch's allocator holds of `device` and no tensor uses goes back to the driver. Nothing to do on a CPU."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()

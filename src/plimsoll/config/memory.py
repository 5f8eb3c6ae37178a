"""`memory`: capacities, and how the plan comes to its figures."""

from typing import Literal

from pydantic import ByteSize, Field

from plimsoll.config.base import Section


class MemoryConfig(Section):
    """Capacities that the run may use, and what the plan may try out."""

    device_memory: ByteSize | None = None
    """Memory of a device. Default: the machine's."""
    host_memory: ByteSize | None = None
    """Memory of a node. Default: the machine's, or the limit of the cgroup where there is one."""
    calibration: Literal["auto", "on", "off"] = "auto"
    """Measure the activations with one micro-batch at the start of a run, and plan with what was measured from then on
    (kept by model, dtypes, token budget and torch version). `auto`: on a GPU, and on a CPU for models whose parameters,
    gradients and moments take 1 GiB or more."""
    residual_tolerance: ByteSize = Field(default=ByteSize(2 * 1024**3))
    """What an engine that sleeps may keep on the device over what it kept at its first sleep; beyond, the run ends."""
    default_stream_gather: bool = False
    """FSDP2 on several ranks: gather parameters in memory of the default stream, so that the pool of the gathering
    stream goes; the next layer is prefetched explicitly. Uses a private switch of torch, refused where it has none."""

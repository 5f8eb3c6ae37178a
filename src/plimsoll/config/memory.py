"""`memory`: capacities."""

from pydantic import ByteSize

from plimsoll.config.base import Section


class MemoryConfig(Section):
    """Capacities that the run may use."""

    device_memory: ByteSize | None = None
    """Memory of a device. Default: the machine's."""
    host_memory: ByteSize | None = None
    """Memory of a node. Default: the machine's, or the limit of the cgroup where there is one."""

"""Which NUMA node a device hangs on, and which CPUs belong to a node: from sysfs, nothing where it says nothing."""

import os
from pathlib import Path
from typing import Any, cast

import torch

_SYSFS = Path("/sys")


def numa_node_of(device: torch.device, sysfs: Path = _SYSFS) -> int | None:
    """The node of the device's PCI slot; None for a CPU, on one node, and where the kernel does not know."""
    if device.type != "cuda" or len(numa_nodes(sysfs)) < 2:
        return None
    found = cast("Any", torch.cuda.get_device_properties(device))  # torch does not type it
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    return numa_node_of_slot(address, sysfs)


def numa_node_of_slot(address: str, sysfs: Path = _SYSFS) -> int | None:
    """The node of a PCI slot such as 0000:3b:00.0."""
    file = sysfs / "bus/pci/devices" / address / "numa_node"
    if not file.is_file():
        return None
    node = int(file.read_text())
    return node if node >= 0 else None  # -1: the firmware did not say


def numa_nodes(sysfs: Path = _SYSFS) -> tuple[int, ...]:
    """Nodes of this machine, ascending; empty where sysfs has none."""
    folders = (sysfs / "devices/system/node").glob("node[0-9]*")
    return tuple(sorted(int(folder.name.removeprefix("node")) for folder in folders))


def cpus_of_node(node: int, sysfs: Path = _SYSFS) -> frozenset[int]:
    """CPUs of the node that this process may run on. Empty: a node of memory only, or one that is not ours."""
    file = sysfs / f"devices/system/node/node{node}/cpulist"
    if not file.is_file():
        return frozenset()
    return parse_cpu_list(file.read_text()) & os.sched_getaffinity(0)


def parse_cpu_list(text: str) -> frozenset[int]:
    """CPUs of a list such as "0-3,8,10-11"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)

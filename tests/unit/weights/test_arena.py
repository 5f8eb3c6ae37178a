"""Host memory of exact size: regions, what children see of it, and NUMA facts from a made-up sysfs."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plimsoll.errors import RunError
from plimsoll.weights.arena import HostArena
from plimsoll.weights.limits import ARENA_ALIGNMENT
from plimsoll.weights.numa import cpus_of_node, numa_node_of, numa_node_of_slot, numa_nodes, parse_cpu_list
from plimsoll.weights.registered import HostBuffer

CPU = torch.device("cpu")

CHILD_PROGRAM = """
import os, re, sys, torch
from plimsoll.weights.registered import HostBuffer

def mapped(address):
    spans = (line.split()[0].split("-") for line in open("/proc/self/maps"))
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)

def flags(address):
    inside = False
    for line in open("/proc/self/smaps"):
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            inside = begin <= address < end
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]

buffer = HostBuffer(10_000_000, device=torch.device("cpu"))
address = buffer.tensor.data_ptr()
assert mapped(address) and "dc" in flags(address), flags(address)
child = os.fork()
if child == 0:
    absent = not mapped(address)
    import mmap
    # Whoever maps there now must keep it when the child drops the buffer.
    taken = torch.ones(10_000_000, dtype=torch.uint8)
    buffer.close()
    del buffer
    import gc
    gc.collect()
    os._exit(0 if absent and int(taken.sum()) == 10_000_000 else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert mapped(address)
buffer.close()
del buffer
assert not mapped(address)
print("fine")
"""


def resident_anonymous() -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_regions_are_exact_aligned_and_do_not_overlap() -> None:
    sizes = {"parameters": [1, 64, 65, 0], "moments": [1000, 7], "nothing": []}
    arena = HostArena(sizes, device=CPU)
    assert {name: [len(part) for part in arena.region(name)] for name in sizes} == sizes
    assert arena.region("nothing") == ()
    parts = [part for name in sizes for part in arena.region(name)]
    assert all(part.dtype == torch.uint8 and part.data_ptr() % ARENA_ALIGNMENT == 0 for part in parts if len(part))
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    assert all(bool((part == number + 1).all()) for number, part in enumerate(parts))
    assert arena.exact_bytes == 1 + 64 + 65 + 1000 + 7
    assert arena.num_bytes == 64 + 64 + 128 + 1024 + 64
    arena.close()


def test_an_arena_of_real_sizes_takes_at_most_a_hundredth_more_than_their_sum() -> None:
    sizes = [3_000_001, 1_234_567, 4096 * 3, 2_222_222]
    arena = HostArena({"parameters": sizes}, device=CPU)
    assert sum(sizes) <= arena.num_bytes <= 1.01 * sum(sizes)
    arena.close()


def test_memory_is_zero_present_from_the_start_and_gone_after_the_last_view() -> None:
    size = 96 * 2**20
    before = resident_anonymous()
    buffer = HostBuffer(size, device=CPU)
    assert resident_anonymous() - before > 0.95 * size  # every page was touched
    view = buffer.tensor[5:10]
    assert view.tolist() == [0] * 5
    buffer.close()
    buffer.close()
    view.fill_(3)  # not a crash: the memory is there as long as its views
    assert view.tolist() == [3] * 5
    del view
    gc.collect()
    assert resident_anonymous() - before < 0.1 * size
    with pytest.raises(AssertionError, match="after it was closed"):
        _ = buffer.tensor


def test_a_closed_arena_is_not_used() -> None:
    arena = HostArena({"parameters": [8]}, device=CPU)
    arena.close()
    with pytest.raises(AssertionError, match="after it was closed"):
        arena.region("parameters")


def test_memory_that_cannot_be_had_is_said() -> None:
    with pytest.raises(RunError, match="could not be mapped"):
        HostBuffer(2**62, device=CPU)


def test_a_buffer_of_no_bytes_is_a_tensor_of_no_bytes() -> None:
    assert HostBuffer(0, device=CPU).tensor.shape == (0,)


def test_a_child_does_not_inherit_the_memory() -> None:
    """In a process of its own: forking this one, which has threads, is not safe."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD_PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"


def make_sysfs(root: Path, nodes: dict[int, str], slots: dict[str, int]) -> Path:
    for node, cpus in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for address, node in slots.items():
        folder = root / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return root


def test_nodes_and_cpus_are_read_from_sysfs(tmp_path: Path) -> None:
    here = min(os.sched_getaffinity(0))
    slots = {"0000:3b:00.0": 1, "0000:86:00.0": -1}
    sysfs = make_sysfs(tmp_path, {0: f"{here},100000-100003", 1: "", 10: "100004"}, slots)
    assert numa_nodes(sysfs) == (0, 1, 10)
    assert cpus_of_node(0, sysfs) == {here}  # of those, the ones that this process may use
    assert cpus_of_node(1, sysfs) == frozenset()
    assert cpus_of_node(3, sysfs) == frozenset()
    assert numa_node_of_slot("0000:3b:00.0", sysfs) == 1
    assert numa_node_of_slot("0000:86:00.0", sysfs) is None
    assert numa_node_of_slot("0000:01:00.0", sysfs) is None
    assert numa_node_of(CPU, sysfs) is None


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("3\n", {3}), ("0-2,8,10-11\n", {0, 1, 2, 8, 10, 11}), ("5-5", {5})]
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_memory_may_be_touched_on_a_named_node_and_the_caller_keeps_its_cpus() -> None:
    before = os.sched_getaffinity(0)
    buffer = HostBuffer(1000, device=CPU, numa_node=0)
    assert int(buffer.tensor.sum()) == 0
    assert os.sched_getaffinity(0) == before

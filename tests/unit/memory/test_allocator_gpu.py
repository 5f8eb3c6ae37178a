"""The allocator's mode, switched on a device and looked up on its segments."""

from collections.abc import Iterator

import pytest
import torch

from plimsoll.memory.allocator import AllocatorPolicy, TorchAllocator, allocator_mode, inherited_options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20


@pytest.fixture
def policy() -> Iterator[AllocatorPolicy]:
    """Of a trainer; afterwards the process has what it had."""
    torch.cuda.empty_cache()
    started = AllocatorPolicy(TorchAllocator(), options={"max_split_size_mb": "512"})
    started.start()
    yield started
    torch.cuda.empty_cache()
    started.set_expandable(inherited_options().get("expandable_segments") == "True")


def test_switches_change_later_segments_and_leave_no_probe(policy: AllocatorPolicy) -> None:
    backend = TorchAllocator()
    before = torch.cuda.memory_reserved()
    for on in (True, False, True):
        policy.set_expandable(on)
        assert backend.next_segment_is_expandable() is on
    assert torch.cuda.memory_reserved() <= before


def test_a_tensor_knows_its_segment(policy: AllocatorPolicy) -> None:
    backend = TorchAllocator()
    own = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert backend.lies_in_expandable(own) is True
    with policy.plain_segments():
        shared = torch.empty(65 * MIB, dtype=torch.uint8, device="cuda")
    assert backend.lies_in_expandable(shared) is False
    assert allocator_mode(own.device.index) == "mixed"
    del shared
    torch.cuda.empty_cache()
    assert allocator_mode(own.device.index) == "expandable"


def test_a_buffer_to_share_is_plain_though_the_cache_could_serve_it(policy: AllocatorPolicy) -> None:
    backend = TorchAllocator()

    def make() -> torch.Tensor:
        return torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")

    cached = [make(), make()]
    del cached
    assert backend.lies_in_expandable(policy.plain_buffer(make)) is False


def test_an_engine_that_toggles_is_put_right(policy: AllocatorPolicy) -> None:
    backend = TorchAllocator()
    with policy.guard_engine():
        assert backend.next_segment_is_expandable() is False
        backend.set_options("expandable_segments:False")
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            weights = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        backend.set_options("max_split_size_mb:20")
    assert backend.next_segment_is_expandable() is True
    own = torch.empty(96 * MIB, dtype=torch.uint8, device="cuda")
    assert backend.lies_in_expandable(own) is True
    assert backend.lies_in_expandable(weights) is False
    assert allocator_mode(own.device.index) == "expandable"  # private pools do not count

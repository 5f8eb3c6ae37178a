"""Registered memory, offload and capture on a GPU: values, bytes on the device, and copies that wait for kernels."""

import gc

import pytest
import torch
from torch import Tensor

from plimsoll.weights.arena import HostArena
from plimsoll.weights.offload import Offloader, storage_sizes
from plimsoll.weights.registered import HostBuffer, registered_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BUSY_CYCLES = 200_000_000  # about a tenth of a second


def test_a_buffer_is_registered_until_it_is_closed() -> None:
    before = registered_bytes()
    buffer = HostBuffer(10_000_001, device=torch.device("cuda"))
    view = buffer.tensor
    assert buffer.registered
    assert registered_bytes() - before == 10_000_001
    assert view.is_pinned()
    on_device = view.to("cuda", non_blocking=True)
    assert int(on_device.sum()) == 0
    buffer.close()
    buffer.close()
    assert not view.is_pinned()
    assert not buffer.registered
    assert registered_bytes() == before


def test_a_dropped_buffer_unregisters_itself() -> None:
    buffer = HostBuffer(4096, device=torch.device("cuda"))
    view = buffer.tensor
    del buffer
    gc.collect()
    assert not view.is_pinned()
    assert HostBuffer(4096, device=torch.device("cuda")).registered


def make_offloader(tensors: list[Tensor]) -> Offloader:
    arena = HostArena({"tensors": storage_sizes(tensors)}, device=torch.device("cuda"))
    return Offloader(arena, "tensors", tensors)


def test_tensors_leave_the_device_and_come_back_bitwise() -> None:
    tensors = [torch.randn(1000, 1001, device="cuda"), torch.randn(7, device="cuda", dtype=torch.bfloat16)]
    tensors.append(tensors[0][3:9])
    kept = [tensor.cpu() for tensor in tensors]
    offloader = make_offloader(tensors)
    before = torch.cuda.memory_allocated()
    moved = offloader.offload()
    assert moved.num_bytes == 4 * 1000 * 1001 + 14
    assert before - torch.cuda.memory_allocated() >= moved.num_bytes
    filled = torch.full((3_000_000,), 9.0, device="cuda")  # takes the memory that was freed
    offloader.onload()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors, kept, strict=True))
    assert float(filled.min()) == 9.0


def test_copies_wait_for_kernels_that_are_still_queued() -> None:
    tensors = [torch.zeros(2_000_000, device="cuda")]
    offloader = make_offloader(tensors)
    torch.cuda._sleep(BUSY_CYCLES)  # pyright: ignore[reportPrivateUsage]
    tensors[0].add_(1)
    offloader.offload()
    scratch = torch.zeros(2_000_000, device="cuda")
    torch.cuda._sleep(BUSY_CYCLES)  # pyright: ignore[reportPrivateUsage]
    scratch.fill_(5)
    del scratch  # its memory is given to the next one while `fill_` is still queued
    offloader.onload()
    assert float(tensors[0].min()) == float(tensors[0].max()) == 1.0


def test_a_capture_casts_on_the_device_and_waits_for_the_sources() -> None:
    own = [torch.zeros(40_000_001, device="cuda", dtype=torch.bfloat16)]  # several pieces
    source = torch.zeros(40_000_001, device="cuda")
    offloader = make_offloader(own)
    torch.cuda._sleep(BUSY_CYCLES)  # pyright: ignore[reportPrivateUsage]
    source.normal_()
    offloader.capture([source])
    expected = source.to(torch.bfloat16)
    source.zero_()
    offloader.onload()
    assert torch.equal(own[0], expected)

import weakref

import pytest
import torch

from plimsoll.weights.host_bytes import host_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_the_bytes_are_the_tensors_own_memory(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    assert bytes(host_bytes(tensor)) == bytes(tensor.view(-1).view(torch.uint8).tolist())
    host_bytes(tensor[1])[:] = host_bytes(tensor[0].clone())
    assert tensor.tolist() == torch.tensor([[0, 1], [0, 1]]).to(dtype).tolist()
    assert len(host_bytes(torch.empty(0, dtype=dtype))) == 0


def test_the_storage_can_still_be_resized() -> None:
    tensor = torch.zeros(4)
    host_bytes(tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


def test_the_view_keeps_the_tensor() -> None:
    tensor = torch.zeros(4)
    held = weakref.ref(tensor)
    part = host_bytes(tensor)[4:8]
    del tensor
    assert held() is not None
    del part
    assert held() is None

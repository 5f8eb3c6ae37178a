"""The bytes of a tensor on the CPU, for calls that take a buffer."""

import ctypes

from torch import Tensor


def host_bytes(tensor: Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's memory, of any dtype. It keeps the tensor.

    Not `tensor.numpy()`: that marks the storage as not resizable for good, and offloading frees memory by resizing.
    """
    assert tensor.device.type == "cpu", f"bytes of a tensor on {tensor.device}"
    assert tensor.is_contiguous(), "bytes of a tensor that does not lie in one run"
    if tensor.nbytes == 0:  # a view of nothing cannot be cast
        return memoryview(bytearray())
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # pyright: ignore[reportAttributeAccessIssue]  # ctypes does not know whose memory it is
    return memoryview(memory).cast("B")

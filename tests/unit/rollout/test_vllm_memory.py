import ctypes
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from plimsoll.errors import RunError
from plimsoll.rollout import vllm_memory
from plimsoll.rollout.vllm_memory import PoolCalls, SleepPool, blocks_of_segments


@dataclass
class Entry:
    handle: tuple[int, int, int, Any]
    tag: str
    is_asleep: bool = False


class Memory:
    """A pool in host memory: what is unmapped loses its contents, and mapping twice is an error."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.entries: dict[int, Entry] = {}
        self.mapped: set[int] = set()
        self.copies = 0

    def add(self, tag: str, name: str, values: list[int]) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=torch.uint8)
        self.tensors[name] = tensor
        address = tensor.data_ptr()
        self.entries[address] = Entry(handle=(0, tensor.numel(), address, None), tag=tag)
        self.mapped.add(address)
        return tensor

    def calls(self) -> PoolCalls:
        return PoolCalls(
            allocations=self.entries,
            blocks=lambda tag: [(address, e.handle[1]) for address, e in self.entries.items() if e.tag == tag],
            map=lambda handle: self._map(handle[2]),
            unmap=lambda handle: self._unmap(handle[2], handle[1]),
            copy=self._copy,
        )

    def _map(self, address: int) -> None:
        assert address not in self.mapped
        self.mapped.add(address)

    def _unmap(self, address: int, size: int) -> None:
        self.mapped.remove(address)
        ctypes.memset(address, 0xAA, size)

    def _copy(self, target: int, source: int, size: int) -> None:
        assert {target, source} & self.mapped, "a copy from or to memory that is not there"
        self.copies += 1
        ctypes.memmove(target, source, size)


def test_parts_sleep_one_by_one_and_everything_but_what_comes_anew_is_as_it_was():
    memory = Memory()
    parameter = memory.add("weights", "parameter", [1, 2, 3, 4])
    table = memory.add("weights", "rotary table", [5, 6])
    cache = memory.add("kv_cache", "cache", [7] * 8)
    blocks = memory.add("kv_cache", "block table", [8])
    pool = SleepPool(memory.calls())
    for _ in range(2):
        pool.sleep("kv_cache", [cache])
        assert (pool.awake("weights"), pool.awake("kv_cache")) == (True, False)
        assert (pool.mapped_bytes("weights"), pool.mapped_bytes("kv_cache"), pool.mapped_bytes()) == (6, 0, 6)
        pool.sleep("weights", [parameter[1:]])  # a view: its storage counts
        assert (pool.mapped_bytes(), pool.counted_bytes()) == (0, 15)
        assert table.tolist() == [0xAA] * 2
        pool.wake("weights")
        assert table.tolist() == [5, 6]
        assert parameter.tolist() == [0xAA] * 4
        pool.wake("kv_cache")
        assert blocks.tolist() == [8]
        assert cache.tolist() == [0xAA] * 8
        assert pool.host_bytes == 3  # the same buffers at every sleep
    assert memory.copies == 8


def test_too_much_to_keep_is_an_error_before_anything_is_given_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_memory, "SAVED_LIMIT", 3)
    memory = Memory()
    memory.add("kv_cache", "cache", [7] * 4)
    pool = SleepPool(memory.calls())
    with pytest.raises(RunError, match="4 bytes of the engine's kv_cache are neither weights nor KV cache"):
        pool.sleep("kv_cache", [])
    assert pool.awake("kv_cache")
    assert pool.mapped_bytes("kv_cache") == 4


def test_a_part_cannot_sleep_twice_nor_wake_twice():
    memory = Memory()
    memory.add("weights", "parameter", [1])
    pool = SleepPool(memory.calls())
    with pytest.raises(AssertionError, match="awake already"):
        pool.wake("weights")
    pool.sleep("weights", [])
    with pytest.raises(AssertionError, match="asleep already"):
        pool.sleep("weights", [])


def test_blocks_are_those_that_hold_a_tensor():
    segments = [
        {
            "address": 100,
            "blocks": [
                {"address": 100, "size": 8, "state": "active_allocated"},
                {"address": 108, "size": 4, "state": "inactive"},
            ],
        },
        {"address": 200, "blocks": [{"address": 200, "size": 2, "state": "active_allocated"}]},
    ]
    assert blocks_of_segments(segments) == [(100, 8), (200, 2)]

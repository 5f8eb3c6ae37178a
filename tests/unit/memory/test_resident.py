"""Residents count the bytes of distinct storages."""

import torch
from torch import nn

from plimsoll.memory.resident import storage_bytes
from tests import tiny


def test_tied_weights_count_once() -> None:
    tied, untied = tiny.qwen2(tied=True), tiny.qwen2(tied=False)
    head = 64 * 32 * 4  # V x H, fp32
    parameters = sum(p.numel() * 4 for p in tied.parameters())  # parameters() itself yields a tied weight once
    assert storage_bytes(tied.state_dict().values()) == parameters
    assert storage_bytes(untied.state_dict().values()) == parameters + head


def test_views_count_once_and_with_their_whole_storage() -> None:
    base = torch.zeros(100)
    assert storage_bytes([base[:10], base[50:], base.view(10, 10)]) == 400


def test_meta_and_empty_tensors_count_nothing() -> None:
    assert storage_bytes([torch.empty(1000, device="meta"), torch.empty(0)]) == 0


def test_a_freed_storage_counts_nothing() -> None:
    tensor = torch.zeros(100)
    tensor.untyped_storage().resize_(0)
    assert storage_bytes([tensor]) == 0


def test_equal_sizes_at_different_addresses_are_all_counted() -> None:
    module = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    assert storage_bytes(module.parameters()) == 3 * 64

"""Offload and onload by storages: values, ties, views, FSDP2's own storages, and what an error leaves behind."""

import copy
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from plimsoll.parallel.mesh import ensure_process_group
from plimsoll.weights.arena import HostArena
from plimsoll.weights.offload import Offloader, storage_sizes, storages_of

CPU = torch.device("cpu")


def make_offloader(tensors: list[Tensor]) -> Offloader:
    return Offloader(HostArena({"tensors": storage_sizes(tensors)}, device=CPU), "tensors", tensors)


def device_bytes(tensors: list[Tensor]) -> int:
    return sum(storage.nbytes() for storage in storages_of(tensors))


def test_tensors_leave_and_come_back_bitwise() -> None:
    tensors = [torch.randn(7, 3), torch.randn(5).to(torch.bfloat16), torch.tensor([True, False]), torch.empty(0)]
    before = [tensor.clone() for tensor in tensors]
    offloader = make_offloader(tensors)
    assert offloader.num_bytes == 84 + 10 + 2
    moved = offloader.offload()
    assert (moved.num_bytes, offloader.on_device, device_bytes(tensors)) == (96, False, 0)
    assert moved.seconds > 0
    assert offloader.offload().num_bytes == 0  # done before
    assert offloader.onload().num_bytes == 96
    assert offloader.onload().num_bytes == 0
    assert offloader.on_device
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    tensors[0].add_(1)  # the second time takes the new values
    offloader.offload()
    offloader.onload()
    assert torch.equal(tensors[0], before[0] + 1)


def test_views_and_tied_tensors_go_once_and_stay_tied() -> None:
    base = torch.arange(24.0).view(4, 6)
    tied = nn.Parameter(base)
    tensors = [base[1:3], base.t(), tied, torch.ones(2)]
    offloader = make_offloader(tensors)
    assert offloader.num_bytes == 24 * 4 + 8
    offloader.offload()
    offloader.onload()
    assert tensors[0].tolist() == [[6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17]]
    with torch.no_grad():
        tied[1, 0] = -1.0
    assert float(tensors[0][0, 0]) == float(tensors[1][0, 1]) == float(base[1, 0]) == -1.0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.sigmoid(self.head(hidden))


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in cast("Any", model).layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_step(model: nn.Module, adamw: torch.optim.Optimizer, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits and gradients of one step."""
    logits = model(ids)
    logits.square().mean().backward()
    gradients = [cast("DTensor", p.grad).to_local().clone() for p in model.parameters() if p.grad is not None]
    adamw.step()
    adamw.zero_grad()
    return logits.detach().clone(), gradients


def run_steps(model: nn.Module, between: Callable[[], None]) -> list[tuple[Tensor, list[Tensor]]]:
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    ids = torch.arange(10).view(2, 5)
    found: list[tuple[Tensor, list[Tensor]]] = []
    for _ in range(3):
        found.append(train_step(model, adamw, ids))
        between()
    return found


def assert_same(model: nn.Module, other: nn.Module, offloader: Offloader) -> None:
    def there_and_back() -> None:
        offloader.offload()
        assert device_bytes(list(model.parameters())) == 0
        offloader.onload()

    ours, plain = run_steps(model, there_and_back), run_steps(other, lambda: None)
    for (logits, gradients), (expected, expected_gradients) in zip(ours, plain, strict=True):
        assert torch.equal(logits, expected)
        assert len(gradients) == len(expected_gradients) == 5
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected_gradients, strict=True))
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(cast("DTensor", parameter).to_local(), cast("DTensor", expected).to_local())


def test_a_sharded_model_trains_on_as_if_it_had_never_been_away() -> None:
    ensure_process_group(CPU)
    torch.manual_seed(0)
    plain = Tied()
    model = shard(copy.deepcopy(plain))
    parameters = [tensor for tensor in model.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)]
    assert_same(model, shard(plain), make_offloader(parameters))
    assert cast("Tied", model).head.weight is cast("Tied", model).embedding.weight


def test_no_room_leaves_everything_in_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two tensors finds no memory; afterwards the first is not half there, and nothing is lost."""
    tensors = [torch.arange(10.0), torch.arange(20.0)]
    offloader = make_offloader(tensors)
    offloader.offload()
    resize = torch.UntypedStorage.resize_

    def refuse(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        if num_bytes == 80:
            raise torch.OutOfMemoryError("no room")
        return resize(storage, num_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            offloader.onload()
    assert not offloader.on_device
    assert device_bytes(tensors) == 0
    offloader.onload()
    assert [tensor.tolist() for tensor in tensors] == [list(range(10)), list(range(20))]


def test_a_copy_that_fails_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(10.0), torch.arange(20.0)]
    offloader = make_offloader(tensors)
    copy_ = Tensor.copy_

    def fail(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if target.numel() == 80:
            raise RuntimeError("a failing device")
        return copy_(target, source, non_blocking)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", fail)
        with pytest.raises(RuntimeError, match="a failing device"):
            offloader.offload()
    assert offloader.on_device
    assert [tensor.tolist() for tensor in tensors] == [list(range(10)), list(range(20))]
    offloader.offload()
    offloader.onload()
    assert [tensor.tolist() for tensor in tensors] == [list(range(10)), list(range(20))]


def test_other_values_are_captured_in_the_own_dtype_and_the_sources_stay() -> None:
    base = torch.zeros(40, dtype=torch.bfloat16)
    own = [base[8:20].view(3, 4), torch.zeros(5, dtype=torch.bfloat16), base[30:34]]
    sources = [torch.randn(3, 4), torch.randn(5), torch.randn(2, 4).t()[:, 0]]
    kept = [source.clone() for source in sources]
    offloader = make_offloader(own)
    moved = offloader.capture(sources)
    assert moved.num_bytes == 80 + 10
    assert device_bytes(own) == 0
    assert not offloader.on_device
    assert all(torch.equal(a, b) for a, b in zip(sources, kept, strict=True))
    for source in sources:
        source.zero_()  # a snapshot, not a view
    offloader.onload()
    assert all(torch.equal(a, b.to(torch.bfloat16)) for a, b in zip(own, kept, strict=True))


def test_an_arena_for_other_tensors_is_our_mistake() -> None:
    arena = HostArena({"tensors": [40]}, device=CPU)
    with pytest.raises(AssertionError, match="laid out for other tensors"):
        Offloader(arena, "tensors", [torch.zeros(11)])
    read_only = torch.frombuffer(bytearray(40), dtype=torch.float32)
    with pytest.raises(AssertionError, match="cannot be freed"):
        Offloader(arena, "tensors", [read_only])


def test_a_tensor_that_was_given_other_memory_is_not_offloaded_in_silence() -> None:
    tensors = [torch.zeros(4), torch.zeros(2)]
    offloader = make_offloader(tensors)
    tensors[1].data = torch.ones(2)
    with pytest.raises(AssertionError, match="another storage"):
        offloader.offload()


def test_what_was_not_changed_is_dropped_without_a_copy() -> None:
    tensors = [torch.arange(10.0), torch.arange(20.0)]
    arena = HostArena({"tensors": storage_sizes(tensors)}, device=CPU)
    offloader = Offloader(arena, "tensors", tensors)
    with pytest.raises(AssertionError, match="before the arena had the values"):
        offloader.drop()
    assert device_bytes(tensors) == 120
    offloader.offload()
    for _ in range(2):
        offloader.onload()
        tensors[0].fill_(7)  # a copy back would bring this to the arena
        offloader.drop()
        offloader.drop()
        assert not offloader.on_device
        assert device_bytes(tensors) == 0
        assert arena.region("tensors")[0].view(torch.float32).tolist() == list(range(10))
    offloader.onload()
    assert [tensor.tolist() for tensor in tensors] == [list(range(10)), list(range(20))]


def test_a_capture_that_fails_leaves_no_values_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [torch.zeros(10), torch.zeros(20)]
    sources = [torch.arange(10.0), torch.arange(20.0)]
    offloader = make_offloader(own)
    offloader.offload()
    copy_ = Tensor.copy_

    def fail(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if target.numel() == 20:
            raise RuntimeError("a failing device")
        return copy_(target, source, non_blocking)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", fail)
        with pytest.raises(RuntimeError, match="a failing device"):
            offloader.capture(sources)
    with pytest.raises(AssertionError, match="capture failed"):
        offloader.onload()
    offloader.capture(sources)
    offloader.onload()
    assert all(torch.equal(a, b) for a, b in zip(own, sources, strict=True))


def test_a_storage_that_can_no_longer_be_freed_is_said_before_anything_is_freed() -> None:
    tensors = [torch.zeros(4), torch.zeros(2)]
    offloader = make_offloader(tensors)
    tensors[1].numpy()
    with pytest.raises(AssertionError, match="cannot be freed any more"):
        offloader.offload()
    assert device_bytes(tensors) == 24


def test_a_closed_offloader_does_not_keep_the_arena() -> None:
    tensors = [torch.zeros(64)]
    arena = HostArena({"tensors": storage_sizes(tensors)}, device=CPU)
    offloader = Offloader(arena, "tensors", tensors)
    offloader.offload()
    region = weakref.ref(arena.region("tensors")[0].untyped_storage())
    offloader.close()
    arena.close()
    assert region() is None
    with pytest.raises(AssertionError, match="after it was closed"):
        offloader.onload()

"""Move tensors to the host arena and back by their storages.

The device memory is freed by resizing the storage to nothing, so that everybody who holds the tensor (FSDP2's flat
views, an optimizer, a tied parameter) still holds the right one afterwards. `module.to` and a new `.data` would leave
them with the old.
"""

import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from plimsoll.weights.arena import HostArena
from plimsoll.weights.layout import local_tensor

_CAST_ELEMENTS = 2**24  # converted on the device at a time


@dataclass(slots=True, kw_only=True, frozen=True)
class Moved:
    """One way between device and arena."""

    num_bytes: int
    seconds: float  # until the last byte had arrived


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The distinct storages under `tensors`, in their order: of DTensors the local shard's, padding included."""
    # torch gives out one object a storage. Its address would not do: a storage that is freed or on the meta device has
    # none.
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = local_tensor(tensor).untyped_storage()
        found.setdefault(id(storage), storage)
    return list(found.values())


def storage_sizes(tensors: Iterable[Tensor]) -> list[int]:
    """Bytes of `storages_of(tensors)`: what `HostArena` needs to know."""
    return [storage.nbytes() for storage in storages_of(tensors)]


class Offloader:
    """Tensors that are either on their device or in a region of the arena. Gradients are not its business."""

    def __init__(self, arena: HostArena, name: str, tensors: Iterable[Tensor]) -> None:
        """`name`: a region of `storage_sizes(tensors)`. The tensors are on their device now.

        They must keep their storages from now on. FSDP2 exchanges those of uneven shards once, to pad them: in the
        first forward, or in `to_empty` of the root module. Make the offloader after that.
        """
        self._tensors = list(tensors)
        self._storages = storages_of(self._tensors)
        self._region = arena.region(name)
        self._sizes = [len(place) for place in self._region]
        sizes = [storage.nbytes() for storage in self._storages]
        assert sizes == self._sizes, f"region {name} of the arena was laid out for other tensors"
        assert all(storage.resizable() for storage in self._storages), f"{name}: a storage that cannot be freed"
        self._away = [False] * len(self._storages)
        self._stored = False
        """The arena has a value for every byte. Not whether it is the newest: that is for the caller to know."""
        self._device = arena.device
        self._side = torch.cuda.Stream(arena.device) if arena.device.type == "cuda" else None

    @property
    def on_device(self) -> bool:
        """Whether the tensors can be used."""
        return not any(self._away)

    @property
    def num_bytes(self) -> int:
        """Bytes that go one way."""
        return sum(self._sizes)

    @torch.no_grad()
    def offload(self) -> Moved:
        """Copy to the arena, then free the device memory. Nothing to do when it was done before.

        Nothing is freed before every byte has arrived: after an error the tensors are as they were.
        """
        start = time.perf_counter()
        self._check_storages()
        here = [i for i, away in enumerate(self._away) if not away]
        with self._copying():
            for i in here:
                self._region[i].copy_(_bytes(self._storages[i]), non_blocking=True)
        self._stored = True
        for i in here:
            self._away[i] = True
            self._storages[i].resize_(0)
        return self._moved(here, start)

    def drop(self) -> None:
        """Free the device memory and copy nothing: for tensors that nobody has changed since `onload`.

        Nothing to do when they are not on the device.
        """
        assert self._stored, "dropped before the arena had the values"
        self._check_storages()
        for i, storage in enumerate(self._storages):
            self._away[i] = True
            storage.resize_(0)

    @torch.no_grad()
    def onload(self) -> Moved:
        """Take device memory again and copy back. Nothing to do when it was done before.

        All or nothing: when the device has no room, it is as before, and everything is still in the arena.
        """
        start = time.perf_counter()
        self._check_storages()
        away = [i for i, is_away in enumerate(self._away) if is_away]
        assert self._stored or not away, "the arena has no values: a capture failed half-way"
        try:
            for i in away:
                self._storages[i].resize_(self._sizes[i])
            # After taking the memory: an earlier kernel of the current stream may still be using what was freed there.
            with self._copying():
                for i in away:
                    _bytes(self._storages[i]).copy_(self._region[i], non_blocking=True)
        except BaseException:
            for i in away:
                self._storages[i].resize_(0)
            raise
        for i in away:
            self._away[i] = False
        return self._moved(away, start)

    @torch.no_grad()
    def capture(self, sources: Sequence[Tensor]) -> Moved:
        """Take the values of `sources` (one for each tensor of this offloader, local shapes alike, any dtype) into the
        arena, cast to the own dtypes; the sources stay as they are. The own tensors hold them after `onload`.

        What the own tensors hold now is given up: their memory is freed first. After an error there are no values, and
        another capture is needed.
        """
        start = time.perf_counter()
        self._check_storages()
        assert len(sources) == len(self._tensors), "one source for each tensor"
        self._stored = False
        for i, storage in enumerate(self._storages):
            self._away[i] = True
            storage.resize_(0)
        places = {id(storage): place for storage, place in zip(self._storages, self._region, strict=True)}
        with self._copying():
            for tensor, source in zip(map(local_tensor, self._tensors), sources, strict=True):
                memory = places[id(tensor.untyped_storage())].view(tensor.dtype)
                # The offset that as_strided takes counts from the start of the arena.
                offset = memory.storage_offset() + tensor.storage_offset()
                target = memory.as_strided(tensor.shape, tensor.stride(), offset)
                _cast(local_tensor(source), target)
        self._stored = True
        return self._moved(range(len(self._storages)), start)

    def close(self) -> None:
        """Let go of the arena, so that closing it gives its memory back. What is not on the device is lost."""
        self._region = ()
        self._stored = False

    def _check_storages(self) -> None:
        assert len(self._region) == len(self._storages), "an offloader is used after it was closed"
        now = storages_of(self._tensors)
        same = len(now) == len(self._storages) and all(a is b for a, b in zip(now, self._storages, strict=True))
        assert same, "a tensor has another storage than when its offloader was made"
        # `numpy()` and DLPack take the right to resize from a storage for good.
        assert all(storage.resizable() for storage in self._storages), "a storage that cannot be freed any more"

    @contextmanager
    def _copying(self) -> Generator[None]:
        """Copies inside run after the current stream's work so far, and are finished at the end, even after an error.

        Because the host waits, neither side needs `record_stream`: nothing is freed or read while a copy is under way.
        """
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._side):
                yield
        finally:
            self._side.synchronize()

    def _moved(self, indices: Iterable[int], start: float) -> Moved:
        return Moved(num_bytes=sum(self._sizes[i] for i in indices), seconds=time.perf_counter() - start)


def _cast(source: Tensor, target: Tensor) -> None:
    """Through the dtype of `target`, a piece at a time: the copy over the bus is then of the small dtype."""
    assert source.shape == target.shape, f"{tuple(source.shape)} for {tuple(target.shape)}"
    if source.dtype == target.dtype or not (source.is_contiguous() and target.is_contiguous()):
        target.copy_(source, non_blocking=True)
        return
    flat, out = source.view(-1), target.view(-1)
    for start in range(0, len(flat), _CAST_ELEMENTS):
        piece = flat[start : start + _CAST_ELEMENTS].to(target.dtype)
        out[start : start + _CAST_ELEMENTS].copy_(piece, non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

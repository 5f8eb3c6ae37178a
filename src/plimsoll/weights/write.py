"""safetensors files written by all ranks at once, each its own byte ranges.

    lay_out ─▶ create_files (rank 0: final sizes, headers) ─▶ ShardWriter.run on every rank ─▶ agreement

The layout is the same on every rank (file_layout.py). Of each tensor a rank writes what its shard holds; ranks that
hold the same part share it chunk by chunk, so every byte is written exactly once. No rank holds more than its shard and
the staging buffers.
"""

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.box import Box
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.file_layout import FileLayout, LaidOut, Outgoing, index_of, lay_out, whole
from plimsoll.weights.host_bytes import host_bytes
from plimsoll.weights.layout import cut_box, local_boxes, local_tensor, replica_index, runs
from plimsoll.weights.pieces import Piece
from plimsoll.weights.publish import saying_why
from plimsoll.weights.ring import StagingRing
from plimsoll.weights.tensors import index_name

__all__ = [
    "BUDGET_BYTES",
    "FileLayout",
    "LaidOut",
    "Outgoing",
    "ShardWriter",
    "create_files",
    "lay_out",
    "reserve_space",
    "whole",
    "write_laid_out",
]

BUDGET_BYTES = 64 * 1024**2
"""Staging buffers of one rank, all together."""

THREADS = 4
"""That cast and write at a time, each with a staging buffer."""


def reserve_space(descriptor: int, num_bytes: int) -> None:
    """Give a file its size, and the blocks for it, so that a full disk is seen before the first byte is written."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that knows no reservation
            raise
        os.ftruncate(descriptor, num_bytes)


def create_files(
    folder: Path, layouts: Sequence[FileLayout], *, reserve: Callable[[int, int], None] = reserve_space
) -> list[Path]:
    """Make every file with its final size and its header, and the index where there are several; one rank does it.

    Returns the paths. `reserve(descriptor, num_bytes)` sets the size. OSError: a disk that is full, a folder that is
    not writable; what was made before it stays, for the caller to remove with its folder.
    """
    paths: list[Path] = []
    for layout in layouts:
        paths.append(folder / layout.name)
        descriptor = os.open(paths[-1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            reserve(descriptor, layout.num_bytes)
            write_all(descriptor, memoryview(layout.header), 0)
        finally:
            os.close(descriptor)
    if len(layouts) > 1:
        stem = layouts[0].name.rpartition("-00001-of-")[0]
        paths.append(folder / index_name(stem))
        paths[-1].write_text(index_of(layouts), encoding="utf-8")
    return paths


def write_laid_out(
    folder: Path,
    layouts: Sequence[FileLayout],
    *,
    control: ControlGroup,
    budget_bytes: int = BUDGET_BYTES,
    threads: int = THREADS,
    ring: StagingRing | None = None,
    reserve: Callable[[int, int], None] = reserve_space,
    shown: Path | None = None,
) -> int:
    """Create the files and write them, all ranks together (collective); returns the bytes that this rank wrote.

    `folder` exists and is seen by every rank. When it returns the bytes are on disk; the folder's entry is not synced.
    `shown`: named in errors in place of the folder. Raises the same error on every rank, CheckpointError where the
    system refused something; the files are then not to be used.
    """
    chunk_bytes = budget_bytes // threads if ring is None else ring.buffer_bytes
    _check_alike(control, layouts, chunk_bytes)

    def create() -> None:
        with saying_why(shown or folder):
            if control.rank == 0:
                create_files(folder, layouts, reserve=reserve)

    def write() -> int:
        writer = ShardWriter(
            folder,
            layouts,
            rank=control.rank,
            ranks=control.ranks,
            budget_bytes=budget_bytes,
            threads=threads,
            ring=ring,
        )
        writer.run()
        with saying_why(shown or folder):
            writer.check()
        return writer.num_bytes

    control.together(create)
    return control.together(write)


def _check_alike(control: ControlGroup, layouts: Sequence[FileLayout], chunk_bytes: int) -> None:
    sizes = control.gather(chunk_bytes)
    if len(set(sizes)) > 1:
        raise RefusedError(f"ranks have staging buffers of {sizes} bytes; give all the same budget_bytes and threads")
    assert len(set(control.gather(_plan_of(layouts, chunk_bytes)))) == 1, "ranks lay out different files"


def _plan_of(layouts: Sequence[FileLayout], chunk_bytes: int) -> str:
    digest = hashlib.sha256(str(chunk_bytes).encode())
    for layout in layouts:
        digest.update(layout.name.encode() + layout.header)
    return digest.hexdigest()


@dataclass(slots=True, kw_only=True, frozen=True)
class _Chunk:
    """Elements that one rank writes at a time."""

    file: int
    """Index of the layout."""
    placed: LaidOut
    box: Box
    """In the stored tensor."""
    source: Tensor
    """These elements in memory, with the dims of the stored tensor."""

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.placed.outgoing.dtype.itemsize

    @property
    def direct(self) -> bool:
        """Whether its bytes in memory are those of the file."""
        same = self.source.dtype == self.placed.outgoing.dtype
        return same and self.source.device.type == "cpu" and self.source.is_contiguous()


class ShardWriter:
    """Writes one rank's byte ranges into files that `create_files` has made. Sends nothing to other ranks.

    `run` may be called in a thread while the caller goes on: the tensors must not change before `tensors_read` is set.
    Then, when `run` has ended, `check` says how it went. On a CUDA device the values read are those that the stream
    which is current at construction has made.

    Args:
        rank, ranks: who this is, of those that hold plain tensors (`ControlGroup.rank`, `.ranks`).
        budget_bytes: of the staging buffers, one a thread; must be the same on all ranks, as must `threads`.
        ring: buffers to use in place of own ones; `budget_bytes` is then not read. Of the same size on all ranks.
        sync: waits until the bytes of a descriptor are on disk.
    """

    def __init__(
        self,
        folder: Path,
        layouts: Sequence[FileLayout],
        *,
        rank: int = 0,
        ranks: int = 1,
        budget_bytes: int = BUDGET_BYTES,
        threads: int = THREADS,
        ring: StagingRing | None = None,
        sync: Callable[[int], None] = os.fsync,
    ) -> None:
        self.tensors_read = threading.Event()
        """Set when every tensor has been read, or nothing more will be: they may be changed from now on."""
        self._paths = [folder / layout.name for layout in layouts]
        self._ring = ring
        self._buffer_bytes = budget_bytes // threads if ring is None else ring.buffer_bytes
        self.plan = _plan_of(layouts, self._buffer_bytes)
        """Equal on all ranks. If not, they cut what they share differently: bytes are written twice, or by nobody."""
        self._threads = threads
        self._sync = sync
        self._chunks = list(_chunks_of(layouts, rank, ranks, self._buffer_bytes))
        self.num_bytes = sum(chunk.num_bytes for chunk in self._chunks)
        """That this rank writes, headers left out."""
        # Rank 0 wrote the headers, so it syncs every file.
        self._files = sorted({chunk.file for chunk in self._chunks} | set(range(len(layouts)) if rank == 0 else ()))
        self._lock = threading.Lock()
        self._next = 0
        self._unread = len(self._chunks)
        self._stopped = False
        self._failure: BaseException | None = None
        self._ended = False
        self._device = next((chunk.source.device for chunk in self._chunks if chunk.source.is_cuda), None)
        self._stream: torch.cuda.Stream | None = None
        if self._device is not None:
            # A stream of its own: the copies neither wait for the training's kernels nor hold them up.
            self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def run(self) -> None:
        """Write all of it and wait until it is on disk. Raises nothing: `check` does."""
        try:
            with ExitStack() as stack:
                descriptors: dict[int, int] = {}
                for file in self._files:
                    descriptors[file] = os.open(self._paths[file], os.O_WRONLY | os.O_CLOEXEC)
                    stack.callback(os.close, descriptors[file])
                ring = self._ring
                if ring is None and not all(chunk.direct for chunk in self._chunks):
                    device = self._device or torch.device("cpu")
                    ring = StagingRing(buffer_bytes=self._buffer_bytes, num_buffers=self._threads, device=device)
                    stack.callback(ring.close)
                pool = ThreadPoolExecutor(self._threads, thread_name_prefix="shard-writer")
                # Before anything that the threads use is closed, also when this thread is interrupted while it waits.
                stack.callback(pool.shutdown)
                stack.callback(self.stop)
                for job in [pool.submit(self._work, descriptors, ring) for _ in range(self._threads)]:
                    job.result()
                for descriptor in descriptors.values():
                    self._sync(descriptor)
        except BaseException as error:
            self._failure = error
        finally:
            self._ended = True
            self.tensors_read.set()

    def stop(self) -> None:
        """Write no further chunk; `check` then raises. From any thread."""
        self._stopped = True

    def check(self) -> None:
        """Raise what made `run` fail, if anything did. Only after it has ended."""
        assert self._ended, "the writer has not ended"
        if self._failure is not None:
            raise self._failure
        if self._unread:
            raise CheckpointError(f"writing to {self._paths[0].parent} was stopped")

    def _work(self, descriptors: dict[int, int], ring: StagingRing | None) -> None:
        try:
            while (chunk := self._take()) is not None:
                descriptor = descriptors[chunk.file]
                if chunk.direct:
                    _write_chunk(descriptor, chunk, _bytes_of(chunk.source))
                    self._count_read()
                    continue
                assert ring is not None
                with ring.buffer() as buffer:
                    staged = self._stage(chunk, buffer.bytes)
                    self._count_read()
                    _write_chunk(descriptor, chunk, _bytes_of(staged))
        except BaseException:
            self._stopped = True  # the other threads need not go on
            raise

    def _take(self) -> _Chunk | None:
        with self._lock:
            if self._stopped or self._next == len(self._chunks):
                return None
            self._next += 1
            return self._chunks[self._next - 1]

    def _count_read(self) -> None:
        with self._lock:
            self._unread -= 1
            if self._unread == 0:
                self.tensors_read.set()

    def _stage(self, chunk: _Chunk, buffer: Tensor) -> Tensor:
        """The chunk in the file's dtype, row-major, in the buffer."""
        dtype = chunk.placed.outgoing.dtype
        staged = buffer[: chunk.num_bytes].view(dtype).view(chunk.box.shape)
        if self._stream is None:
            return staged.copy_(chunk.source)  # casts element by element: no copy in between
        with torch.cuda.stream(self._stream):
            cast = chunk.source
            if cast.dtype != dtype or not cast.is_contiguous():
                # On the device: a copy to the host that casts would go through pageable host memory.
                cast = torch.empty(chunk.box.shape, dtype=dtype, device=cast.device).copy_(cast)
            staged.copy_(cast, non_blocking=True)
            copied = self._stream.record_event()
        copied.synchronize()
        return staged


def write_all(
    descriptor: int, data: memoryview, offset: int, pwrite: Callable[[int, memoryview, int], int] = os.pwrite
) -> None:
    """Write all of `data` at `offset`: the system may take only a part at a time."""
    while data:
        written = pwrite(descriptor, data, offset)
        if written == 0:
            raise OSError(errno.EIO, "a write of zero bytes")
        data = data[written:]
        offset += written


def _write_chunk(descriptor: int, chunk: _Chunk, data: memoryview) -> None:
    itemsize = chunk.placed.outgoing.dtype.itemsize
    elements, offsets = runs(chunk.box, chunk.placed.outgoing.shape)
    length = elements * itemsize
    for index, offset in enumerate(offsets):
        begin = index * length
        write_all(descriptor, data[begin : begin + length], chunk.placed.offset + offset * itemsize)


def _bytes_of(tensor: Tensor) -> memoryview:
    return host_bytes(tensor)


def _chunks_of(layouts: Sequence[FileLayout], rank: int, ranks: int, limit_bytes: int) -> Iterator[_Chunk]:
    """What this rank writes, in file order."""
    parts = (
        (file, placed, *part)
        for file, layout in enumerate(layouts)
        for placed in layout.tensors
        for part in placed.outgoing.parts
    )
    for number, (file, placed, piece, tensor) in enumerate(parts):
        limit = max(1, limit_bytes // placed.outgoing.dtype.itemsize)
        chunks = list(_cut_part(piece, tensor, limit))
        if not chunks:
            continue
        replica, replicas = replica_index(tensor) if isinstance(tensor, DTensor) else (rank, ranks)
        # Ranks with the same part cut it into the same chunks. The count starts at the number of the part, which is
        # the same on all ranks, so that small tensors do not all fall to the first of them.
        for count, (box, source) in enumerate(chunks, start=number):
            if count % replicas == replica:
                yield _Chunk(file=file, placed=placed, box=box, source=source)


def _cut_part(piece: Piece, tensor: Tensor, limit: int) -> Iterator[tuple[Box, Tensor]]:
    """Stored boxes of what this rank has of a piece, with their elements in memory."""
    local = local_tensor(tensor)
    for part in local_boxes(tensor):
        common = piece.target_box.intersect(part.full)
        stored = piece.stored_part(part.full)
        if common is None or stored is None:
            continue
        view = piece.as_stored(local[part.local.slices][common.within(part.full).slices])
        for box in cut_box(stored, limit):
            yield box, view[box.within(stored).slices]

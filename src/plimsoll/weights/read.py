"""Bytes of files into local tensors: several reader threads, no host memory but a ring of small buffers.

chunk of a file ─▶ (a) into the tensor's own memory          CPU, same dtype, contiguous
                   (b) into a buffer ─▶ cast, transposed      CPU, else
                   (c) into a buffer ─▶ device ─▶ the same    CUDA; from a registered map without the buffer
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.box import Box
from plimsoll.weights.checkpoint_tables import NAMES_SHOWN
from plimsoll.weights.files import StoredTensor, WeightFiles
from plimsoll.weights.host_bytes import host_bytes
from plimsoll.weights.layout import Transfer, byte_runs, cut_box, local_boxes, local_tensor, run_dim, transfers
from plimsoll.weights.limits import READERS
from plimsoll.weights.mapped import MappedFile
from plimsoll.weights.pieces import ParameterTable, identity_table
from plimsoll.weights.ring import StagingRing

Source: TypeAlias = Literal["ring", "map"]

_DIRECT_BYTES = 256 * 1024**2
"""Copied at once from a map to a device, where nothing has to be staged."""
_SHORT_RUN = 4096
"""Bytes. Parts of rows shorter than this are read with the rows around them: a call for each would take longer."""
_SHORT_COPY = 64 * 1024
"""Bytes; the same for copies from a map to a device."""
_SERIAL_ELEMENTS = 32767
"""torch copies more elements than this with its own threads, of which every reader would then start a team."""
_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@dataclass(slots=True, frozen=True)
class _Chunk:
    """A part of a stored tensor, read at once."""

    stored: StoredTensor
    box: Box
    """What is read."""
    wanted: Box
    """The part of it that is kept."""
    into: Tensor
    """Where that goes: a view of the target with the dims of the stored tensor and the shape of `wanted`."""

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.stored.dtype.itemsize

    @property
    def direct(self) -> bool:
        """The bytes of the file are the bytes of the target."""
        return self.box == self.wanted and self.into.dtype == self.stored.dtype and self.into.is_contiguous()

    def pick(self, memory: Tensor) -> Tensor:
        """A view of what is kept, of bytes that were read: uint8 [num_bytes]."""
        return memory.view(self.stored.dtype).view(self.box.shape)[self.wanted.within(self.box).slices]


def read_parameters(
    files: WeightFiles,
    tables: Mapping[str, ParameterTable],
    targets: Mapping[str, Tensor],
    *,
    ring: StagingRing | None = None,
    threads: int | None = None,
    source: Source = "ring",
) -> int:
    """Fill this rank's part of `targets` (parameters, buffers, moments, by name) in place; returns the bytes read.

    No message between ranks. `source="map"`: straight from the page cache, without a buffer; on CUDA
    RegistrationRefusedError where the device does not do that. CheckpointError: a file that ended early or cannot be
    read. RefusedError: a dtype that is not cast to the target's.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in targets.items():
        if tables[name].conversion is None:
            by_device.setdefault(tensor.device, {})[name] = tensor
    check_dtypes(tables, files.tensors, targets)
    num_bytes = 0
    for tensors in by_device.values():
        wanted = transfers(tables, files.tensors, tensors)
        num_bytes += read_transfers(files, wanted, ring=ring, threads=threads, source=source)
    for name, tensor in targets.items():
        if tables[name].conversion is not None:
            num_bytes += _read_converted(files, tables[name], tensor, threads)
    return num_bytes


def read_transfers(
    files: WeightFiles,
    wanted: Sequence[Transfer],
    *,
    ring: StagingRing | None = None,
    threads: int | None = None,
    source: Source = "ring",
) -> int:
    """Carry out transfers, all to tensors of one device; returns the bytes read. See `read_parameters`.

    `ring` None: one of its own, given back at the end. `threads` None: 4, on CUDA 8. Dtypes are those that
    `check_dtypes` lets pass.
    """
    devices = {transfer.target.device for transfer in wanted}
    assert len(devices) <= 1, f"targets on several devices: {devices}"
    if not devices:
        return 0
    device = devices.pop()
    count = READERS[device.type] if threads is None else threads
    with ExitStack() as stack:
        if ring is None:
            ring = stack.enter_context(closing(StagingRing(device=device)))
        if source == "ring":
            return _run(_chunks(wanted, ring.buffer_bytes, _SHORT_RUN), _Pread(files), ring, device, count)
        files.check_unchanged()  # a page that a cut file has lost ends the process
        return _read_mapped(files, wanted, ring, device, count)


def _read_mapped(
    files: WeightFiles, wanted: Sequence[Transfer], ring: StagingRing, device: torch.device, threads: int
) -> int:
    """File by file: a registered one cannot leave the page cache, and the driver registers one at a time anyway."""
    num_bytes = 0
    for path, of_file in groupby(wanted, key=lambda transfer: transfer.stored.path):
        mapped = MappedFile(files.descriptor(path), files.identities[path].size)
        if device.type == "cpu":
            num_bytes += _run(_chunks(of_file, ring.buffer_bytes, 1), _Map(mapped), ring, device, threads)
            continue
        with mapped.registered(device):
            chunks = _chunks(of_file, ring.buffer_bytes, _SHORT_COPY, _DIRECT_BYTES)
            num_bytes += _run(chunks, _Map(mapped), ring, device, min(threads, 2))  # they only queue copies
    return num_bytes


def read_whole(files: WeightFiles, name: str, *, threads: int | None = None) -> Tensor:
    """One stored tensor, all of it, on the CPU, in the dtype of the file: read in place, without a buffer."""
    stored = files.tensors[name]
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    read_parameters(files, {name: identity_table(name, stored.shape)}, {name: tensor}, threads=threads)
    return tensor


def check_dtypes(
    tables: Mapping[str, ParameterTable], stored: Mapping[str, StoredTensor], targets: Mapping[str, Tensor]
) -> None:
    """RefusedError, the same on every rank, when a tensor is stored in a dtype that is not cast to the target's."""
    wrong = {
        f"{piece.stored} is stored as {own} in {stored[piece.stored].path} and wanted as {target.dtype}: only "
        "floating-point numbers of 16 bits or more are cast (quantized weights are not read)"
        for name, target in targets.items()
        for piece in tables[name].pieces
        if (own := stored[piece.stored].dtype) != target.dtype and not {own, target.dtype} <= _FLOATS
    }
    if wrong:
        shown = sorted(wrong)[:NAMES_SHOWN]
        more = len(wrong) - len(shown)
        raise RefusedError(shown if not more else [*shown, f"and {more} more tensors of such a dtype"])


class _Fetch(Protocol):
    """How the bytes of a chunk come to memory; used by several threads."""

    def into(self, chunk: _Chunk, memory: Tensor) -> None:
        """Fill uint8 [num_bytes] on the CPU."""
        ...

    def copies(self, chunk: _Chunk) -> Iterator[Tensor] | None:
        """The bytes of the chunk one after the other where they are in memory that a device copies from, or None."""
        ...


class _Pread:
    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        for path in files.identities:
            os.posix_fadvise(files.descriptor(path), 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def into(self, chunk: _Chunk, memory: Tensor) -> None:
        view = host_bytes(memory)
        descriptor = self._files.descriptor(chunk.stored.path)
        begin = 0
        for offset, num_bytes in byte_runs(chunk.stored, chunk.box):
            _read_run(descriptor, view[begin : begin + num_bytes], offset, chunk.stored)
            begin += num_bytes

    def copies(self, chunk: _Chunk) -> None:
        return None


class _Map:
    def __init__(self, mapped: MappedFile) -> None:
        self._bytes = mapped.bytes

    def into(self, chunk: _Chunk, memory: Tensor) -> None:
        # By bytes: an older file may begin its tensors at any address. By numpy: it starts no threads.
        array = np.frombuffer(host_bytes(memory), dtype=np.uint8)  # not memory.numpy(): see host_bytes
        begin = 0
        for part in self.copies(chunk):
            array[begin : begin + part.numel()] = part.numpy()
            begin += part.numel()

    def copies(self, chunk: _Chunk) -> Iterator[Tensor]:
        return (self._bytes[offset : offset + count] for offset, count in byte_runs(chunk.stored, chunk.box))


class _CpuReader:
    """Carries out chunks to host memory, in one thread."""

    def __init__(self, fetch: _Fetch, ring: StagingRing) -> None:
        self._fetch = fetch
        self._ring = ring

    def read(self, chunk: _Chunk) -> None:
        if chunk.direct:
            self._fetch.into(chunk, _bytes_of(chunk.into))
            return
        with self._ring.buffer() as buffer:
            memory = buffer.bytes[: chunk.num_bytes]
            self._fetch.into(chunk, memory)
            stored = chunk.pick(memory)
            for part in cut_box(Box.whole(stored.shape), _SERIAL_ELEMENTS):
                chunk.into[part.slices].copy_(stored[part.slices])

    def finish(self) -> None:
        """Nothing is under way."""


class _CudaReader:
    """Carries out chunks to a device, in one thread with a stream of its own."""

    def __init__(self, fetch: _Fetch, ring: StagingRing, device: torch.device) -> None:
        self._fetch = fetch
        self._ring = ring
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # whose memory the targets may be
        self._staging: Tensor | None = None

    def read(self, chunk: _Chunk) -> None:
        num_bytes = chunk.num_bytes
        memory = _bytes_of(chunk.into) if chunk.direct else self._staged()[:num_bytes]
        # The stream's order keeps the next chunk out of the staged bytes until they have been cast.
        with torch.cuda.stream(self._stream):
            parts = self._fetch.copies(chunk)
            if parts is None:
                with self._ring.buffer() as buffer:
                    self._fetch.into(chunk, buffer.bytes[:num_bytes])
                    try:
                        memory.copy_(buffer.bytes[:num_bytes], non_blocking=True)
                    finally:
                        buffer.release_after(self._stream)
            else:
                begin = 0
                for part in parts:
                    memory[begin : begin + part.numel()].copy_(part, non_blocking=True)
                    begin += part.numel()
            if not chunk.direct:
                chunk.into.copy_(chunk.pick(memory))

    def finish(self) -> None:
        """Wait until all of it is on the device."""
        self._stream.synchronize()

    def _staged(self) -> Tensor:
        if self._staging is None:
            # From the pool of this thread's current stream, which may still work with that memory. It is given back
            # after `finish`, so nobody gets it while this stream uses it.
            self._staging = torch.empty(self._ring.buffer_bytes, dtype=torch.uint8, device=self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._staging


class _Work:
    """Chunks, handed out in order to any thread, until one of them fails."""

    def __init__(self, chunks: Iterator[_Chunk]) -> None:
        self._chunks = chunks
        self._lock = threading.Lock()
        self._stopped = False
        self.num_bytes = 0

    def take(self) -> _Chunk | None:
        with self._lock:
            chunk = None if self._stopped else next(self._chunks, None)
            self.num_bytes += chunk.num_bytes if chunk else 0
            return chunk

    def stop(self) -> None:
        self._stopped = True


def _run(chunks: Iterator[_Chunk], fetch: _Fetch, ring: StagingRing, device: torch.device, threads: int) -> int:
    work = _Work(chunks)
    # Made here, where the current stream is the caller's.
    readers = [
        _CudaReader(fetch, ring, device) if device.type == "cuda" else _CpuReader(fetch, ring) for _ in range(threads)
    ]
    inference = torch.is_inference_mode_enabled()  # a tensor that was made in this mode is written in it only
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-reader") as pool:
        try:
            for running in [pool.submit(_read_chunks, work, reader, device, inference) for reader in readers]:
                running.result()
        finally:
            work.stop()  # after an interrupt of this thread no reader goes on behind its back: the pool waits for them
    return work.num_bytes


def _read_chunks(work: _Work, reader: _CpuReader | _CudaReader, device: torch.device, inference: bool) -> None:
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            stack.callback(reader.finish)
            while (chunk := work.take()) is not None:
                reader.read(chunk)
    except BaseException:
        work.stop()
        raise


def _chunks(
    wanted: Iterable[Transfer], limit_bytes: int, short_run: int, direct_bytes: int | None = None
) -> Iterator[_Chunk]:
    """Parts of at most `limit_bytes`, in order; of `direct_bytes` where the bytes of the file are the target's."""
    for transfer in wanted:
        stored, box = transfer.stored, transfer.stored_box
        into = transfer.target_as_stored
        around = _with_rows_around(stored, box, short_run)
        limit = limit_bytes
        if direct_bytes is not None and _Chunk(stored, around, box, into).direct:
            limit = direct_bytes
        for part in cut_box(around, limit // stored.dtype.itemsize):
            kept = part.intersect(box)
            if kept is not None:
                yield _Chunk(stored, part, kept, into[kept.within(box).slices])


def _with_rows_around(stored: StoredTensor, box: Box, short_run: int) -> Box:
    """The box, widened to whole rows until its runs are no shorter than `short_run` bytes, or it is one run."""
    dim = run_dim(box, stored.shape)
    while True:
        outer = [length for length in box.shape[:dim] if length > 1]
        run = stored.dtype.itemsize * torch.Size(box.shape[dim:]).numel()
        if not outer or run >= short_run:
            return box
        box = Box(
            start=(*box.start[:dim], 0, *box.start[dim + 1 :]),
            shape=(*box.shape[:dim], stored.shape[dim], *box.shape[dim + 1 :]),
        )
        dim -= 1


def _read_run(descriptor: int, memory: memoryview, offset: int, stored: StoredTensor) -> None:
    while memory:
        try:
            count = os.preadv(descriptor, [memory], offset)
        except OSError as error:
            raise CheckpointError(f"{stored.path} cannot be read at byte {offset}: {error.strerror}") from error
        if count == 0:
            raise CheckpointError(
                f"{stored.path} ends at byte {os.fstat(descriptor).st_size}, and {stored.name} has byte {offset}: it "
                "was cut off after it was opened"
            )
        memory = memory[count:]
        offset += count


def _bytes_of(tensor: Tensor) -> Tensor:
    # view(-1) first: a scalar cannot be viewed as another dtype.
    return tensor.view(-1).view(torch.uint8)


def _read_converted(files: WeightFiles, table: ParameterTable, target: Tensor, threads: int | None) -> int:
    """A parameter that no table of boxes can express: made whole, and this rank's part of it kept."""
    assert table.conversion is not None
    whole = {name: read_whole(files, name, threads=threads) for name in table.conversion.stored}
    value = table.conversion.convert(whole)
    assert tuple(value.shape) == table.shape, f"{table.name}: converted to {tuple(value.shape)}, not {table.shape}"
    local = local_tensor(target)
    for box in local_boxes(target):
        local[box.local.slices].copy_(value[box.full.slices])
    return sum(tensor.nbytes for tensor in whole.values())

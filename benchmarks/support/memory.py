"""What a process holds and has read, from /proc (Linux), with the peak between two moments."""

import ctypes
import gc
import threading
import time
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MIB = 1 << 20


def status_bytes(field: str) -> int:
    """A field of /proc/self/status that counts kB: RssAnon, RssFile, RssShmem, VmHWM, VmLck, VmPin."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise KeyError(field)


def anonymous_bytes() -> int:
    """RssAnon: memory of this process that no file stands behind. Mapped pages of weight files are not in it."""
    return status_bytes("RssAnon")


def io_bytes(field: str) -> int:
    """`rchar` or `wchar` of /proc/self/io: bytes through read and write calls. Mapped files are not in it."""
    with open("/proc/self/io", encoding="ascii") as file:
        return {key: int(value) for key, value in (line.split(": ") for line in file.read().splitlines())}[field]


def reset_high_water_mark() -> None:
    """VmHWM counts from now on."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def settle() -> None:
    """Give back what nobody uses: garbage, and what the C library keeps of freed memory."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


class PeakSampler:
    """Highest RssAnon between entering and leaving, read every `interval` seconds by a thread. It sees RssAnon only:
    the kernel's own high-water mark (VmHWM) counts pages of files too."""

    def __init__(self, interval: float = 0.01) -> None:
        self.peak = 0
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            self.peak = max(self.peak, anonymous_bytes())

    def __enter__(self) -> "PeakSampler":
        self.peak = anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; a plain tensor as it is."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages behind this rank's parts, each storage once."""
    storages = {part.data_ptr(): part for part in (local(t).untyped_storage() for t in tensors) if part.nbytes()}
    return sum(storage.nbytes() for storage in storages.values())


def module_bytes(module: nn.Module) -> int:
    """Bytes of this rank's parameters and buffers."""
    return storage_bytes([*module.parameters(), *module.buffers()])


def bits_by_name(module: nn.Module) -> dict[str, int]:
    """For every parameter the sum of its elements read as integers: exact, so independent of how it is cut."""
    sums: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        flat = local(parameter).reshape(-1)
        flat = flat.view({4: torch.int32, 2: torch.int16}[flat.element_size()])
        sums[name] = int(sum(int(part.sum(dtype=torch.int64)) for part in flat.split(1 << 20)))
    return sums


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        """So far."""
        return time.perf_counter() - self._begin

"""safetensors files, written and read one tensor at a time.

The library's own `save_file` wants every tensor at once, as contiguous host memory that nothing shares: for moments
that live on a GPU or on file pages that is a second copy of all of them. The format is small: 8 bytes little-endian
length of the header, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes. Reading is the library's.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from plimsoll.errors import CheckpointError
from plimsoll.weights.host_bytes import host_bytes

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
"""torch's dtype for a dtype of the format."""

_ALIGNMENT = 8  # of the data's start, so that readers can map any dtype


@dataclass(slots=True, kw_only=True, frozen=True)
class TensorSpec:
    """A tensor that is asked for only when its bytes are written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]  # any device, any strides; of this dtype and shape

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def in_dtype(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    """The same tensor in another floating-point dtype; integers and booleans (masks, index buffers) stay."""
    if not spec.dtype.is_floating_point or spec.dtype == dtype:
        return spec
    return replace(spec, dtype=dtype, read=lambda: spec.read().to(dtype))


class Described(Protocol):
    """What the header says about a tensor."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...


D = TypeVar("D", bound=Described)


def header_of(tensors: Iterable[D]) -> tuple[bytes, list[tuple[D, int]], int]:
    """What stands before the bytes of the tensors; each tensor, in file order, with the offset of its first byte from
    the start of the file; the size of the file."""
    # Widest dtype first: every tensor then starts at a multiple of its own item size.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file that does not say so
    offset = 0
    offsets: list[int] = []
    for tensor in ordered:
        assert tensor.name not in header, f"two tensors named {tensor.name}"
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offsets.append(offset)
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    data = 8 + len(text)
    placed = [(tensor, data + start) for tensor, start in zip(ordered, offsets, strict=True)]
    return len(text).to_bytes(8, "little") + text, placed, data + offset


def cut_by_size(tensors: Iterable[D], max_file_bytes: float) -> list[list[D]]:
    """Tensors, in the order given, in files of at most so many bytes; a larger one has a file of its own."""
    files: list[list[D]] = [[]]
    used = 0
    for tensor in tensors:
        if files[-1] and used + tensor.num_bytes > max_file_bytes:
            files.append([])
            used = 0
        files[-1].append(tensor)
        used += tensor.num_bytes
    return files


def file_names(stem: str, count: int) -> list[str]:
    """stem.safetensors, or of several stem-0000i-of-0000n.safetensors."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def index_name(stem: str = "model") -> str:
    """Name of the file that `index_text` belongs into."""
    return f"{stem}.safetensors.index.json"


def index_text(files: Mapping[str, Iterable[Described]]) -> str:
    """The index of several files as JSON text: which tensor is in which file. `files`: by name, what they hold."""
    file_of = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    total = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
    return json.dumps(index, indent=2) + "\n"


def write_specs(path: Path, specs: Sequence[TensorSpec]) -> int:
    """Write a safetensors file; at most one tensor of `specs` is held at a time. Returns its size in bytes."""
    header, placed, num_bytes = header_of(specs)
    with path.open("wb") as file:
        file.write(header)
        for spec, _ in placed:
            _write_bytes(file, spec)
    return num_bytes


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write plain (not sharded) tensors by name. Tensors that share memory are written each in full."""
    specs = [
        TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), read=tensor.detach)
        for name, tensor in tensors.items()
    ]
    return write_specs(path, specs)


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of safetensors files, by name. Each is read when it is asked for, and not kept.

    What comes back may be a view of the mapped file: copy it before the file is overwritten in place.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        # Any: safetensors' reader comes without types.
        self._files: list[Any] = [safe_open(path, framework="pt", device="cpu") for path in paths]
        self._file_of: dict[str, int] = {}
        for index, file in enumerate(self._files):
            self._file_of.update(dict.fromkeys(file.keys(), index))

    def __getitem__(self, name: str) -> Tensor:
        return self._files[self._file_of[name]].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def spec(self, name: str) -> TensorSpec:
        """Name, dtype and shape without reading the bytes."""
        part: Any = self._files[self._file_of[name]].get_slice(name)
        return TensorSpec(
            name=name,
            dtype=DTYPES[part.get_dtype()],
            shape=tuple(part.get_shape()),
            read=lambda: self[name],
        )


def check_whole(path: Path) -> None:
    """Raise CheckpointError when the file is not as long as its header says: a download that broke off, say."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: Any = json.loads(file.read(length)) if 8 + length <= size else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file ({error})") from error
    whole = 8 + length + max(ends, default=0)
    if size != whole:
        raise CheckpointError(f"{path} has {size} bytes, and its header speaks of {whole}: it is cut off or damaged")


def _write_bytes(file: BinaryIO, spec: TensorSpec) -> None:
    tensor = spec.read()
    assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), f"{spec.name} is not what was announced"
    assert type(tensor) is Tensor or type(tensor) is torch.nn.Parameter, f"{spec.name} is a {type(tensor).__name__}"
    if tensor.numel() == 0:
        return
    here = tensor.detach().cpu().contiguous()
    file.write(host_bytes(here))

"""Bytes of files into tensors, against the tensors that were saved."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.box import Box
from plimsoll.weights.files import WeightFiles
from plimsoll.weights.layout import Transfer
from plimsoll.weights.pieces import Conversion, ParameterTable, Piece, identity_table
from plimsoll.weights.read import Source, _chunks, read_parameters, read_transfers, read_whole
from plimsoll.weights.ring import StagingRing

STORED = {
    "wide": torch.randn(40, 6000),
    "tall": torch.randn(3000, 7).to(torch.bfloat16),
    "cube": torch.randn(5, 6, 7).to(torch.float16),
    "scalar": torch.tensor(2.5),
    "steps": torch.arange(11),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
}
SOURCES: tuple[Source, ...] = ("ring", "map")


@pytest.fixture
def files(tmp_path: Path) -> Iterator[WeightFiles]:
    save_file({name: tensor for name, tensor in STORED.items() if name != "cube"}, tmp_path / "a.safetensors")
    save_file({"cube": STORED["cube"]}, tmp_path / "b.safetensors")
    with WeightFiles(tmp_path) as opened:
        yield opened


@pytest.fixture
def ring() -> Iterator[StagingRing]:
    """Small, so that everything is cut: 1000 elements of fp32."""
    made = StagingRing(buffer_bytes=4000, num_buffers=2)
    yield made
    made.close()


def identity(names: dict[str, Tensor]) -> dict[str, ParameterTable]:
    return {name: identity_table(name, tuple(tensor.shape)) for name, tensor in names.items()}


def garbage(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(like.shape, 1, dtype=dtype or like.dtype)


@pytest.mark.parametrize("source", SOURCES)
def test_tensors_come_as_they_were_saved_and_take_no_buffer(
    files: WeightFiles, ring: StagingRing, source: Source
) -> None:
    targets = {name: garbage(tensor) for name, tensor in STORED.items()}
    num_bytes = read_parameters(files, identity(STORED), targets, ring=ring, source=source)
    for name, tensor in STORED.items():
        assert torch.equal(targets[name], tensor), name
    assert num_bytes == sum(tensor.nbytes for tensor in STORED.values())
    assert ring.num_bytes_made == 0


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_floats_are_cast_on_the_way_as_torch_casts_them(
    files: WeightFiles, ring: StagingRing, source: Source, dtype: torch.dtype
) -> None:
    names = ("wide", "tall", "cube", "scalar")
    targets = {name: garbage(STORED[name], dtype) for name in names}
    read_parameters(files, identity(targets), targets, ring=ring, source=source)
    for name in names:
        assert torch.equal(targets[name], STORED[name].to(dtype)), name


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "box",
    [
        Box(start=(0, 100), shape=(40, 1500)),  # runs of 6000 bytes: longer than a buffer
        Box(start=(7, 3), shape=(30, 5)),  # runs of 20 bytes
        Box(start=(39, 5999), shape=(1, 1)),
    ],
)
def test_a_block_of_columns_goes_to_a_block_of_the_target_and_nowhere_else(
    files: WeightFiles, ring: StagingRing, box: Box, dtype: torch.dtype, source: Source
) -> None:
    target = torch.full((50, 6010), 1, dtype=dtype)
    target_box = Box(start=(10, 2), shape=box.shape)
    piece = Piece(stored="wide", stored_box=box, target_box=box, dims=(0, 1))
    wanted = Transfer(stored=files.tensors["wide"], stored_box=box, piece=piece, target=target, target_box=target_box)
    read_transfers(files, [wanted], ring=ring, source=source)
    expected = torch.full_like(target, 1)
    expected[target_box.slices] = STORED["wide"][box.slices].to(dtype)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_runs_of_one_read_follow_one_another(files: WeightFiles, dtype: torch.dtype, source: Source) -> None:
    box = Box(start=(3, 1000), shape=(30, 2000))
    target = torch.zeros(box.shape, dtype=dtype)
    piece = Piece(stored="wide", stored_box=box, target_box=Box.whole(box.shape), dims=(0, 1))
    wanted = Transfer(
        stored=files.tensors["wide"], stored_box=box, piece=piece, target=target, target_box=piece.target_box
    )
    read_transfers(files, [wanted], source=source)
    assert torch.equal(target, STORED["wide"][box.slices].to(dtype))


@pytest.mark.parametrize("source", SOURCES)
def test_transposed_and_turned_pieces(files: WeightFiles, ring: StagingRing, source: Source) -> None:
    turned = Piece(stored="cube", stored_box=Box.whole((5, 6, 7)), target_box=Box.whole((7, 5, 6)), dims=(2, 0, 1))
    transposed = Piece(
        stored="tall",
        stored_box=Box.whole((3000, 7)),
        target_box=Box(start=(1, 0, 0), shape=(1, 7, 3000)),
        dims=(None, 1, 0),
    )
    upper = Piece(
        stored="tall",
        stored_box=Box.whole((3000, 7)),
        target_box=Box(start=(0, 0, 0), shape=(1, 7, 3000)),
        dims=(None, 1, 0),
    )
    tables = {
        "turned": ParameterTable(name="turned", aliases=(), shape=(7, 5, 6), pieces=(turned,)),
        "stacked": ParameterTable(name="stacked", aliases=(), shape=(2, 7, 3000), pieces=(upper, transposed)),
    }
    targets = {"turned": torch.zeros(7, 5, 6, dtype=torch.float16), "stacked": torch.zeros(2, 7, 3000)}
    read_parameters(files, tables, targets, ring=ring, source=source)
    assert torch.equal(targets["turned"], STORED["cube"].permute(2, 0, 1))
    assert torch.equal(targets["stacked"], STORED["tall"].float().t().expand(2, 7, 3000))


@pytest.mark.parametrize("source", SOURCES)
def test_a_tensor_at_an_odd_address_is_read(tmp_path: Path, source: Source) -> None:
    header = b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    assert (8 + len(header)) % 4
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + struct.pack("<3f", 1, 2, 3))
    for dtype in (torch.float32, torch.bfloat16):
        target = torch.zeros(3, dtype=dtype)
        with WeightFiles([path]) as files:
            read_parameters(files, {"a": identity_table("a", (3,))}, {"a": target}, source=source)
        assert target.tolist() == [1, 2, 3]


def test_a_target_that_is_not_contiguous(files: WeightFiles, ring: StagingRing) -> None:
    memory = torch.zeros(6000, 80)
    read_parameters(files, identity(STORED), {"wide": memory.t()[::2]}, ring=ring)
    assert torch.equal(memory.t()[::2], STORED["wide"])
    assert memory.t()[1::2].eq(0).all()


def test_tensors_of_inference_mode_are_filled_in_it(files: WeightFiles, ring: StagingRing) -> None:
    with torch.inference_mode():
        target = torch.zeros(40, 6000, dtype=torch.float16)
        read_parameters(files, identity(STORED), {"wide": target}, ring=ring)
        assert torch.equal(target, STORED["wide"].half())


def test_only_floats_are_cast(files: WeightFiles) -> None:
    targets = {"steps": torch.zeros(11), "flags": torch.zeros(3), "tall": torch.zeros(3000, 7)}
    with pytest.raises(RefusedError) as error:
        read_parameters(files, identity(targets), targets)
    assert [cause.split()[0] for cause in error.value.causes] == ["flags", "steps"]
    assert targets["tall"].eq(0).all(), "refused before anything was read"


def test_only_what_needs_no_staging_is_copied_in_larger_parts_than_a_buffer(files: WeightFiles) -> None:
    """Half the columns of a tensor are read with the other half where rows are short, and staged."""

    def largest(box: Box, short_run: int) -> int:
        whole = Box.whole(box.shape)
        piece = Piece(stored="wide", stored_box=box, target_box=whole, dims=(0, 1))
        wanted = Transfer(
            stored=files.tensors["wide"], stored_box=box, piece=piece, target=torch.empty(box.shape), target_box=whole
        )
        return max(chunk.num_bytes for chunk in _chunks([wanted], 48_000, short_run, 10**9))

    half = Box(start=(0, 0), shape=(40, 3000))
    assert largest(half, short_run=1) == 40 * 3000 * 4
    assert largest(half, short_run=64 * 1024) == 48_000
    assert largest(Box.whole((40, 6000)), short_run=64 * 1024) == 40 * 6000 * 4


def test_a_conversion_gets_the_stored_tensors_whole(files: WeightFiles) -> None:
    table = ParameterTable(
        name="sum",
        aliases=(),
        shape=(40, 6000),
        pieces=(),
        conversion=Conversion(stored=("wide", "scalar"), convert=lambda found: found["wide"] + found["scalar"]),
    )
    target = torch.zeros(40, 6000, dtype=torch.bfloat16)
    num_bytes = read_parameters(files, {"sum": table}, {"sum": target})
    assert torch.equal(target, (STORED["wide"] + 2.5).to(torch.bfloat16))
    assert num_bytes == STORED["wide"].nbytes + 4
    assert torch.equal(read_whole(files, "tall"), STORED["tall"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_that_was_cut_off_after_it_was_opened_is_an_error_with_name_and_place(
    files: WeightFiles, ring: StagingRing, dtype: torch.dtype
) -> None:
    stored = files.tensors["wide"]
    os.truncate(stored.path, stored.offset + 5000)
    target = torch.zeros(40, 6000, dtype=dtype)
    with pytest.raises(CheckpointError, match=f"ends at byte {stored.offset + 5000},") as error:
        read_parameters(files, identity(STORED), {"wide": target}, ring=ring)
    assert str(stored.path) in str(error.value)
    with ring.buffer(), ring.buffer():
        pass  # none was lost


def test_a_file_that_was_cut_off_is_an_error_before_its_map_is_touched(files: WeightFiles) -> None:
    os.truncate(files.tensors["wide"].path, 0)
    target = garbage(STORED["wide"])
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):  # a page that is gone would end the process
        read_parameters(files, identity({"wide": target}), {"wide": target}, source="map")
    assert bool(target.eq(1).all())


def test_a_file_that_cannot_be_read_is_an_error(files: WeightFiles) -> None:
    os.close(files.descriptor(files.tensors["cube"].path))
    replacement = os.open(files.tensors["cube"].path, os.O_WRONLY)
    assert replacement == files.descriptor(files.tensors["cube"].path)
    with pytest.raises(CheckpointError, match="cannot be read at byte"):
        read_parameters(files, identity(STORED), {"cube": torch.zeros(5, 6, 7)})

"""Files written by ranges, against the library's own reader."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from plimsoll.errors import CheckpointError
from plimsoll.weights.box import Box
from plimsoll.weights.pieces import Piece
from plimsoll.weights.tensors import check_whole
from plimsoll.weights.write import (
    FileLayout,
    Outgoing,
    ShardWriter,
    create_files,
    lay_out,
    reserve_space,
    whole,
    write_all,
)

ROOT = Path(__file__).parents[3]
MIB = 2**20


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def samples() -> dict[str, Tensor]:
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    return {
        "bfloat16": torch.randn(3, 5).to(torch.bfloat16),
        "float16": torch.randn(7).to(torch.float16),
        "float32": base,
        "transposed": base.t(),
        "strided": base[::2, 1:3],
        "float64": torch.tensor([float("nan"), float("-inf"), -0.0, 5e-324], dtype=torch.float64),
        "scalar": torch.tensor(17.0),
        "int64": torch.tensor([[-(2**63), 2**63 - 1]]),
        "bool": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }


def write(folder: Path, layouts: tuple[FileLayout, ...], *, ranks: int = 1, budget: int = 64 * MIB) -> list[int]:
    """As that many ranks would, one after the other; the bytes of each."""
    create_files(folder, layouts)
    written: list[int] = []
    for rank in range(ranks):
        writer = ShardWriter(folder, layouts, rank=rank, ranks=ranks, budget_bytes=budget, threads=2)
        writer.run()
        writer.check()
        assert writer.tensors_read.is_set()
        written.append(writer.num_bytes)
    return written


@pytest.mark.parametrize("budget", [64 * MIB, 64])  # 64 bytes: every tensor is cut
def test_the_library_reads_what_it_would_have_written_itself(budget: int, tmp_path: Path) -> None:
    tensors = samples()
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")

    write(tmp_path, lay_out([whole(name, tensor) for name, tensor in tensors.items()]), budget=budget)

    same(load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "theirs"))
    check_whole(tmp_path / "model.safetensors")


def test_several_files_have_an_index_and_keep_the_limit(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.randn(4, 8) for i in range(7)}  # 128 bytes each
    layouts = lay_out([whole(name, tensor) for name, tensor in tensors.items()], stem="part", max_file_bytes=300)

    paths = create_files(tmp_path, layouts)
    write(tmp_path, layouts)

    names = [f"part-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    assert [path.name for path in paths] == [*names, "part.safetensors.index.json"]
    index = json.loads(paths[-1].read_text())
    assert index["metadata"] == {"total_size": 7 * 128}
    found: dict[str, Tensor] = {}
    for name in names:
        loaded = load_file(tmp_path / name)
        assert sum(tensor.nbytes for tensor in loaded.values()) <= 300
        assert {key for key, file in index["weight_map"].items() if file == name} == loaded.keys()
        found |= loaded
    same(found, tensors)


def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own() -> None:
    sizes = {"a": 1, "b": 100, "c": 1, "d": 1}
    layouts = lay_out([whole(name, torch.empty(size)) for name, size in sizes.items()], max_file_bytes=8)
    assert [[placed.outgoing.name for placed in layout.tensors] for layout in layouts] == [["a"], ["b"], ["c", "d"]]


def test_every_tensor_starts_at_a_multiple_of_its_item_size_and_none_overlap() -> None:
    (layout,) = lay_out([whole(name, tensor) for name, tensor in samples().items()])
    end = len(layout.header)
    for placed in layout.tensors:
        assert placed.offset == end
        assert placed.offset % placed.outgoing.dtype.itemsize == 0
        end += placed.outgoing.num_bytes
    assert end == layout.num_bytes


def test_the_layout_does_not_depend_on_the_tensors_in_memory() -> None:
    first = lay_out([whole(name, tensor) for name, tensor in samples().items()])
    second = lay_out([whole(name, torch.zeros_like(tensor)) for name, tensor in samples().items()])
    assert [(layout.name, layout.header) for layout in first] == [(layout.name, layout.header) for layout in second]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_floats_are_cast_as_torch_casts_them(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randn(33, 17)
    write(tmp_path, lay_out([whole("a", tensor, dtype), whole("b", tensor.t(), dtype)]), budget=512)
    same(load_file(tmp_path / "model.safetensors"), {"a": tensor.to(dtype), "b": tensor.t().to(dtype)})


@pytest.mark.parametrize("budget", [64 * MIB, 64])
def test_stacked_experts_become_matrices_again(budget: int, tmp_path: Path) -> None:
    experts, inner, hidden = 3, 4, 5
    stacked = torch.randn(experts, 2 * inner, hidden)
    outgoing: list[Outgoing] = []
    expected: dict[str, Tensor] = {}
    for expert in range(experts):
        for half, word in enumerate(("gate", "up")):
            piece = Piece(
                stored=f"{expert}.{word}",
                stored_box=Box.whole((inner, hidden)),
                target_box=Box(start=(expert, half * inner, 0), shape=(1, inner, hidden)),
                dims=(None, 0, 1),
            )
            parts = ((piece, stacked),)
            outgoing.append(Outgoing(name=piece.stored, dtype=torch.float32, shape=(inner, hidden), parts=parts))
            expected[piece.stored] = stacked[expert, half * inner : (half + 1) * inner]
    write(tmp_path, lay_out(outgoing), budget=budget)
    same(load_file(tmp_path / "model.safetensors"), expected)


def test_a_transposed_piece_and_parameters_side_by_side(tmp_path: Path) -> None:
    """One stored matrix of a transposed parameter; one stored tensor of two parameters."""
    turned, left, right = torch.randn(6, 4), torch.randn(3, 2), torch.randn(3, 5)
    box = Box.whole((4, 6))
    piece = Piece(stored="turned", stored_box=box, target_box=Box.whole((6, 4)), dims=(1, 0))
    beside = tuple(
        (
            Piece(
                stored="both", stored_box=Box(start=(0, at), shape=(3, n)), target_box=Box.whole((3, n)), dims=(0, 1)
            ),
            t,
        )
        for at, n, t in ((0, 2, left), (2, 5, right))
    )
    outgoing = [
        Outgoing(name="turned", dtype=torch.float32, shape=(4, 6), parts=((piece, turned),)),
        Outgoing(name="both", dtype=torch.float32, shape=(3, 7), parts=beside),
    ]
    write(tmp_path, lay_out(outgoing), budget=96)
    expected = {"turned": turned.t(), "both": torch.cat([left, right], 1)}
    same(load_file(tmp_path / "model.safetensors"), expected)


def test_parts_that_do_not_cover_a_tensor_are_our_mistake() -> None:
    (part,) = whole("a", torch.ones(4)).parts
    with pytest.raises(AssertionError, match="parts of 4 elements"):
        lay_out([Outgoing(name="a", dtype=torch.float32, shape=(5,), parts=(part,))])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_that_hold_the_same_tensors_share_the_bytes(ranks: int, tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.randn(16, 8) for i in range(6)}
    layouts = lay_out([whole(name, tensor) for name, tensor in tensors.items()])
    written = write(tmp_path, layouts, ranks=ranks, budget=256)
    assert sum(written) == 6 * 512
    assert max(written) - min(written) <= 6 * 128  # a chunk of each tensor at most
    same(load_file(tmp_path / "model.safetensors"), tensors)


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        write_all(file.fileno(), memoryview(b"0123456789"), 2, pwrite=lambda fd, data, at: os.pwrite(fd, data[:3], at))
    assert (tmp_path / "file").read_bytes() == b"\0\0" + b"0123456789"
    with pytest.raises(OSError, match="zero bytes"):
        write_all(0, memoryview(b"x"), 0, pwrite=lambda fd, data, at: 0)


def test_a_file_that_the_disk_cannot_hold_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError) as caught:  # noqa: PT011
        reserve_space(file.fileno(), 2**55)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert (tmp_path / "file").stat().st_blocks == 0


def test_tensors_may_change_once_they_are_read_while_the_disk_is_still_busy(tmp_path: Path) -> None:
    tensors = {"cast": torch.randn(64, 64), "whole": torch.randn(64, 64)}
    layouts = lay_out([whole("cast", tensors["cast"], torch.bfloat16), whole("whole", tensors["whole"])])
    expected = {"cast": tensors["cast"].to(torch.bfloat16), "whole": tensors["whole"].clone()}
    create_files(tmp_path, layouts)
    disk = threading.Event()

    def sync(descriptor: int) -> None:
        assert disk.wait(60)
        os.fsync(descriptor)

    writer = ShardWriter(tmp_path, layouts, budget_bytes=4096, sync=sync)
    thread = threading.Thread(target=writer.run)
    thread.start()
    try:
        assert writer.tensors_read.wait(60)
        assert thread.is_alive()
        for tensor in tensors.values():
            tensor.zero_()
    finally:
        disk.set()
        thread.join()
    writer.check()
    same(load_file(tmp_path / "model.safetensors"), expected)


def test_a_failure_in_a_thread_is_kept_for_later(tmp_path: Path) -> None:
    layouts = lay_out([whole("a", torch.ones(4))])
    writer = ShardWriter(tmp_path / "absent", layouts)
    thread = threading.Thread(target=writer.run)
    thread.start()
    thread.join()
    assert writer.tensors_read.is_set()  # nobody waits for ever
    with pytest.raises(FileNotFoundError):
        writer.check()


def test_a_writer_that_was_stopped_says_so(tmp_path: Path) -> None:
    layouts = lay_out([whole("a", torch.ones(4))])
    create_files(tmp_path, layouts)
    writer = ShardWriter(tmp_path, layouts)
    writer.stop()
    writer.run()
    assert writer.tensors_read.is_set()
    with pytest.raises(CheckpointError, match="stopped"):
        writer.check()


def peak_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def measure(folder: Path, budget: int, dtype: torch.dtype) -> None:
    """In a process of its own: write 256 MiB of float32, print the growth of the high-water mark of its memory."""
    tensor = torch.randn(8192, 8192)
    (folder / "warm").mkdir()
    write(folder / "warm", lay_out([whole("warm", torch.ones(8, 8), torch.float16)]), budget=budget)
    layouts = lay_out([whole("a", tensor, dtype)])
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what is resident now
    before = peak_bytes()
    write(folder, layouts, budget=budget)
    print(json.dumps(peak_bytes() - before))
    assert torch.equal(load_file(folder / "model.safetensors")["a"], tensor.to(dtype))


@pytest.mark.parametrize(
    ("budget", "dtype", "least", "most"),
    [(32, "bfloat16", 0, 56), (32, "float64", 0, 56), (32, "float32", 0, 24), (1024, "float64", 256, 1024)],
    ids=["cast", "cast to more", "as it is", "without a bound to speak of"],
)
def test_memory_stays_within_the_budget(budget: int, dtype: str, least: int, most: int, tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from tests.unit.weights.test_write import measure; "
        f"torch.set_num_threads(1); measure(Path(sys.argv[1]), {budget} << 20, torch.{dtype})"
    )
    environment = os.environ | {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(MIB),
        "MALLOC_TRIM_THRESHOLD_": str(MIB),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert least * MIB <= json.loads(done.stdout) <= most * MIB

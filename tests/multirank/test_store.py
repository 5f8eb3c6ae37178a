"""Two ranks save in one folder: who does what, and what a failure on one of them leaves."""

import errno
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from plimsoll.checkpoint import store as store_module
from plimsoll.checkpoint.saving import TrainingSaver
from plimsoll.checkpoint.store import CheckpointStore
from plimsoll.errors import CheckpointError
from plimsoll.weights.control import ControlGroup
from plimsoll.weights.file_layout import lay_out, whole
from plimsoll.weights.write import ShardWriter, create_files
from tests.ranks import run_ranks
from tests.unit.checkpoint.states import training_state

pytestmark = pytest.mark.timeout(240)

MIB = 1024**2
STATE_BYTES, BUDGET = 256 * MIB, 32 * MIB


def writes(rank: int, text: str = "x", *, ranks: tuple[int, ...] = (0, 1)) -> Callable[[Path], None]:
    """A file of each of these ranks."""

    def write(folder: Path) -> None:
        if rank in ranks:
            (folder / f"rank_{rank}.bin").write_text(text)

    return write


def fails(rank: int, who: int, error: BaseException) -> Callable[[Path], None]:
    """The second file of rank `who` cannot be written."""

    def write(folder: Path) -> None:
        (folder / f"a_{rank}.bin").write_text("half")
        if rank == who:
            raise error

    return write


def failure(work: Callable[[], object]) -> tuple[str, str]:
    try:
        work()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""


def contents(folder: Path) -> dict[str, list[str]]:
    return {path.name: sorted(file.name for file in path.iterdir()) for path in sorted(folder.iterdir())}


def agree(store: CheckpointStore, rank: int) -> dict[str, Any]:
    """Good saves, and failures in between."""
    found: dict[str, Any] = {}
    hashed: list[str] = []
    original = store_module.hash_files

    def spy(folder: Path, names: Any) -> Any:
        hashed.extend(names)
        return original(folder, names)

    store_module.hash_files = spy  # pyright: ignore[reportPrivateImportUsage]
    store.save(2, writes(rank, "two"))
    store_module.hash_files = original
    found["hashed"] = hashed
    found["manifest"] = json.loads((store.path_of(2) / "manifest.json").read_text())
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for who in (0, 1):
        found[f"full on {who}"] = failure(lambda who=who: store.save(4, fails(rank, who, full)))
        found[f"after full on {who}"] = contents(store.folder)
    found["interrupt"] = failure(lambda: store.save(4, fails(rank, 1, KeyboardInterrupt())))
    found["complete"] = failure(lambda: store.save(2, writes(rank)))
    found["shortage"] = failure(lambda: store.save(4, writes(rank), estimate_bytes=1 << 60))
    found["newest"] = store.newest().step
    store.save(6, writes(rank, "six"))
    found["after six"] = contents(store.folder)
    return found


def slow(store: CheckpointStore, rank: int) -> None:
    def write(folder: Path) -> None:
        if rank == 1:
            time.sleep(4)  # twice the time-out of the training group
        writes(rank)(folder)

    store.save(8, write)


def stays_within_the_budget(store: CheckpointStore, rank: int, ranks: int) -> dict[str, int]:
    """Growth of the high-water mark while 256 MiB a rank are written: as they are, and cast."""
    mesh = init_device_mesh("cpu", (ranks,))
    local = torch.randn(8192, STATE_BYTES // 8192 // 4)
    tensor = distribute_tensor(torch.empty(ranks * 8192, local.shape[1], device="meta"), mesh, [Shard(0)])
    sharded = type(tensor).from_local(local, mesh, [Shard(0)])
    growth: dict[str, int] = {}
    for step, dtype in ((10, torch.float32), (11, torch.float64)):
        layouts = lay_out([whole("w", sharded, dtype)])

        def prepare(folder: Path, layouts: Any = layouts) -> ShardWriter:
            if rank == 0:
                create_files(folder / "model", layouts)
            return ShardWriter(folder / "model", layouts, rank=rank, ranks=ranks, budget_bytes=BUDGET)

        saver = TrainingSaver(store)
        Path("/proc/self/clear_refs").write_text("5")  # the mark starts anew
        before = high_water()
        saver.save(training_state(step=step), prepare, background=False)
        growth[str(dtype)] = high_water() - before
    return growth


def high_water() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def fails_alone(store: CheckpointStore, rank: int, ranks: int) -> dict[str, Any]:
    """A save in the background while one rank fails for another reason, and the other never comes."""
    weights = {"w": torch.arange(8.0)}
    saver = TrainingSaver(store)

    def prepare(layouts: Any) -> Callable[[Path], ShardWriter]:
        def make(folder: Path) -> ShardWriter:
            if rank == 0:
                create_files(folder / "model", layouts)
            return ShardWriter(folder / "model", layouts, rank=rank, ranks=ranks)

        return make

    layouts = lay_out([whole(name, tensor) for name, tensor in weights.items()])
    saver.save(training_state(step=20), prepare(layouts), background=True)
    found: dict[str, Any] = {"both": saver.salvage(timedelta(seconds=60)), "newest": store.newest().step}
    odd = lay_out([whole("other" if rank else "w", weights["w"])])
    found["unlike"] = failure(lambda: saver.save(training_state(step=22), prepare(odd), background=True))
    saver.save(training_state(step=24), prepare(layouts), background=True)
    if rank == 0:
        found["alone"] = saver.salvage(timedelta(seconds=1))
    else:
        saver.abort()  # as an interrupt does
    return found


def run_pair(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    store = CheckpointStore(folder / "checkpoints", keep=1, control=ControlGroup())
    found = agree(store, rank)
    slow(store, rank)
    found["after slow"] = contents(store.folder)
    found["growth"] = stays_within_the_budget(store, rank, ranks)
    together = ControlGroup()
    last = CheckpointStore(folder / "last", keep=1, control=ControlGroup())
    found["failed"] = fails_alone(last, rank, ranks)
    together.barrier()
    found["after failing alone"] = contents(last.folder)
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("store")
    return run_ranks(run_pair, 2, folder / "ranks", folder, group_timeout=timedelta(seconds=2))


def test_both_ranks_write_and_hash_and_the_first_publishes(pair: list[dict[str, Any]]) -> None:
    assert [found["hashed"] for found in pair] == [["rank_0.bin"], ["rank_1.bin"]]
    for found in pair:
        files = found["manifest"]["files"]
        assert set(files) == {"rank_0.bin", "rank_1.bin"}
        assert len({entry["sha256"] for entry in files.values()}) == 1  # both say "two"


@pytest.mark.parametrize("who", [0, 1])
def test_a_full_disk_on_either_rank_is_one_error_on_both(who: int, pair: list[dict[str, Any]]) -> None:
    first, second = (found[f"full on {who}"] for found in pair)
    assert first == second
    assert first[0] == CheckpointError.__name__
    for fact in ("step 4", "No space left on device", "step 2 is kept", "checkpoint.keep", "run_root"):
        assert fact in first[1]
    assert pair[0][f"after full on {who}"] == {"step_2": ["manifest.json", "rank_0.bin", "rank_1.bin"]}


def test_an_interrupt_stays_one_where_it_came_and_fails_the_save_elsewhere(pair: list[dict[str, Any]]) -> None:
    first, second = (found["interrupt"] for found in pair)
    assert first[0] == CheckpointError.__name__
    assert second[0] == "KeyboardInterrupt"


@pytest.mark.parametrize(("case", "said"), [("complete", "exists and is complete"), ("shortage", "are needed")])
def test_what_the_first_rank_refuses_is_refused_on_both(case: str, said: str, pair: list[dict[str, Any]]) -> None:
    first, second = (found[case] for found in pair)
    assert first == second
    assert first[0] == CheckpointError.__name__
    assert said in first[1]


def test_an_older_one_is_deleted_only_after_a_good_save(pair: list[dict[str, Any]]) -> None:
    assert [found["newest"] for found in pair] == [2, 2]
    assert pair[0]["after six"] == {"step_6": ["manifest.json", "rank_0.bin", "rank_1.bin"]}


def test_a_writer_may_be_slower_than_the_training_groups_timeout(pair: list[dict[str, Any]]) -> None:
    assert list(pair[0]["after slow"]) == ["step_8"]


def test_a_run_that_fails_on_all_ranks_publishes_and_on_one_alone_drops(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        assert "step 20" in found["failed"]["both"]
        assert found["failed"]["newest"] == 20
        assert list(found["after failing alone"]) == ["step_20"]
    assert "not every rank came" in pair[0]["failed"]["alone"]


def test_ranks_that_lay_out_different_files_publish_nothing(pair: list[dict[str, Any]]) -> None:
    first, second = (found["failed"]["unlike"] for found in pair)
    assert first == second
    assert first[0] == CheckpointError.__name__
    assert "different files" in first[1]


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float64"])
def test_a_save_of_256_mib_grows_the_high_water_mark_by_no_more_than_its_budget_and_slack(
    dtype: str, pair: list[dict[str, Any]]
) -> None:
    for found in pair:
        assert found["growth"][dtype] <= BUDGET + 64 * MIB

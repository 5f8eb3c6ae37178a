"""Several gloo ranks for a test: each is forked from a server that has imported what is heavy; it returns one object.

An interpreter of its own would import torch and transformers for seconds in every rank.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 100.0
"""Seconds that a group may take; every test that starts one has a pytest timeout above twice of it."""

MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
"""The C library keeps freed memory, in one arena a thread and above a threshold that grows: without these, the
high-water mark of a rank is that of its heaps. Read when a process starts, so they are the server's."""

PRELOADED = (
    "pytest",
    "tests.tiny",
    "tests.unit.update.support",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.auto.modeling_auto",
)


def run_ranks(
    work: Callable[..., Any], ranks: int, folder: Path, *args: Any, group_timeout: timedelta | None = None
) -> list[Any]:
    """`work(rank, ranks, *args)` in `ranks` new processes of one gloo group; the results in rank order.

    `work` must be importable and its result must go through torch.save. `folder` must be empty and of this call alone.
    An error in a rank is raised here with its traceback. The environment is that of the first call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _start_server()
    arguments = (ranks, folder, work, args, group_timeout)
    context = mp.start_processes(_rank, arguments, nprocs=ranks, join=False, start_method="forkserver")
    try:
        deadline = time.monotonic() + 2 * TIMEOUT
        # It returns whenever a rank has ended, and True only when the last of them has.
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"{ranks} ranks did not end within {2 * TIMEOUT} s"
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(ranks)]


@cache
def _start_server() -> None:
    """Once for all tests; it ends with them. It has no thread and no group, so a rank may be forked from it."""
    mp.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in MALLOC.items():
            patch.setenv(name, value)
        forkserver.ensure_running()


def _rank(
    rank: int, ranks: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...], timeout: timedelta | None
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    torch.save(work(rank, ranks, *args), folder / f"rank_{rank}.pt")
    # A rank that leaves early takes the connections of the others with it. In a group of its own: the default group's
    # time-out may be short on purpose.
    dist.barrier(group=dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT)))
    dist.destroy_process_group()

"""Several gloo ranks for a test: spawned once, each returns one object."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 100.0
"""Seconds that a group may take; every test that starts one has a pytest timeout above twice of it."""


def run_ranks(
    work: Callable[..., Any], ranks: int, folder: Path, *args: Any, group_timeout: timedelta | None = None
) -> list[Any]:
    """`work(rank, ranks, *args)` in `ranks` spawned processes of one gloo group; the results in rank order.

    `work` must be importable and its result must go through torch.save. `folder` must be empty and of this call alone.
    An error in a rank is raised here with its traceback.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = mp.spawn(_rank, args=(ranks, folder, work, args, group_timeout), nprocs=ranks, join=False)
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

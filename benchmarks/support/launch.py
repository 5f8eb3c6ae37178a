"""Fresh gloo ranks for every measurement, so that no way inherits the memory of another."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Result = TypeVar("Result")

MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
"""The C library keeps freed memory, in one arena a thread and above a threshold that grows. The same for every way, or
the figures would measure that."""

PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "transformers.modeling_utils",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


class Ranks:
    """Starts groups of ranks. One server imports what is heavy once, and every rank is forked from it: it has no thread
    and no group yet, and a rank's memory is counted from its own start."""

    def __init__(self, preload: tuple[str, ...] = ()) -> None:
        os.environ.update(MALLOC, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, *preload])

    def run(self, work: Callable[..., Result], ranks: int, *args: Any) -> list[Result]:
        """`work(*args)` in every rank of a new group, which it may close over; results by rank."""
        with TemporaryDirectory() as folder:
            pipes = [self._context.Pipe(duplex=False) for _ in range(ranks)]
            processes = [
                self._context.Process(target=_rank, args=(rank, ranks, Path(folder), sender, work, args))
                for rank, (_, sender) in enumerate(pipes)
            ]
            for process in processes:
                process.start()
            for _, sender in pipes:
                sender.close()
            try:
                results = _receive([receiver for receiver, _ in pipes])
                for process in processes:
                    process.join()
            finally:
                for process in processes:
                    process.kill()
                    process.join()
        return results


def _receive(receivers: list[Connection]) -> list[Any]:
    """One result of every rank, or the first failure: the other ranks may wait for that one for ever."""
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        for ready in wait([pipe for rank, pipe in enumerate(receivers) if rank not in results]):
            rank = next(rank for rank, pipe in enumerate(receivers) if pipe is ready)
            try:
                failure, results[rank] = receivers[rank].recv()
            except EOFError as error:
                raise RuntimeError(f"rank {rank} ended without a result") from error
            if failure:
                raise RuntimeError(f"rank {rank}:\n{failure}")
    return [results[rank] for rank in range(len(receivers))]


def _rank(
    rank: int, ranks: int, folder: Path, sender: Connection, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
        sender.send((None, work(*args)))
        dist.barrier()  # who leaves early takes the connections of the others along
        dist.destroy_process_group()
    except Exception:
        sender.send((traceback.format_exc(), None))


def make_mesh(name: str) -> DeviceMesh:
    """`plain`: all ranks shard. `hybrid`: two groups that hold the same shards. Its groups are connected."""
    ranks = dist.get_world_size()
    if name == "plain":
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    value = torch.ones(1)
    for group in [dist.group.WORLD, *mesh.get_all_groups()]:
        dist.all_reduce(value, group=group)
    return mesh

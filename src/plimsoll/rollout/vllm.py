"""vLLM in the trainer's process, on the trainer's device. The only file that imports it.

Pinned to one minor version: what is used here of its inside (the sleep pool's table, the layer-wise reload, what it has
for requests that are taken back) has no promise beyond it.

Never shut down: vLLM's shutdown destroys torch's process groups, the trainer's with them. It ends with the process.
"""

import logging
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from plimsoll.errors import RefusedError
from plimsoll.rollout.vllm_engine import Guard, VllmEngine, VllmParts
from plimsoll.rollout.vllm_memory import PoolCalls, SleepPool, blocks_of_segments
from plimsoll.rollout.vllm_settings import VllmSettings, engine_arguments, write_model_folder
from plimsoll.rollout.vllm_weights import LayerInfo, ReloadCalls, WeightReload
from plimsoll.types import EnginePart


class _EngineStream:
    """The one device and stream of the engine, current for the length of a call, in order with the caller's.

    Both belong to a thread, and calls come from several. Left alone, vLLM gives every thread that calls it a stream of
    its own for good, the trainer's included, whose cached memory no other stream can use.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def __call__(self) -> Generator[None]:
        with torch.cuda.device(self._device):
            caller = torch.cuda.current_stream()
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                yield
            caller.wait_stream(self._stream)


@contextmanager
def _unchanged_globals() -> Generator[None]:
    """vLLM seeds every generator of the process and sets torch's matmul precision: both are the trainer's."""
    state, numpy_state = random.getstate(), np.random.get_state()
    precision = torch.get_float32_matmul_precision()
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        torch.set_float32_matmul_precision(precision)


def build_vllm_engine(settings: VllmSettings, folder: Path, *, guard: Guard = nullcontext) -> VllmEngine:
    """Build the engine on the current CUDA device, awake, without weights. One a process.

    The variables of `cluster.engine_environment` must be set before the first import of vLLM. `folder` is written to
    and must stay. RefusedError when vLLM does not take the settings: the KV cache cannot hold one sequence, say.
    """
    import vllm  # pyright: ignore[reportMissingImports]  # an extra
    import vllm.utils.torch_utils  # pyright: ignore[reportMissingImports, reportUnusedImport]  # patches set_stream
    from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    # vLLM joins a process group that it finds; else it makes one for NCCL alone, without what we do on CPUs.
    assert torch.distributed.is_initialized(), "the trainer's process group comes before the engine"
    library = cast("Any", vllm)
    write_model_folder(folder, settings)
    device = torch.cuda.current_device()
    calls = _EngineStream(device)
    before = torch.cuda.memory_allocated()
    with guard(), calls(), _unchanged_globals():
        try:
            arguments = library.EngineArgs(**engine_arguments(settings, folder))
            llm = library.LLMEngine.from_engine_args(arguments)
        except (ValueError, NotImplementedError) as error:
            raise RefusedError(
                f"vLLM {library.__version__} does not take this run: {error}; change that setting, or set"
                " rollout.engine=native"
            ) from error
    # Another process's memory is no memory of ours, and its weights could not be written from here.
    assert "model_executor" in vars(llm), "VLLM_ENABLE_V1_MULTIPROCESSING=0 was not set before vLLM was imported"
    (worker,) = llm.collective_rpc(_itself)
    pool = SleepPool(_pool_calls())
    final_only = cast("Any", RequestOutputKind).FINAL_ONLY
    parts = VllmParts(
        llm=llm,
        core=llm.engine_core.engine_core,
        sampling_params=partial(library.SamplingParams, output_kind=final_only),
        prompt=cast("Callable[[list[int]], Any]", tokens_input),
        reload=WeightReload(worker.model_runner.get_model(), _reload_calls(llm.model_config)),
        pool=pool,
        dropped=lambda part: _dropped(worker, part),
        after_wake=lambda part: worker.model_runner.post_kv_cache_wake_up() if part == "kv_cache" else None,
        synchronize=torch.cuda.synchronize,
    )
    return VllmEngine(
        parts,
        slot_tokens=settings.slot_tokens,
        seeded=bool(llm.vllm_config.use_v2_model_runner),
        guard=guard,
        calls=calls,
        buffers_bytes=max(torch.cuda.memory_allocated() - before - pool.counted_bytes(), 0),
    )


def _itself(worker: Any) -> Any:
    return worker


def _pool_calls() -> PoolCalls:
    from vllm.device_allocator import cumem  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    module = cast("Any", cumem)
    allocator = module.CuMemAllocator.get_instance()

    def blocks(tag: str) -> list[tuple[int, int]]:
        segments: list[Mapping[str, Any]] = allocator.allocator_and_pools[tag][0].snapshot()
        known = {int(segment["address"]) for segment in segments}
        # A second pool under one tag replaces the first in vLLM's table: what is in no snapshot is kept whole.
        others = [
            (int(address), int(entry.handle[1]))
            for address, entry in allocator.pointer_to_data.items()
            if entry.tag == tag and address not in known
        ]
        return [*blocks_of_segments(segments), *others]

    return PoolCalls(
        allocations=allocator.pointer_to_data,
        blocks=blocks,
        map=module.create_and_map,
        unmap=module.unmap_and_release,
        copy=module.libcudart.cudaMemcpy,
    )


def _reload_calls(model_config: Any) -> ReloadCalls:
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
        VocabParallelEmbedding,  # pyright: ignore[reportUnknownVariableType]
    )
    from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
        layerwise,  # pyright: ignore[reportUnknownVariableType]
        meta,  # pyright: ignore[reportUnknownVariableType]
    )

    reload, embedding = cast("Any", layerwise), cast("Any", VocabParallelEmbedding)
    # At every sync it warns of layers without weights: tables of rotary embeddings, which no checkpoint has, and tied
    # heads. Weights that are really missing end the run (`WeightReload.commit`).
    logging.getLogger(reload.__name__).setLevel(logging.ERROR)

    def padding_rows(layer: nn.Module) -> int:
        if not isinstance(layer, embedding):
            return 0
        padded = cast("Any", layer)
        return int(padded.num_embeddings_padded - padded.org_vocab_size)

    return ReloadCalls(
        initialize=reload.initialize_layerwise_reload,
        finalize=lambda model: reload.finalize_layerwise_reload(model, model_config),
        info=cast("Callable[[nn.Module], LayerInfo]", reload.get_layerwise_info),
        padding_rows=padding_rows,
        uncounted=frozenset(cast("Any", meta).SKIP_TENSORS),
    )


def _dropped(worker: Any, part: EnginePart) -> list[Tensor]:
    """Parameters, which the next sync brings, or the KV cache, which is filled before it is read."""
    if part == "weights":
        return list(worker.model_runner.get_model().parameters())
    return _flat(worker.model_runner.kv_caches)


def _flat(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [tensor for entry in cast("Sequence[Any]", found) for tensor in _flat(entry)]

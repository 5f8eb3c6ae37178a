"""The engine of a run, and how the policy's weights reach it.

    native   our own, on modules of its own: the trainer's parameters where dtypes are equal, else a copy of them
    vllm     vLLM in this process, with weights in its own pool: each sync sends them in buckets

vLLM is built before the trainer, so that the two never need their most at the same time, and sleeps until it is asked.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedConfig, PreTrainedModel

from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.errors import RefusedError
from plimsoll.memory import names
from plimsoll.memory.device import EngineMemory
from plimsoll.memory.plan.job import Job
from plimsoll.memory.resident import Place, Resident, Survival
from plimsoll.model.build import DTYPES
from plimsoll.rollout.movers import kv_resident, weights_resident
from plimsoll.rollout.native import NativeEngine
from plimsoll.rollout.vllm_engine import VllmEngine
from plimsoll.rollout.vllm_settings import VllmSettings, check_temperature
from plimsoll.sync.buckets import WeightBuckets
from plimsoll.sync.engine import send
from plimsoll.sync.inprocess import RolloutWeights, WeightSource, sync
from plimsoll.types import Engine, EnginePart

PARTS: tuple[EnginePart, ...] = ("weights", "kv_cache")


class EngineSide(Protocol):
    """What a run needs of either."""

    @property
    def engine(self) -> Engine:
        """Samples."""
        ...

    @property
    def version(self) -> int:
        """Policy version of the weights in use; -1: none, or none any more."""
        ...

    @property
    def borrowed(self) -> frozenset[str]:
        """Residents that the trainer's own parameters stand in for."""
        ...

    def sync(self) -> None:
        """Bring the engine to the policy's weights and version; it must be idle."""
        ...

    def residents(self) -> list[Resident]:
        """What it holds, with the movers of what may leave."""
        ...


class NativeSide:
    """Our own engine."""

    def __init__(self, recipe: Recipe, plan: RunPlan, source: WeightSource) -> None:
        self._source = source
        self._plan = plan
        self._weights = RolloutWeights(source, DTYPES[plan.compute_dtype])
        self.engine = NativeEngine(
            self._weights.model,
            num_slots=plan.num_slots,
            slot_tokens=plan.slot_tokens,
            prefill_tokens=recipe.rollout.prefill_tokens,
        )

    @property
    def version(self) -> int:
        """The engine's, unless its weights have left since. Borrowed ones are the trainer's, whatever they are."""
        return self.engine.version if self._weights.borrowed else min(self._weights.version, self.engine.version)

    @property
    def borrowed(self) -> frozenset[str]:
        """Its parameters are the trainer's where there is no copy."""
        return frozenset({names.ROLLOUT_PARAMETERS}) if self._weights.borrowed else frozenset()

    def sync(self) -> None:
        """Refresh the copy, where there is one."""
        sync(self._source, self._weights, self.engine)

    def residents(self) -> list[Resident]:
        """KV cache, and the copy of the weights where there is one."""
        return [kv_resident(self.engine, self._plan.kv_bytes), *self._weights.residents()]


class VllmSide:
    """vLLM in this process; `connect` it to the policy before the first sync. Build it while the engine is awake."""

    def __init__(self, engine: VllmEngine, plan: RunPlan) -> None:
        self.engine = engine
        self.takes = {
            names.ROLLOUT_PARAMETERS: engine.weights_bytes,
            names.KV_CACHE: engine.kv_bytes,
            names.ENGINE_BUFFERS: engine.buffers_bytes,
        }
        """Device memory of its parts when nothing of it sleeps."""
        self._plan = plan
        self._source: WeightSource | None = None
        self._buckets: WeightBuckets | None = None

    def connect(self, source: WeightSource) -> None:
        """Whose weights it samples with."""
        self._source = source
        self._buckets = WeightBuckets(source.lm, DTYPES[self._plan.compute_dtype])

    @property
    def version(self) -> int:
        """The engine's."""
        return self.engine.version

    @property
    def borrowed(self) -> frozenset[str]:
        """Nothing: it has weights of its own."""
        return frozenset()

    def sync(self) -> None:
        """Send the weights in buckets."""
        assert self._source is not None, "connected before the first sync"
        assert self._buckets is not None
        send(self._buckets, self._source.version, self.engine)

    def residents(self) -> list[Resident]:
        """KV cache and weights in its own pool, and what it keeps beside them."""
        buffers = Resident(
            name=names.ENGINE_BUFFERS, survival=Survival.SCRATCH, measured=lambda: self.engine.buffers_bytes
        )
        return [
            kv_resident(self.engine, self._plan.kv_bytes, Place.ENGINE),
            weights_resident(self.engine, None),
            buffers,
        ]

    def memory(self) -> EngineMemory:
        """Of its pool."""
        counted, mapped = self.engine.memory()
        return EngineMemory(counted=counted, mapped=mapped)


def check_engine(job: Job, plan: RunPlan) -> None:
    """RefusedError when the engine cannot serve the run: asked before anything is built or deleted."""
    recipe = job.recipe
    if recipe.rollout.engine != "vllm" or not job.generates:
        return
    if plan.device != "cuda":
        raise RefusedError("rollout.engine=vllm needs a GPU, and there is none here: set rollout.engine=native")
    if job.objective == "policy":
        check_temperature(recipe.rollout.temperature)
    if recipe.data.eval is not None:
        check_temperature(recipe.rollout.eval.temperature)


def build_vllm(
    recipe: Recipe,
    plan: RunPlan,
    config: PreTrainedConfig,
    model: PreTrainedModel,
    folder: Path,
    guard: Callable[[], AbstractContextManager[None]],
) -> VllmSide:
    """Build vLLM and put it to sleep. `model`: the policy's class, without memory; `folder`: for vLLM to read from.

    RefusedError when vLLM does not take the model or the settings. `check_engine` comes before.
    """
    from plimsoll.rollout.vllm import build_vllm_engine

    settings = VllmSettings(
        config=config.to_dict(),
        architecture=type(model).__name__,
        dtype=plan.compute_dtype,
        kv_bytes=plan.kv_bytes,
        slot_tokens=plan.slot_tokens,
        num_sequences=plan.num_slots,
        prefill_tokens=recipe.rollout.prefill_tokens,
        cuda_graphs=recipe.rollout.cuda_graphs,
        seed=recipe.seed,
    )
    engine = build_vllm_engine(settings, folder, guard=guard)
    side = VllmSide(engine, plan)
    engine.sleep(PARTS)
    return side

"""Measure what a micro-batch really takes, once at the start of a run, and remember it for the next one.

The plan computes activations from the shapes of the layers. Kernels, compilers and versions of transformers keep more
or less than that; one forward and one backward over a full micro-batch say how much.
"""

import gc
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from plimsoll.config.derived import RunPlan
from plimsoll.jsonl import write_json
from plimsoll.memory import names
from plimsoll.memory.device import DeviceReader
from plimsoll.memory.host import HostReader, PeakSampler
from plimsoll.memory.malloc import trim_heap
from plimsoll.memory.plan.job import Job
from plimsoll.memory.plan.workspace import micro_batch_tokens, micro_batches_add_up
from plimsoll.memory.release import release_device_cache
from plimsoll.memory.resident import Place, Resident, storage_bytes
from plimsoll.memory.table import Holdings
from plimsoll.model.rows import PackedRows, pack_rows
from plimsoll.update.worker import PolicyWorker

logger = logging.getLogger(__name__)

STORE = Path(".cache") / "plimsoll" / "calibration.json"
"""Below the user's home: what was measured, by what it depends on."""

LOGPROB, GRADIENTS = "logprob", "update/gradients"
"""Phases whose workspace is measured."""

_SAMPLE_SECONDS = 0.001


def key_of(job: Job, plan: RunPlan) -> str:
    """Everything that the figures depend on."""
    assert plan.memory is not None
    recipe, sizes = job.recipe, job.sizes
    shapes = [[list(t.shape) for t in layer.parameters] for layer in sizes.layers] + [list(t.shape) for t in sizes.root]
    device = torch.cuda.get_device_name() if plan.device == "cuda" else f"cpu x {plan.threads}"
    facts = [
        sizes.family,
        hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
        recipe.model.dtype,
        plan.compute_dtype,
        plan.packing,
        plan.activation_checkpointing,
        str(micro_batch_tokens(job, plan.memory.choices)),
        str(job.longest_sequence),
        "several" if micro_batches_add_up(job, plan.memory.choices) else "one",
        "entropy" if job.trains_entropy else "no entropy",
        str(plan.logprob_chunk),
        str(recipe.train.compile),
        str(recipe.parallel.shard or recipe.cluster.ranks),
        str(recipe.memory.default_stream_gather),
        torch.__version__,
        transformers.__version__,
        device,
    ]
    return " | ".join(facts)


def remembered(key: str, store: Path | None = None) -> dict[str, int]:
    """Bytes by phase of an earlier run; empty: none, or a file that cannot be read."""
    path = Path.home() / STORE if store is None else store
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get(key, {})
        return {name: int(found[name]) for name in (LOGPROB, GRADIENTS)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def remember(key: str, measured: Mapping[str, int], store: Path | None = None) -> None:
    """Keep for later runs. A home that cannot be written to costs only that."""
    path = Path.home() / STORE if store is None else store
    try:
        held: Any = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError):
        held = {}
    kept = cast("dict[str, Any]", held) if isinstance(held, dict) else {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**kept, key: dict(measured)})
    except OSError as error:
        logger.info("the calibration is not kept for later runs: %s", error)


def measure(worker: PolicyWorker, job: Job, plan: RunPlan, device: DeviceReader | None) -> dict[str, int]:
    """Highest use over what was there before, less the gradients: bytes by phase. Collective on several ranks.

    A first micro-batch makes the gradients, from the last layer on, while its activations go; the next ones have them
    from the start. So a second backward is measured too where a run has more than one. The weights stay as they are,
    and no gradient is left.
    """
    assert plan.memory is not None
    rows = _full_micro_batch(worker, job, plan)
    meter = _Meter(device)

    def forward() -> None:
        with torch.no_grad():
            worker.policy(rows, temperature=1.0)
        worker.release_gathered()

    def update() -> None:
        logprobs, entropy = worker.policy(rows, temperature=1.0)
        loss = logprobs.sum() * 0.0
        if job.trains_entropy:
            loss = loss + entropy.sum() * 0.0
        loss.backward()

    try:
        found = {LOGPROB: meter.highest(forward)}
        first = meter.highest(update)
        found[GRADIENTS] = max(first - storage_bytes(worker.optimizer.gradients()), 0)
        if micro_batches_add_up(job, plan.memory.choices):
            found[GRADIENTS] = max(found[GRADIENTS], meter.highest(update))
    finally:
        worker.optimizer.zero_grad()
        meter.close()
        gc.collect()
        release_device_cache(worker.device)
    return found


def fixed_parts(
    held: Holdings, residents: Iterable[Resident], engine: Mapping[str, int], planned: Mapping[str, int]
) -> dict[str, int]:
    """What the plan took from a table and a device shows once everything is built: bytes by resident.

    `residents`: all there are. `engine`: what its parts really take while they are awake; they sleep now. `planned`:
    residents of the load so far. Empty on a CPU.
    """
    device = held.device
    if device is None:
        return {}
    owned = sum(resident.measured() for resident in residents if resident.place is Place.DEVICE)
    groups = sum(size for name, size in planned.items() if name.startswith(names.COMMUNICATOR))
    outside = device.used - (device.reserved - held.engine.counted) - held.engine.mapped
    return {
        **engine,
        names.CUDA_CONTEXT: max(outside - groups, 0),
        # Not all threads have multiplied yet.
        names.KERNEL_BUFFERS: max(device.allocated - held.engine.counted - owned, planned[names.KERNEL_BUFFERS]),
    }


def _full_micro_batch(worker: PolicyWorker, job: Job, plan: RunPlan) -> PackedRows:
    """The largest micro-batch that the run can have, in sequences of the greatest length, every token but the first of
    each a sampled one."""
    assert plan.memory is not None
    longest = job.longest_sequence
    tokens = longest if plan.packing == "single" else micro_batch_tokens(job, plan.memory.choices)
    lengths = [longest] * (tokens // longest)
    if tokens % longest > 1:
        lengths.append(tokens % longest)
    ids = [torch.zeros(length, dtype=torch.int64) for length in lengths]
    return pack_rows(ids, [torch.arange(length) > 0 for length in lengths], worker.device)


class _Meter:
    """The highest use of memory within a call, over the use before it."""

    def __init__(self, device: DeviceReader | None) -> None:
        self._device = device
        self._host = HostReader()
        self._sampler = PeakSampler(self._host.anonymous, _SAMPLE_SECONDS)

    def highest(self, work: Callable[[], None]) -> int:
        """Bytes. On a CPU: anonymous memory of the process."""
        if self._device is not None:
            self._device.synchronize()
            self._device.reset_peaks()
            before = self._device.read().allocated
            work()
            self._device.synchronize()
            return self._device.read().allocated_peak - before
        gc.collect()
        trim_heap()  # what the call before has left in the heap would be taken again, and not be seen
        before = self._host.anonymous() or 0
        self._sampler.begin()
        work()
        return max((self._sampler.end() or before) - before, 0)

    def close(self) -> None:
        """End the sampler's thread."""
        self._sampler.close()
        self._host.close()

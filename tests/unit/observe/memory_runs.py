"""A run whose memory looks like a real one's: an 8B model on one of eight devices, the engine in the same process.

python -m tests.unit.observe.memory_runs FOLDER    writes it, to look at its page or to take a picture for the docs
"""

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path

from plimsoll.config.planned import Choices, MemoryPlan, PlannedHost, PlannedPhase
from plimsoll.jsonl import JsonlWriter
from plimsoll.memory import names
from plimsoll.memory.ledger import GIB, MIB, Ledger, LedgerRow
from tests.unit.observe.report_runs import RECIPE, metrics_rows, sample_row, write_lines

TOTAL = 139 * GIB
KEPT = {names.ACTOR_PARAMETERS: 4_190 * MIB}
ENGINE = {names.ROLLOUT_PARAMETERS: 15_620 * MIB, names.KV_CACHE: 72 * GIB, names.ENGINE_BUFFERS: 1_900 * MIB}
ON_HOST = {names.OPTIMIZER_STATE: 8_380 * MIB, names.STAGING_RING: 192 * MIB}
CONTEXT = {names.CUDA_CONTEXT: 625 * MIB, "communicator/shard": 860 * MIB, "communicator/world": 481 * MIB}

AWAKE: Mapping[str, tuple[str, ...]] = {
    "rollout": (names.ROLLOUT_PARAMETERS, names.KV_CACHE, names.ENGINE_BUFFERS),
    "eval": (names.ROLLOUT_PARAMETERS, names.KV_CACHE, names.ENGINE_BUFFERS),
    "sync": (names.ROLLOUT_PARAMETERS, names.ENGINE_BUFFERS),
}
"""Phase → what is mapped of the engine; else its buffers alone."""
WORKSPACE: Mapping[str, Mapping[str, int]] = {
    "logprob": {"activations": 21 * GIB, "logits": 1_187 * MIB, "gathered_layers": 1_640 * MIB},
    "reference": {"reference_shard": 2_095 * MIB, "activations": 21 * GIB, "logits": 1_187 * MIB},
    "update": {
        "gradients": 4_190 * MIB,
        "activations": 46 * GIB,
        "logits": 2_374 * MIB,
        "gathered_layers": 3_280 * MIB,
    },
    "sync": {"sync_bucket": 1 * GIB, "gathered_layers": 1_640 * MIB},
}
SECONDS = {"load": 9.0, "rollout": 31.0, "logprob": 6.0, "reference": 5.5, "update": 24.0, "sync": 2.1, "eval": 12.0}
HOST = {"load": 520, "update": 700, "save": 480, "reference": 380}
"""Mebibytes of host memory that come and go within the phase; else a few."""


def planned_phase(name: str) -> PlannedPhase:
    """What the plan says of a phase, by the tables above."""
    mapped = AWAKE.get(name, (names.ENGINE_BUFFERS,))
    held = CONTEXT | KEPT | {part: ENGINE[part] for part in ENGINE if part in mapped}
    inside = dict(WORKSPACE.get(name.partition("/")[0], {}))
    if name == "update/step":
        inside = {"gradients": inside["gradients"], "optimizer_windows": 3 * GIB}
    used = sum(held.values()) + sum(inside.values())
    return PlannedPhase(
        slot="all",
        phase=name,
        device_bytes=used,
        capacity_bytes=TOTAL,
        headroom_bytes=TOTAL - used,
        residents=held,
        workspace_bytes=sum(inside.values()),
        workspace=inside,
        evicted=tuple(part for part in ENGINE if part not in mapped),
        host_bytes=sum(ON_HOST.values()) + (HOST.get(name.partition("/")[0], 60) + 900) * MIB,
    )


def plan() -> MemoryPlan:
    """The memory plan that the run goes by."""
    phases = ("rollout", "logprob", "reference", "update/gradients", "update/step", "sync", "eval")
    found = tuple(planned_phase(name) for name in phases)
    host = found[3].host_bytes
    return MemoryPlan(
        fits=True,
        phases=found,
        host=PlannedHost(
            node_peak_bytes=(8 * host,),
            rank_peak_bytes=(host,) * 8,
            file_cache_bytes=(15_620 * MIB,),
            consumers=ON_HOST | {"libraries": 900 * MIB, "step_buffers": 700 * MIB},
            capacity_bytes=1_900 * GIB,
        ),
        moved_bytes_per_step=2 * ON_HOST[names.OPTIMIZER_STATE] + 2_095 * MIB,
        wire_bytes_per_step=58 * GIB,
        seconds_per_step={"moved": 0.38, "wire": 0.22, "compute": 55.0},
        choices=Choices(
            device="cuda",
            compute_dtype="bfloat16",
            activation_checkpointing="selective",
            token_budget=16_384,
            optimizer_state="streamed",
            reference_placement="page_cache",
            kv_bytes=ENGINE[names.KV_CACHE],
            evicted={row.phase: row.evicted for row in found},
        ),
        model={"parameters": 8_190_735_360, "kv_bytes_per_token": 147_456},
        calibrated=True,
        notes=("The engine keeps its buffers while it sleeps.", "The reference is read from the page cache."),
    )


def ledger_row(step: int, phase: str, rank: int, source: random.Random, *, failed: bool = False) -> LedgerRow:
    """A row in which the driver's figure is the sum of its parts."""
    planned = plan().phase(phase)
    around = lambda share: 1 + share * (2 * source.random() - 1)  # noqa: E731
    mapped = AWAKE.get(phase, (names.ENGINE_BUFFERS,)) if step or phase != "load" else ()
    engine = {part: int(ENGINE[part] * 1.002) if part in mapped else 0 for part in ENGINE}
    in_engine = sum(engine.values()) + (380 * MIB if mapped else 0)
    beside = int(sum(CONTEXT.values()) + (150 if step else 20) * MIB + 8 * MIB * source.random())
    owned = sum(KEPT.values()) + (WORKSPACE["update"]["gradients"] if phase == "update" and failed else 0)
    allocated = owned + int(90 * MIB * around(0.3))
    inside = sum(WORKSPACE.get(phase, {"cast": 700 * MIB}).values())
    peak = allocated + int(inside * {"reference": 0.6, "sync": 1.3}.get(phase, 1.02) * around(0.03))
    reserved_peak = int(peak * 1.07)
    reserved = min(reserved_peak, allocated + int(5.5 * GIB * around(0.2)))
    growth = sum(ON_HOST.values()) + int((880 + 3 * step + 12 * source.random()) * MIB)
    if phase == "load":
        growth -= ON_HOST[names.OPTIMIZER_STATE]
    growth_peak = growth + int(HOST.get(phase, 40) * MIB * around(0.1))
    sizes = KEPT | engine | (ON_HOST if phase != "load" else {names.STAGING_RING: ON_HOST[names.STAGING_RING]})
    start = 640 * MIB
    return LedgerRow(
        step=step,
        phase=phase,
        rank=rank,
        device=f"cuda:{rank}",
        process="trainer",
        pid=100 + rank,
        failed=failed,
        host_anonymous=start + growth,
        host_anonymous_peak=start + growth_peak,
        host_growth=growth,
        host_growth_peak=growth_peak,
        host_file=4 * GIB,
        host_shared=310 * MIB,
        host_pinned=sum(size for name, size in sizes.items() if name in ON_HOST) + 130 * MIB,
        host_available=1_700 * GIB - 8 * growth_peak,
        host_limit=1_900 * GIB,
        device_allocated=allocated,
        device_reserved=reserved,
        device_allocated_peak=peak,
        device_reserved_peak=reserved_peak,
        device_used=reserved + in_engine + beside,
        device_total=TOTAL,
        device_engine=in_engine,
        device_non_torch=beside,
        non_torch_growth=130 * MIB if step else None,
        device_released=0,
        fragmentation=reserved - allocated,
        unattributed=allocated - owned,
        planned_device=planned.device_bytes if planned else None,
        planned_host=planned.host_bytes if planned else None,
        evicted=0,
        admitted=ENGINE[names.ROLLOUT_PARAMETERS] if phase == "sync" else 0,
        seconds_border=0.06 * around(0.5) if phase in ("rollout", "logprob", "sync") else 0.0,
        residents=sizes,
        on_host=[name for name in sizes if name in ON_HOST],
        in_engine=list(ENGINE),
        predicted=dict.fromkeys(sizes),
        allocator="expandable",
        seconds=SECONDS.get(phase, 3.0) * around(0.08),
    )


def write_ledger(path: Path, *, num_steps: int = 20, ranks: int = 2, failed_at: int | None = None) -> None:
    """memory.jsonl alone; the update of step `failed_at` ends with an error."""
    source = random.Random(0)
    ledger = Ledger(path)
    for step in range(num_steps + 1):
        phases = ["rollout", "logprob", "reference", "update", "sync"] if step else ["load", "sync", "eval"]
        phases += ["eval"] if step and step % 5 == 0 else []
        phases += ["save"] if step and step % 10 == 0 else []
        for phase in phases:
            for rank in range(ranks):
                ledger.write(ledger_row(step, phase, rank, source, failed=step == failed_at and phase == "update"))
    ledger.close()


def planned_run(path: Path, *, num_steps: int = 20, ranks: int = 2) -> Path:
    """A whole run folder with its plan."""
    path.mkdir(parents=True)
    (path / "recipe.json").write_text(json.dumps(RECIPE | {"name": path.name}), encoding="utf-8")
    numbers = {"steps": num_steps, "device": "cuda", "memory": plan().as_json()}
    (path / "plan.json").write_text(json.dumps(numbers), encoding="utf-8")
    write_lines(path / "metrics.jsonl", metrics_rows(num_steps))
    write_ledger(path / "memory.jsonl", num_steps=num_steps, ranks=ranks)
    write_lines(path / "rollouts" / f"step_{num_steps:06d}.jsonl", [sample_row(num_steps, 0)])
    return path


def as_older_version(path: Path) -> None:
    """Take from every row of a memory.jsonl what versions before the plan did not write."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    new = {"planned_device", "planned_host", "device_engine", "non_torch_growth", "evicted", "admitted"}
    new |= {"seconds_border", "in_engine"}
    path.unlink()
    writer = JsonlWriter(path)
    for row in rows:
        writer.write({key: value for key, value in row.items() if key not in new})
    writer.close()


if __name__ == "__main__":
    print(planned_run(Path(sys.argv[1])))

"""Who holds what: the table that an out-of-memory ends with, on the device or on the host."""

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from plimsoll.config.planned import PlannedPhase
from plimsoll.memory import names
from plimsoll.memory.device import DeviceReading, EngineMemory
from plimsoll.memory.host import HostReading
from plimsoll.memory.ledger import gib_text
from plimsoll.memory.resident import Place

UNNAMED = "tensors that nobody has named (activations, logits)"
FRAGMENTATION = "allocator's cache and fragmentation"
OUTSIDE = "outside torch (contexts, communicators, other processes)"
ENGINE = "engine's own pools"
OTHER_HOST = "host memory that nobody has named"
STARTED = "at the start of the process (libraries)"
PINNED = "pinned by torch (rounded up)"
CHILDREN = "processes below this one"

_CHANGE: Mapping[str, str] = {
    UNNAMED: "lower train.token_budget, or set train.activation_checkpointing=full",
    FRAGMENTATION: "start with PYTORCH_ALLOC_CONF=expandable_segments:True, and lower train.token_budget",
    OUTSIDE: "look with nvidia-smi for other processes on the device; fewer groups of ranks have fewer communicators",
    ENGINE: "lower rollout.kv_memory",
    names.KV_CACHE: "lower rollout.kv_memory",
    names.ACTOR_PARAMETERS: "shard over more ranks (parallel.shard)",
    names.ACTOR_GRADIENTS: "shard over more ranks (parallel.shard)",
    names.OPTIMIZER_STATE: "set train.optimizer_state=streamed on a GPU, or shard over more ranks (parallel.shard)",
    names.REFERENCE_PARAMETERS: "set model.reference_placement=page_cache",
    names.REFERENCE_ARENA: "set model.reference_placement=page_cache",
    names.ROLLOUT_PARAMETERS: "let more ranks share an engine (rollout.tensor_parallel)",
    PINNED: "find who pins memory by torch: plimsoll itself does not",
    CHILDREN: "run fewer reward workers, or let them hold less",
    OTHER_HOST: "look at host_growth in memory.jsonl: it names the phase that took it",
    STARTED: "give the job more host memory",
}

Kind = Literal["device", "host"]


@dataclass(slots=True, kw_only=True, frozen=True)
class Holdings:
    """Everything that is known about the memory of a process at one time. Bytes."""

    step: int
    phase: str | None  # None: between two
    rank: int
    process: str
    device_name: str
    device: DeviceReading | None  # None: a CPU run
    engine: EngineMemory
    residents: Sequence[tuple[str, int, Place]]
    host: HostReading
    host_start: int | None  # anonymous memory when the worker started
    registered: int  # host memory that is pinned beside torch's allocator; part of the residents on the host
    limit: int | None  # cgroup or machine
    limit_is_cgroup: bool
    oom_kills: int | None  # by the kernel in this cgroup, since the worker started
    oom_kills_now: int  # since the last phase that ended well
    processes: Mapping[int, int]  # pid → RSS, this process and those below, as seen last
    gone: frozenset[int]  # those of them that are no more
    planned: PlannedPhase | None


class HasHoldings(Protocol):
    """A recorder."""

    def holdings(self) -> Holdings:
        """The state now."""
        ...


def explain_out_of_memory(error: BaseException, recorder: HasHoldings) -> str | None:
    """The table for an error that came of too little memory; None: it came of something else."""
    kind = kind_of(error)
    if kind is not None:
        return table(recorder.holdings(), kind, f"{type(error).__name__}: {_first_line(error)}")
    holdings = recorder.holdings()
    if not isinstance(error, Exception) or not holdings.oom_kills_now:
        return None
    # What failed here is the symptom: the kernel has killed a process that this one needed.
    return table(holdings, "host", f"the kernel killed a process for memory, then {type(error).__name__}")


def kind_of(error: BaseException) -> Kind | None:
    """Which memory ran out, by the error and its causes; None: neither."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        text = str(current)
        # A failure to pin host memory is a CUDA error as well.
        if isinstance(current, MemoryError) or (isinstance(current, OSError) and current.errno == errno.ENOMEM):
            return "host"
        if "can't allocate memory" in text or "of host memory could not be" in text or "cudaHostAlloc" in text:
            return "host"
        if isinstance(current, torch.OutOfMemoryError) or "CUDA error: out of memory" in text:
            return "device"
        if "CUBLAS_STATUS_ALLOC_FAILED" in text or "CUDA out of memory" in text:
            return "device"
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return None


def table(holdings: Holdings, kind: Kind, cause: str) -> str:
    """Lines for the log: what ran out, who holds it now, what the plan has there, and what to change."""
    device = _device_rows(holdings)
    host = _host_rows(holdings)
    where = "between two phases" if holdings.phase is None else f"in the {holdings.phase} phase"
    lines = [
        f"Out of {kind} memory {where} of step {holdings.step} on rank {holdings.rank} ({holdings.process}). {cause}"
    ]
    lines += _device_lines(holdings, device) + _host_lines(holdings, host)
    consumers = device if kind == "device" and device else host
    # Libraries cannot be made smaller: anything else that is there comes first.
    consumers = [row for row in consumers if row[0] != STARTED and _weight(row)] or consumers
    if consumers:
        name, size, planned = max(consumers, key=_weight)
        foretold = f" now, {gib_text(planned)} planned" if planned is not None and planned > size else ""
        activations = name == OTHER_HOST and holdings.device is None  # a CPU's are in host memory
        change = _CHANGE.get(UNNAMED if activations else name, "hold less of it, or free it before this phase")
        lines.append(f"The largest is {name}, {gib_text(size)}{foretold}. What to change: {change}.")
    return "\n".join(lines)


def _weight(row: "Row") -> int:
    """Bytes to compare by. Much of what nobody names is gone once the exception has come here; the plan knows it."""
    name, size, planned = row
    return max(size, planned or 0) if name in (UNNAMED, OTHER_HOST) else size


Row = tuple[str, int, int | None]
"""Name, bytes now, bytes planned."""


def _device_rows(holdings: Holdings) -> list[Row]:
    reading = holdings.device
    if reading is None:
        return []
    planned = holdings.planned
    plan = dict(planned.residents) if planned else {}
    on_device = [(name, size) for name, size, place in holdings.residents if place is Place.DEVICE]
    allocated = reading.allocated - holdings.engine.counted
    reserved = reading.reserved - holdings.engine.counted
    outside = [name for name in plan if name == names.CUDA_CONTEXT or name.startswith(names.COMMUNICATOR)]
    planned_outside = sum(plan.pop(name) for name in outside) if outside else None
    inside = [name for name, _, place in holdings.residents if place is Place.ENGINE]
    if (holdings.engine.counted or holdings.engine.mapped) and names.ENGINE_BUFFERS not in dict(on_device):
        inside.append(names.ENGINE_BUFFERS)
    planned_engine = sum(plan.pop(name, 0) for name in inside) if inside and planned else None
    rows: list[Row] = [(name, size, plan.pop(name, None)) for name, size in on_device]
    rows += [(name, 0, size) for name, size in plan.items()]  # planned, and not there
    rows.append((UNNAMED, allocated - sum(size for _, size in on_device), planned.workspace_bytes if planned else None))
    rows.append((FRAGMENTATION, reserved - allocated, None))
    if inside:
        rows.append((ENGINE, holdings.engine.mapped, planned_engine))
    rows.append((OUTSIDE, reading.used - reserved - holdings.engine.mapped, planned_outside))
    return rows


def _host_rows(holdings: Holdings) -> list[Row]:
    cpu = holdings.device is None
    own = [(name, size) for name, size, place in holdings.residents if place is Place.HOST or cpu]
    plan = dict(holdings.planned.residents) if holdings.planned and cpu else {}
    rows: list[Row] = [(name, size, plan.get(name)) for name, size in own]
    if holdings.host.anonymous is not None:
        started = holdings.host_start or 0
        rows.append((STARTED, started, None))
        unnamed = max(0, holdings.host.anonymous - started - sum(size for _, size in own))
        rows.append((OTHER_HOST, unnamed, holdings.planned.workspace_bytes if holdings.planned and cpu else None))
    if holdings.device is not None and holdings.device.pinned:
        rows.append((PINNED, holdings.device.pinned, None))
    children = sum(holdings.processes.values()) - holdings.processes.get(os.getpid(), 0)
    if children:
        rows.append((CHILDREN, children, None))
    return rows


def _device_lines(holdings: Holdings, rows: Sequence[Row]) -> list[str]:
    reading = holdings.device
    if reading is None:
        return []
    planned = holdings.planned.device_bytes if holdings.planned else None
    return [
        f"{holdings.device_name}: {gib_text(reading.total)}, {gib_text(reading.total - reading.used)} of them free",
        *_columns([*rows, ("together", reading.used, planned)]),
        f"  highest within the phase: allocated {gib_text(reading.allocated_peak - holdings.engine.counted)}, reserved "
        f"{gib_text(reading.reserved_peak - holdings.engine.counted)}",
    ]


def _host_lines(holdings: Holdings, rows: Sequence[Row]) -> list[str]:
    limit = "unknown" if holdings.limit is None else gib_text(holdings.limit)
    kills = "unknown" if holdings.oom_kills is None else holdings.oom_kills
    available = "unknown" if holdings.host.available is None else gib_text(holdings.host.available)
    lines = [
        f"host: {'limit of the cgroup' if holdings.limit_is_cgroup else 'memory of the machine'} {limit}, still "
        f"available {available}; processes killed by the kernel since the start: {kills}",
        *_columns(rows),
    ]
    if holdings.planned is not None and holdings.planned.host_bytes:
        lines.append(f"  planned over the start of the process: {gib_text(holdings.planned.host_bytes)}")
    if holdings.registered:
        lines.append(f"  pinned for the device by plimsoll, among the residents: {gib_text(holdings.registered)}")
    if holdings.processes:
        sizes = [
            f"{pid}: {gib_text(size)}{' (gone)' if pid in holdings.gone else ''}"
            for pid, size in holdings.processes.items()
        ]
        lines.append(f"  last RSS by process id: {', '.join(sizes)}")
    return lines


def _columns(rows: Sequence[Row]) -> list[str]:
    width = max((len(name) for name, _, _ in rows), default=0)
    head = f"  {'':{width}}  {'now':>10}  {'plan':>10}"
    body = [
        f"  {name:{width}}  {gib_text(size):>10}  {'-' if planned is None else gib_text(planned):>10}"
        for name, size, planned in rows
    ]
    return [head, *body] if body else []


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]

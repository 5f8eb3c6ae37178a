"""How much KV cache costs how much moving: a larger cache may push residents off the device at every step."""

from dataclasses import dataclass

from plimsoll.memory.plan.advice import Replan, with_settings
from plimsoll.memory.plan.engine import sequence_bytes, useful_kv
from plimsoll.memory.plan.job import Job

POINTS = 8


@dataclass(slots=True, kw_only=True, frozen=True)
class CurvePoint:
    """One size of the cache, and the plan around it."""

    kv_bytes: int
    """Of one engine's cache on one device."""
    moved_bytes_per_step: int
    """Over PCIe, one rank, both ways together."""
    fits: bool


def kv_curve(job: Job, replan: Replan) -> tuple[CurvePoint, ...]:
    """From room for one sequence to room for all that the work has in flight, or all of the device, each point the same
    factor larger."""
    if not job.generates:
        return ()
    found = replan(job)
    least, most = sequence_bytes(job, found.choices), useful_kv(job, found.choices)
    capacity = max(row.capacity_bytes for row in found.phases)
    factor = max(min(most, capacity), least) / least
    sizes = sorted({round(least * factor ** (number / (POINTS - 1))) for number in range(POINTS)})
    return tuple(_point(job, replan, num_bytes) for num_bytes in sizes)


def _point(job: Job, replan: Replan, kv_bytes: int) -> CurvePoint:
    found = replan(with_settings(job, [("rollout.kv_memory", kv_bytes)]))
    return CurvePoint(kv_bytes=kv_bytes, moved_bytes_per_step=found.moved_bytes_per_step, fits=found.fits)

"""A memory plan as text for a terminal of 120 columns: plain lines, no colours, no frames."""

import re
import textwrap
from collections.abc import Iterable, Sequence

from plimsoll.config.planned import MemoryPlan, PlannedPhase
from plimsoll.memory import names
from plimsoll.memory.plan.advice import NOTHING_HELPS, advice_lines, refusal_lines, size
from plimsoll.memory.plan.curve import CurvePoint
from plimsoll.memory.plan.job import GIB, MIB, Job, Machine

WIDTH = 118
CONTEXT = "context"
"""Column of the CUDA context, what its libraries keep, and all communicators."""

HEADINGS = {
    names.ACTOR_PARAMETERS: "actor",
    names.ACTOR_GRADIENTS: "gradients",
    names.OPTIMIZER_STATE: "moments",
    names.REFERENCE_PARAMETERS: "reference",
    names.ROLLOUT_PARAMETERS: "rollout",
    names.KV_CACHE: "KV cache",
    names.ENGINE_BUFFERS: "engine",
    CONTEXT: CONTEXT,
}
"""Resident → its column, in the order of the columns."""

AWAY = "away"
"""Stands for a resident that the plan has evicted."""


def show(plan: MemoryPlan, job: Job, machine: Machine, curve: Sequence[CurvePoint] = ()) -> str:
    """The whole answer, many lines."""
    blocks = [
        [*_head(plan, job, machine), *_choices(plan, job)],
        _device_table(plan),
        _workspace(plan),
        _host(plan),
        _moved(plan),
        _curve(curve),
        _verdict(plan),
        _notes(plan),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _head(plan: MemoryPlan, job: Job, machine: Machine) -> list[str]:
    sizes = job.sizes
    parameters = f"{_count(sizes.num_parameters)} parameters"
    if any(layer.experts for layer in sizes.layers):
        parameters += f", {_count(sizes.active_parameters)} of them active for a token"
    ranks = f"{machine.ranks} ranks" if machine.ranks > 1 else "1 rank"
    if machine.nodes > 1:
        ranks += f" on {machine.nodes} nodes"
    if machine.ranks > 1:
        ranks += f", shard groups of {job.shard}"
    kind = "GPU" if machine.device == "cuda" else "rank's share of host memory"
    return [
        f"{job.recipe.name}: {parameters}; {ranks}",
        f"{kind} {size(machine.device_bytes)}, host {size(machine.host_bytes)} a node",
    ]


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def _choices(plan: MemoryPlan, job: Job) -> list[str]:
    chosen = plan.choices
    parts = [
        f"compute {chosen.compute_dtype}",
        f"micro-batches of {chosen.token_budget} tokens",
        f"checkpointing {chosen.activation_checkpointing}",
        f"moments {chosen.optimizer_state}",
    ]
    if job.reference is not None:
        parts.append(f"reference {chosen.reference_placement}")
    if job.generates:
        parts.append(f"KV cache {size(chosen.kv_bytes)}")
    return _wrapped(", ".join(parts), "")


def _device_table(plan: MemoryPlan) -> list[str]:
    """A row a phase; a column for each resident that any phase has."""
    if not plan.phases:
        return []
    held = [_grouped(phase.residents) for phase in plan.phases]
    known = [name for name in HEADINGS if any(name in row for row in held)]
    columns = [*known, *sorted({name for row in held for name in row} - set(HEADINGS))]
    largest = max(phase.device_bytes for phase in plan.phases)
    unit, word = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")

    def figure(num_bytes: int) -> str:
        return f"{num_bytes / unit:.1f}" if abs(num_bytes) >= 0.05 * unit else "0.0" if num_bytes else ""

    slots = len({phase.slot for phase in plan.phases}) > 1
    rows = [["phase", *(HEADINGS.get(name, name) for name in columns), "work", "sum", "free"]]
    for phase, residents in zip(plan.phases, held, strict=True):
        away = {name for name in phase.evicted if not residents.get(name)}
        cells = [AWAY if name in away else figure(residents.get(name, 0)) for name in columns]
        name = f"{phase.slot} {phase.phase}" if slots else phase.phase
        free = (figure(phase.headroom_bytes) or "0.0") + (" <" if phase.headroom_bytes < 0 else "")
        rows.append([name, *cells, figure(phase.workspace_bytes), figure(phase.device_bytes), free])
    capacity = size(plan.phases[0].capacity_bytes)
    return [f"Device, {word} of the fullest rank, of {capacity}", *_aligned(rows)]


def _grouped(residents: dict[str, int]) -> dict[str, int]:
    """Context, libraries and communicators are one column."""
    found: dict[str, int] = {}
    for name, num_bytes in residents.items():
        together = name in (names.CUDA_CONTEXT, names.KERNEL_BUFFERS) or name.startswith(f"{names.COMMUNICATOR}/")
        key = CONTEXT if together else name
        found[key] = found.get(key, 0) + num_bytes
    return found


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """First column to the left, the others to the right; a mark behind a figure does not shift it."""
    plain = [[cell.removesuffix(" <") for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*plain, strict=True)]
    lines: list[str] = []
    for row, cells in zip(rows, plain, strict=True):
        first, *others = cells
        text = "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))])
        lines.append("  " + (text + " <" if row[-1].endswith(" <") else text).rstrip())
    return lines


def _workspace(plan: MemoryPlan) -> list[str]:
    """The parts of what comes and goes, phases with equal parts together."""
    groups: dict[tuple[tuple[str, int], ...], list[PlannedPhase]] = {}
    for phase in plan.phases:
        parts = tuple(sorted(((n, b) for n, b in phase.workspace.items() if b), key=lambda part: -part[1]))
        if parts:
            groups.setdefault(parts, []).append(phase)
    lines: list[str] = []
    for parts, phases in groups.items():
        label = ", ".join(phase.phase for phase in phases)
        lines += _wrapped(f"{label}: {_parts(parts)}", "  ")
    return ["Work, what comes and goes in a phase", *lines] if lines else []


def _host(plan: MemoryPlan) -> list[str]:
    host = plan.host
    lines = [f"Host, of {size(host.capacity_bytes)} a node"]
    lines += _wrapped(f"nodes at their highest: {_run_lengths(host.node_peak_bytes)}", "  ")
    lines += _wrapped(f"ranks at their highest: {_run_lengths(host.rank_peak_bytes)}", "  ")
    lines += _wrapped(f"of a rank: {_parts(tuple(host.consumers.items()))}", "  ")
    if any(host.file_cache_bytes):
        cached = _run_lengths(host.file_cache_bytes)
        lines += _wrapped(f"page cache counted on, beside it: {cached} of the reference's files", "  ")
    return lines


def _run_lengths(values: Iterable[int]) -> str:
    """`4 x 310 GiB`."""
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][1] == value:
            runs[-1] = (runs[-1][0] + 1, value)
        else:
            runs.append((1, value))
    return ", ".join(f"{count} x {size(value)}" if count > 1 else size(value) for count, value in runs)


def _moved(plan: MemoryPlan) -> list[str]:
    rows = [
        ["over PCIe, a rank", size(plan.moved_bytes_per_step), _seconds(plan, "moved")],
        ["over the wire, a rank", size(plan.wire_bytes_per_step), _seconds(plan, "wire")],
    ]
    if "compute" in plan.seconds_per_step:
        rows.append(["trainer's arithmetic", "", _seconds(plan, "compute")])
    return ["A step with samples of full length", *_aligned(rows)]


def _seconds(plan: MemoryPlan, name: str) -> str:
    if name not in plan.seconds_per_step:
        return ""
    seconds = plan.seconds_per_step[name]
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _curve(curve: Sequence[CurvePoint]) -> list[str]:
    if not curve:
        return []
    rows = [["KV cache", "moved in a step", ""]]
    rows += [[size(p.kv_bytes), size(p.moved_bytes_per_step), "" if p.fits else "does not fit"] for p in curve]
    return ["KV cache against what is moved for it over PCIe", *_aligned(rows)]


def _verdict(plan: MemoryPlan) -> list[str]:
    if plan.fits:
        least = min(plan.phases, key=lambda phase: phase.headroom_bytes, default=None)
        spare = "" if least is None else f": the fullest phase, {least.phase}, leaves {size(least.headroom_bytes)} free"
        return [f"It fits{spare}."]
    refusals = [line for cause in refusal_lines(plan) for line in _wrapped(cause, "- ")]
    advice = [line for cause in advice_lines(plan) for line in _wrapped(cause, "- ")]
    return ["It does not fit.", *refusals, "", "What would help", *advice]


def _notes(plan: MemoryPlan) -> list[str]:
    notes = [note for note in plan.notes if not note.startswith(NOTHING_HELPS)]
    return ["Taken for granted", *(line for note in notes for line in _wrapped(note, "- "))] if notes else []


def _parts(parts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in parts)


def _wrapped(text: str, indent: str) -> list[str]:
    """Lines of at most `WIDTH`; what goes on stands under the first word. A figure stays with its unit."""
    lines = textwrap.wrap(
        _FIGURE.sub(lambda found: found[0].replace(" ", _NO_BREAK), text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * len(indent) + ("" if indent.strip() else "  "),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]


_NO_BREAK = "\N{NO-BREAK SPACE}"
_FIGURE = re.compile(r"\d x \d|\d (?:[KMGT]iB|B|[GT]B/s|tokens|% of|TFLOP/s)\b")

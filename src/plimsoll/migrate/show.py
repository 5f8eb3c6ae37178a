"""The comparison for people, at most 120 columns wide."""

import textwrap
from collections.abc import Iterator, Sequence

from plimsoll.memory.plan.job import GIB
from plimsoll.memory.plan.show import show
from plimsoll.migrate.comparison import SAVED_AS, Comparison
from plimsoll.migrate.holdings import node_peaks, rounding
from plimsoll.migrate.yaml import recipe_yaml

WIDTH = 118
_KEY_WIDTH = 66


def show_comparison(found: Comparison) -> str:
    """All three parts, and the two ways side by side."""
    blocks = [
        _head(found),
        [_title("1. What verl's way holds"), *_host(found)],
        _device(found),
        _wrapped("note: ", found.notes),
        [_title(f"2. The same job as a recipe (save it as {SAVED_AS})"), recipe_yaml(found.converted.recipe).rstrip()],
        _left(found),
        [_title("3. Our plan of it"), show(found.plan, found.ours, found.machine)],
        [_title("Side by side"), *_side_by_side(found)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _title(text: str) -> str:
    return f"{text}\n{'-' * len(text)}"


def _head(found: Comparison) -> list[str]:
    job = found.job
    launched = found.module or "a list of overrides"
    critic = ", with a critic" if job.critic else ""
    reference = ", with a reference" if job.reference else ""
    text = (
        f"{found.script}: {launched}, {job.strategy.upper()}{critic}{reference}; {job.nodes} x {job.ranks_per_node} "
        f"GPUs, shard groups of {job.actor.shard}, engine {job.engine} over {job.tensor_parallel}; "
        f"{job.actor.sizes.num_parameters / 1e9:.3g} B parameters"
    )
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"


def _host(found: Comparison) -> list[str]:
    per_node = found.job.ranks_per_node
    by_node = list(zip(*(phase.node_bytes(per_node) for phase in found.host), strict=True))
    alike: dict[tuple[int, ...], list[int]] = {}
    for node, column in enumerate(by_node):
        alike.setdefault(column, []).append(node)
    heads = [_nodes(nodes) for nodes in alike.values()]
    rows = [["Host memory of a node, GiB", *heads, "what the first rank holds, GiB"]]
    for index, phase in enumerate(found.host):
        held = ", ".join(f"{name} {_gib(size)}" for name, size in phase.ranks[0].items())
        rows.append([phase.name, *(_gib(column[index]) for column in alike), held or "nothing"])
    lines = list(_table(rows, last_is_text=True))
    lines += ["", *_differences(found, alike)]
    return lines


def _differences(found: Comparison, alike: dict[tuple[int, ...], list[int]]) -> Iterator[str]:
    for index, phase in enumerate(found.host):
        values = {column[index]: nodes for column, nodes in sorted(alike.items(), key=lambda item: item[1])}
        if not phase.loading or len({column[index] for column in alike}) < 2:
            continue
        most, least = max(values), min(values)
        at_most = [node for column, nodes in alike.items() if column[index] == most for node in nodes]
        at_least = [node for column, nodes in alike.items() if column[index] == least for node in nodes]
        more = most - least
        yield (
            f"{phase.name}: {_nodes(at_most)} hold{'s' if len(at_most) == 1 else ''} {more / 1e9:.0f} GB "
            f"({_gib(more)} GiB) more than {_nodes(at_least)}"
        )
    yield from _rounding(found)


def _rounding(found: Comparison) -> Iterator[str]:
    job = found.job
    factor = rounding(job.actor, job.strategy)
    transient = max(phase.transient_bytes for phase in found.host)
    text = (
        f"Pinned memory comes in powers of two, tensor by tensor: x {factor:.2f} on the shards of this model. "
        "A full copy that outlives its model's loading comes on top of the next one; that is not counted."
    )
    if transient:
        text += f" Ranks without a full copy hold up to {_gib(transient)} GiB for a moment besides; not counted either."
    yield from textwrap.wrap(text, WIDTH)


def _nodes(nodes: Sequence[int]) -> str:
    if len(nodes) == 1:
        return f"node {nodes[0]}"
    runs: list[list[int]] = []
    for node in nodes:
        if runs and runs[-1][-1] + 1 == node:
            runs[-1].append(node)
        else:
            runs.append([node])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"nodes {', '.join(parts)}"


def _device(found: Comparison) -> list[str]:
    capacity = found.machine.device_bytes
    rows = [["Device memory, GiB", "held", "work", "sum", f"of {_gib(capacity)}", "largest"]]
    for phase in found.device:
        parts = {**phase.residents, **phase.workspace}
        largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
        over = phase.device_bytes - capacity
        rows.append(
            [
                phase.name,
                _gib(sum(phase.residents.values())),
                _gib(sum(phase.workspace.values())),
                _gib(phase.device_bytes),
                f"{_gib(over)} over" if over > 0 else "fits",
                ", ".join(f"{name} {_gib(size)}" for name, size in largest),
            ]
        )
    return [
        *_table(rows, last_is_text=True),
        "Without the allocator's fragmentation; activations are a rough estimate.",
    ]


def _table(rows: Sequence[Sequence[str]], *, last_is_text: bool) -> Iterator[str]:
    """Names left, figures right; the last column, where it is text, wraps under itself."""
    figures = len(rows[0]) - 1 if last_is_text else len(rows[0])
    widths = [max(len(row[column]) for row in rows) for column in range(figures)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in range(1, figures))]
        line = "  ".join(cells)
        if last_is_text:
            first, *rest = textwrap.wrap(row[-1], max(WIDTH - len(line) - 2, 24)) or [""]
            yield f"{line}  {first}".rstrip()
            yield from (f"{' ' * len(line)}  {part}" for part in rest)
        else:
            yield line.rstrip()


def _left(found: Comparison) -> list[str]:
    if not found.converted.left:
        return []
    lines = ["Not in the recipe"]
    for item in found.converted.left.values():
        key = f"{item.key}={item.value}"
        key = key if len(key) <= _KEY_WIDTH else key[: _KEY_WIDTH - 1] + "…"
        first, *rest = textwrap.wrap(item.reason, WIDTH - _KEY_WIDTH - 4)
        lines.append(f"  {key.ljust(_KEY_WIDTH)}  {first}")
        lines += [f"{' ' * (_KEY_WIDTH + 4)}{part}" for part in rest]
    return lines


def _wrapped(prefix: str, notes: Sequence[str]) -> list[str]:
    return [
        line for note in notes for line in textwrap.wrap(note, WIDTH, initial_indent=prefix, subsequent_indent="  ")
    ]


def _side_by_side(found: Comparison) -> list[str]:
    job, plan = found.job, found.plan
    per_node = job.ranks_per_node
    loaded = node_peaks(tuple(phase for phase in found.host if phase.loading), per_node)
    whole, ours = node_peaks(found.host, per_node), plan.host.node_peak_bytes
    apart = max(max(nodes) - min(nodes) for nodes in (phase.node_bytes(per_node) for phase in found.host))
    fullest = max(found.device, key=lambda phase: phase.device_bytes)
    our_fullest = max(plan.phases, key=lambda phase: phase.device_bytes)
    load = plan.phase("load")
    rows = [["GiB", "verl", "plimsoll"]]
    if load is not None:
        rows.append(["host of a node while models are loaded", _gib(max(loaded)), _gib(load.host_bytes * per_node)])
    rows += [
        ["host of a node, whole run", _gib(max(whole)), _gib(max(ours))],
        ["largest difference between two nodes in a phase", _gib(apart), _gib(max(ours) - min(ours))],
        ["device, fullest phase", _gib(fullest.device_bytes), _gib(our_fullest.device_bytes)],
        ["page cache of a node that is counted on", "0.0", _gib(max(plan.host.file_cache_bytes, default=0))],
    ]
    return list(_table(rows, last_is_text=False))

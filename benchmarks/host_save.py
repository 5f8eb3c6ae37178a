"""Host memory and seconds of writing a sharded model: ours beside three ways that are in use.

    python benchmarks/host_save.py --json --quick   # untied and tied, 0.1 B parameters
    python benchmarks/host_save.py --json           # 0.5 B; untied, tied, MoE; export on both meshes; save

Four gloo ranks, started anew for every row, with fp32 parameters. `export` writes a bf16 Hugging Face folder, `save`
the fp32 weights and two moments of Adam. Per rank, MiB:

    final_mib               what the rank holds: its parameters and buffers, for `save` its moments too
    peak_over_final_mib     highest growth of RssAnon while it writes, less `final_mib`
    steady_over_final_mib   the growth that is left afterwards, less the same
    read_mib, written_mib   bytes through read and write calls: sockets are in it, mapped files are not

Growth counts from before the model is made. `seconds` is the slowest rank's. Ours brings the bytes to disk (fsync) and,
for `save`, hashes them; the others leave them in the page cache or sync as they do by themselves. The row `budget` is
one rank that writes 256 MiB of fp32 state, as it is and as bf16, with 32 MiB of staging buffers; its
`high_water_growth_mib` is the kernel's own mark (VmHWM, pages of files included). The last line is one JSON object.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import transformers
from support import save_ways
from support.launch import Ranks, make_mesh
from support.memory import (
    MIB,
    PeakSampler,
    Stopwatch,
    anonymous_bytes,
    io_bytes,
    reset_high_water_mark,
    settle,
    status_bytes,
    storage_bytes,
)
from support.models import KINDS, model_config, write_checkpoint
from support.rows import add_options, show, show_head
from transformers.utils.logging import disable_progress_bar

from plimsoll.weights.control import ControlGroup

NUM_RANKS = 4
PEAK_LIMIT, STEADY_LIMIT = 256.0, 32.0  # MiB over what the rank holds
BUDGET_STATE, BUDGET, BUDGET_LIMIT = 256, 32, 96.0  # MiB

WAYS: dict[str, dict[str, save_ways.Way]] = {
    "export": {
        "ours": save_ways.our_export,
        "rank0": save_ways.rank0_export,
        "full": save_ways.full_export,
        "dcp": save_ways.dcp_export,
    },
    "save": {
        "ours": save_ways.our_save,
        "rank0": save_ways.rank0_save,
        "full": save_ways.full_save,
        "dcp": save_ways.dcp_save,
    },
}


@dataclass(slots=True, kw_only=True, frozen=True)
class Case:
    """What is written, of which model, from which mesh."""

    what: str
    kind: str
    mesh: str

    @property
    def name(self) -> str:
        return f"{self.what}-{self.kind}-{self.mesh}"


def cases(quick: bool) -> Iterator[Case]:
    for what in WAYS:
        for kind in KINDS[:2] if quick else KINDS:
            for mesh in ("plain",) if quick or what == "save" else ("plain", "hybrid"):
                yield Case(what=what, kind=kind, mesh=mesh)


def measure(case: Case, way: str, source: Path, size: str, folder: Path) -> dict[str, Any]:
    """One rank of one row."""
    disable_progress_bar()
    mesh, control = make_mesh(case.mesh), ControlGroup()
    control.barrier()
    settle()
    base = anonymous_bytes()
    trained = save_ways.build(model_config(case.kind, size), source, mesh, control, moments=case.what == "save")
    state = [value for held in trained.optimizer.state.values() for value in held.values()]
    final = storage_bytes([*trained.model.parameters(), *trained.model.buffers(), *state])
    settle()
    read, written = io_bytes("rchar"), io_bytes("wchar")
    dist.barrier()
    with PeakSampler() as sampler:
        watch = Stopwatch()
        WAYS[case.what][way](trained, folder)
        seconds = watch.seconds
    read, written = io_bytes("rchar") - read, io_bytes("wchar") - written
    settle()
    return {
        "final": final,
        "peak": sampler.peak - base - final,
        "steady": anonymous_bytes() - base - final,
        "read": read,
        "written": written,
        "seconds": seconds,
    }


def measure_budget(folder: Path) -> dict[str, Any]:
    """One rank, 256 MiB of fp32 state written as bf16 and as it is, within 32 MiB of staging buffers."""
    state = {f"part_{i}": torch.full((1024, 8192), float(i)) for i in range(BUDGET_STATE // 32)}
    settle()
    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        target = folder / str(dtype)
        target.mkdir()
        reset_high_water_mark()
        begin = status_bytes("VmHWM")
        save_ways.write_state(state, dtype, target, BUDGET * MIB)
        found[str(dtype).removeprefix("torch.")] = round((status_bytes("VmHWM") - begin) / MIB, 2)
    return {"state_mib": BUDGET_STATE, "budget_mib": BUDGET, "high_water_growth_mib": found}


def row(case: Case, way: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The published figures of one way."""

    def per_rank(key: str) -> list[float]:
        return [round(rank[key] / MIB, 2) for rank in ranks]

    return {
        "case": case.name,
        "way": way,
        "final_mib": per_rank("final"),
        "peak_over_final_mib": per_rank("peak"),
        "steady_over_final_mib": per_rank("steady"),
        "read_mib": per_rank("read"),
        "written_mib": per_rank("written"),
        "seconds": round(max(rank["seconds"] for rank in ranks), 3),
    }


def within_limits(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """The limits of our way in one case."""
    mine = next((entry for entry in rows if entry["way"] == "ours"), None)
    if mine is None:
        return {}
    return {
        "peak": max(mine["peak_over_final_mib"]) <= PEAK_LIMIT,
        "steady": max(mine["steady_over_final_mib"]) <= STEADY_LIMIT,
    }


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rows, with what every case was checked for."""
    size = args.size or ("quick" if args.quick else "full")
    ranks, result, ok = Ranks(("support.save_ways",)), [], {}
    ranks.run(os.getpid, NUM_RANKS)  # the server starts with the first group: not in the first row's time
    show_head("written")
    for case in cases(args.quick):
        if args.cases and case.name not in args.cases:
            continue
        source = folder / f"{case.kind}-{size}"
        if not (source / "config.json").exists():
            write_checkpoint(model_config(case.kind, size), source)
        for way in args.ways:
            with TemporaryDirectory(dir=folder) as target:
                found = ranks.run(measure, NUM_RANKS, case, way, source, size, Path(target))
            result.append(row(case, way, found))
            show(result[-1], "written_mib")
        ok[case.name] = within_limits([entry for entry in result if entry["case"] == case.name])
        print(
            f"{case.name}: " + ", ".join(f"{k} {'ok' if v else 'FAILED'}" for k, v in ok[case.name].items()),
            file=sys.stderr,
        )
    with TemporaryDirectory(dir=folder) as target:
        budget = ranks.run(measure_budget, 1, Path(target))[0]
    ok["budget"] = {"high_water": max(budget["high_water_growth_mib"].values()) <= BUDGET_LIMIT}
    print(f"budget: {budget} {'ok' if ok['budget']['high_water'] else 'FAILED'}", file=sys.stderr)
    return {"cases": result, "budget": budget, "ok": ok, "size": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    add_options(parser, WAYS["save"], "export-tied-plain")
    args = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    with TemporaryDirectory() as temporary:
        result = run(args, args.folder or Path(temporary))
    result |= {
        "benchmark": "host_save",
        "ranks": NUM_RANKS,
        "limits": {"peak_mib": PEAK_LIMIT, "steady_mib": STEADY_LIMIT, "budget_high_water_mib": BUDGET_LIMIT},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

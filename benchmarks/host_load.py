"""Host memory and seconds of bringing a checkpoint into a sharded model: ours beside three ways that are in use.

    python benchmarks/host_load.py --json --quick   # untied and tied, fp32, 0.1 B parameters, under a minute on 2 cores
    python benchmarks/host_load.py --json           # 0.5 B; untied, tied, MoE; fp32 and bf16; plain and hybrid mesh

Four gloo ranks, started anew for every row; bf16 files in the page cache. Per rank, MiB:

    final_mib               its own parameters and buffers
    peak_over_final_mib     highest growth of RssAnon during build, sharding and load, less `final_mib`
    steady_over_final_mib   the growth that is left afterwards (garbage collected, freed memory returned), less the same
    read_mib                bytes through read calls: mapped files, as transformers reads them, are not in it

RssAnon is memory that no file stands behind, sampled every 10 ms; growth counts from where process groups exist and
everything is imported. `seconds` is the slowest rank's, from the config to the loaded model, `cpu_seconds` what each
rank computed (other work on the machine hardly changes it). Every way of a case must
give the same bits in every parameter. The last line is one JSON object; with `--json` it is on one line.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import transformers
from support.launch import Ranks, make_mesh
from support.load_ways import WAYS
from support.memory import MIB, PeakSampler, Stopwatch, anonymous_bytes, bits_by_name, io_bytes, module_bytes, settle
from support.models import DTYPES, KINDS, model_config, warm_page_cache, write_checkpoint
from support.rows import add_options, show, show_head
from transformers.utils.logging import disable_progress_bar

from plimsoll.weights.control import ControlGroup

NUM_RANKS = 4
PEAK_LIMIT, STEADY_LIMIT = 256.0, 32.0  # MiB over a rank's own bytes
EQUAL_SHARE, EQUAL_MIB = 0.05, 16.0  # ranks differ by no more than one of the two


@dataclass(slots=True, kw_only=True, frozen=True)
class Case:
    """One model in one dtype on one mesh."""

    kind: str
    dtype: str
    mesh: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.dtype}-{self.mesh}"


def cases(quick: bool) -> Iterator[Case]:
    for kind in KINDS[:2] if quick else KINDS:
        for dtype in ("float32",) if quick else DTYPES:
            for mesh in ("plain",) if quick else ("plain", "hybrid"):
                yield Case(kind=kind, dtype=dtype, mesh=mesh)


def measure(case: Case, way: str, folder: Path) -> dict[str, Any]:
    """One rank of one row."""
    disable_progress_bar()
    mesh, control = make_mesh(case.mesh), ControlGroup()
    control.barrier()
    settle()
    base, read = anonymous_bytes(), io_bytes("rchar")
    dist.barrier()
    with PeakSampler() as sampler:
        watch, cpu = Stopwatch(), time.process_time()
        model = WAYS[way](folder, DTYPES[case.dtype], mesh, control)
        seconds, cpu = watch.seconds, time.process_time() - cpu
    read = io_bytes("rchar") - read
    settle()
    steady = anonymous_bytes()
    final = module_bytes(model)
    return {
        "final": final,
        "peak": sampler.peak - base - final,
        "steady": steady - base - final,
        "read": read,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "tied": model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight"),
        "bits": bits_by_name(model),
    }


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
        "seconds": round(max(rank["seconds"] for rank in ranks), 3),
        "cpu_seconds": [round(rank["cpu_seconds"], 3) for rank in ranks],
    }


def same_weights(case: Case, found: dict[str, list[dict[str, Any]]]) -> bool:
    """Every way gave the same bits, and the tie of the config."""
    sums = [{name: sum(rank["bits"][name] for rank in ranks) for name in ranks[0]["bits"]} for ranks in found.values()]
    ties = {rank["tied"] for ranks in found.values() for rank in ranks}
    return all(other == sums[0] for other in sums) and ties == {case.kind == "tied"}


def within_limits(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """The limits of our way in one case; time only where the rank-0 way ran beside it."""
    by_way = {entry["way"]: entry for entry in rows}
    if "ours" not in by_way:
        return {}
    mine = by_way["ours"]
    peaks = [final + over for final, over in zip(mine["final_mib"], mine["peak_over_final_mib"], strict=True)]
    found = {
        "peak": max(mine["peak_over_final_mib"]) <= PEAK_LIMIT,
        "steady": max(mine["steady_over_final_mib"]) <= STEADY_LIMIT,
        "ranks_equal": max(peaks) - min(peaks) <= max(EQUAL_SHARE * max(peaks), EQUAL_MIB),
    }
    if "rank0" in by_way:
        found["seconds"] = mine["seconds"] < by_way["rank0"]["seconds"]
    return found


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rows, with what every case was checked for."""
    size = args.size or ("quick" if args.quick else "full")
    ranks, result, ok = Ranks(("support.load_ways",)), [], {}
    ranks.run(os.getpid, NUM_RANKS)  # the server starts with the first group: not in the first row's time
    show_head("read")
    for case in cases(args.quick):
        if args.cases and case.name not in args.cases:
            continue
        source = folder / f"{case.kind}-{size}"
        if not (source / "config.json").exists():
            write_checkpoint(model_config(case.kind, size), source)
            os.sync()  # else the first way shares the disk with it
        found: dict[str, list[dict[str, Any]]] = {}
        for way in args.ways:
            warm_page_cache(source)
            found[way] = ranks.run(measure, NUM_RANKS, case, way, source)
            result.append(row(case, way, found[way]))
            show(result[-1], "read_mib")
        ok[case.name] = {
            **within_limits([entry for entry in result if entry["case"] == case.name]),
            "same_weights": same_weights(case, found),
        }
        print(
            f"{case.name}: " + ", ".join(f"{k} {'ok' if v else 'FAILED'}" for k, v in ok[case.name].items()),
            file=sys.stderr,
        )
    return {"cases": result, "ok": ok, "size": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    add_options(parser, WAYS, "untied-float32-plain")
    args = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    with TemporaryDirectory() as temporary:
        result = run(args, args.folder or Path(temporary))
    result |= {
        "benchmark": "host_load",
        "ranks": NUM_RANKS,
        "limits": {"peak_mib": PEAK_LIMIT, "steady_mib": STEADY_LIMIT},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

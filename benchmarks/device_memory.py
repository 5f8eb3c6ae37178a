"""Device memory of log-probs and updates with a large vocabulary: full logits, and our worker, on the same batches.

    python benchmarks/device_memory.py --json                              # one GPU of at least 139 GiB
    python benchmarks/device_memory.py --json --device cpu --size tiny     # a CPU, to see that all of it runs

A model of 1.1 B parameters of Qwen2's shape with 151936 token ids: fp32 master weights, bf16 compute, FSDP2 on 1 rank,
AdamW, every layer recomputed in backward. A step is ten log-prob and ten update micro-batches of about 12288 tokens in
sequences of one random length each. Each variant runs in processes of its own, one after the other, `--repeats` times:

    default_full      torch's default allocator, logits of all tokens at once
    expandable_full   the same with expandable segments
    ours              our worker and allocator policy, phases entered as in training

Peaks are per phase, reset at its border. Throughput counts the tokens of a log-prob once and of an update three times,
over the steps after the first. The last line is one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

VARIANTS = ("default_full", "expandable_full", "ours")
SHAPES: dict[str, dict[str, int]] = {
    "full": {"hidden": 1536, "intermediate": 8960, "layers": 16, "heads": 12, "kv_heads": 2, "vocab": 151936},
    "tiny": {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 997},
}
TOKENS = {"full": (12288, 300, 4096), "tiny": (256, 16, 96)}
"""Tokens of a micro-batch, shortest and longest sequence."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--size", default="full", choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=10, help="of each kind in a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def child_environment(variant: str) -> dict[str, str]:
    """The allocator's mode is read when torch is imported."""
    from plimsoll.memory.allocator import CURRENT_NAME, OLD_NAME, environment

    variables = {name: value for name, value in os.environ.items() if name not in (CURRENT_NAME, OLD_NAME)}
    return variables if variant == "default_full" else variables | environment("trainer", {})


def run_child(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """One variant in a process of its own."""
    command = [sys.executable, __file__, "--child", variant, "--device", args.device, "--size", args.size]
    command += ["--steps", str(args.steps), "--micro-batches", str(args.micro_batches)]
    done = subprocess.run(command, env=child_environment(variant), capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        return {"variant": variant, "failed": True, "error": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.splitlines()[-1])


def child(args: argparse.Namespace) -> dict[str, Any]:
    """Run and measure one variant in this process."""
    from support.device_memory_work import Work, run_full, run_ours

    work = Work(
        shape=SHAPES[args.size],
        tokens=TOKENS[args.size],
        device=args.device,
        steps=args.steps,
        micro_batches=args.micro_batches,
    )
    with TemporaryDirectory() as folder:
        return (run_ours if args.child == "ours" else run_full)(work, Path(folder)) | {"variant": args.child}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats; peaks are the highest of them."""
    good = [run for run in runs if not run.get("failed")]
    if not good:
        return {"failed": True, "errors": [run.get("error") for run in runs]}
    found: dict[str, Any] = {"runs": len(good), "tokens_per_second": statistics.median(r["throughput"] for r in good)}
    for phase in ("logprob", "update"):
        rows = [row for run in good for row in run["rows"] if row["phase"] == phase]
        ratios = [row["reserved_peak"] / row["allocated_peak"] for row in rows if row["allocated_peak"]]
        found[phase] = {
            "allocated_gib": max(row["allocated"] for row in rows) / 2**30,
            "allocated_peak_gib": max(row["allocated_peak"] for row in rows) / 2**30,
            "reserved_gib": max(row["reserved"] for row in rows) / 2**30,
            "reserved_peak_gib": max(row["reserved_peak"] for row in rows) / 2**30,
            "reserved_over_peak_allocated": max(ratios, default=None),
        }
    found["alloc_retries"] = max(run["alloc_retries"] for run in good)
    found["losses"] = good[0].get("losses")
    return found


def main() -> None:
    """Run every variant `--repeats` times, in turns, so that a drift of the machine meets all alike."""
    args = arguments()
    if args.child:
        print(json.dumps(child(args)))
        return
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in args.variants}
    for repeat in range(args.repeats):
        for variant in args.variants:
            runs[variant].append(run_child(args, variant))
            print(f"run {repeat + 1} {variant}: {json.dumps(summary(runs[variant][-1:]))}", file=sys.stderr, flush=True)
    variants = {variant: summary(found) for variant, found in runs.items()}
    others = [found["tokens_per_second"] for name, found in variants.items() if name != "ours" and "runs" in found]
    ratio = None
    if others and "runs" in variants.get("ours", {}):
        ratio = variants["ours"]["tokens_per_second"] / max(others)
    import torch
    import transformers

    result = {
        "variants": variants,
        "ours_over_best_other": ratio,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
    }
    if args.json:
        print(json.dumps(result))
        return
    for variant, found in variants.items():
        print(variant, json.dumps(found, indent=2))
    print("ours over the best other:", ratio)


if __name__ == "__main__":
    main()

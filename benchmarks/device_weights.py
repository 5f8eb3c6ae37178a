"""What moving weights costs on one device: load, offload, optimizer state, reference, save.

    python benchmarks/device_weights.py --json                                  # one GPU of 139 GiB, 7.6 B parameters
    python benchmarks/device_weights.py --json --device cpu --size tiny          # a CPU, to see that all of it runs
    python benchmarks/device_weights.py --json --parts load offload --layers 14 --folder /fast/disk

A random bf16 checkpoint of Qwen2's shape is written first (15 GB at the default size; what is in `--folder` is used).
Every part runs in a process of its own and prints its figures when it ends; one that fails or takes too long says so,
and the others go on. GB/s are 10^9 bytes a second. The last line is one JSON object.

    load        load_sharded to the device as fp32 and bf16
    offload     fp32 parameters and two moments to the host arena and back
    pinned      the parameters alone in torch's pinned memory, beside it
    optimizer   AdamW on the device, with streamed moments, and with FSDP2's CPUOffloadPolicy
    reference   bringing frozen bf16 weights in for a pass, in each placement
    save        exporting the fp32 model as bf16
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from support.device_parts import PARTS, Settings, make_checkpoint
from transformers.utils.logging import disable_progress_bar

SHAPES: dict[str, dict[str, int]] = {
    "full": {"layers": 28, "hidden": 3584, "intermediate": 18944, "heads": 28, "kv_heads": 4, "vocab": 152064},
    "tiny": {"layers": 3, "hidden": 64, "intermediate": 192, "heads": 4, "kv_heads": 2, "vocab": 1000},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--size", default="full", choices=list(SHAPES), help="what the shape is where it is not given")
    for name in SHAPES["full"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--optimizer-layers", type=int, help="device and streamed AdamW; default: --layers")
    parser.add_argument("--policy-layers", type=int, help="all three; CPUOffloadPolicy pins 16 bytes a parameter (6)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--folder", type=Path, help="where checkpoint and export are written; default: a temporary one")
    parser.add_argument("--part-seconds", type=float, default=180, help="longest time of one part")
    parser.add_argument("--seconds", type=float, default=460, help="parts that would start later are left out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, value in SHAPES[args.size].items():
        if vars(args)[name] is None:
            setattr(args, name, value)
    args.optimizer_layers = args.optimizer_layers or args.layers
    args.policy_layers = args.policy_layers or min(6, args.layers)
    return args


def settings(args: argparse.Namespace, folder: Path) -> Settings:
    return Settings(
        device=args.device,
        layers=args.layers,
        hidden=args.hidden,
        intermediate=args.intermediate,
        heads=args.heads,
        kv_heads=args.kv_heads,
        vocab=args.vocab,
        optimizer_layers=args.optimizer_layers,
        policy_layers=args.policy_layers,
        repeats=args.repeats,
        folder=folder,
    )


def run_part(name: str, args: argparse.Namespace, folder: Path, seconds: float) -> dict[str, Any]:
    """One part in a new process: its figures, or why there are none."""
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder)]
    for key in ("device", "optimizer_layers", "policy_layers", "repeats", *SHAPES["full"]):
        command += [f"--{key.replace('_', '-')}", str(vars(args)[key])]
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": f"exit code {done.returncode}; see stderr"}
    return {**json.loads(lines[-1]), "part_seconds": round(time.perf_counter() - begin, 1)}


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All parts, each told on stderr as soon as it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    found: dict[str, Any] = {}
    for name in ["make", *args.parts]:
        left = args.seconds - (time.perf_counter() - begin)
        found[name] = (
            run_part(name, args, folder, min(args.part_seconds, left)) if left > 5 else {"error": "no time left"}
        )
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
        if name == "make" and "error" in found[name]:
            break
    return found


def child(args: argparse.Namespace) -> None:
    """The body of a part's process."""
    disable_progress_bar()
    chosen = settings(args, args.folder)
    if args.device == "cuda":
        torch.cuda.init()
    work = make_checkpoint if args.child == "make" else PARTS[args.child]
    print(json.dumps(work(chosen)), flush=True)
    # Tearing NCCL and CUDA down is not measured, and must not spoil what was.
    os._exit(0)


def main() -> None:
    args = arguments()
    if args.child:
        child(args)
        return
    with TemporaryDirectory() as temporary:
        found = run(args, args.folder or Path(temporary))
    result = {
        "benchmark": "device_weights",
        "parts": found,
        "shape": {name: vars(args)[name] for name in SHAPES["full"]},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

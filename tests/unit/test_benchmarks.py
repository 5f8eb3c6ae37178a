"""The benchmarks of weights run, check their limits and print one JSON object of the shape that readers count on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
RANKS = 4


def result_of(script: str, *options: str) -> dict[str, Any]:
    """The object on the last line of stdout."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--json", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def check_rows(rows: list[dict[str, Any]], expected: set[tuple[str, str]]) -> None:
    assert {(row["case"], row["way"]) for row in rows} == expected
    for row in rows:
        for key in ("final_mib", "peak_over_final_mib", "steady_over_final_mib", "read_mib"):
            assert len(row[key]) == RANKS
            assert all(isinstance(value, float) for value in row[key])
        assert row["seconds"] > 0
        assert min(row["final_mib"]) > 0


def test_host_load_compares_all_ways_and_finds_the_same_weights() -> None:
    cases = ("untied-float32-plain", "tied-float32-plain")
    result = result_of("host_load.py", "--quick", "--size", "tiny")
    ways = ("ours", "rank0", "rank0_offload", "from_pretrained")
    check_rows(result["cases"], {(case, way) for case in cases for way in ways})
    for case in cases:
        assert result["ok"][case]["same_weights"]
        assert result["ok"][case]["peak"]
        assert result["ok"][case]["steady"]
    sizes = {row["case"]: sum(row["final_mib"]) for row in result["cases"] if row["way"] == "ours"}
    for row in result["cases"]:  # what a rank holds in the end does not depend on the way
        assert sum(row["final_mib"]) == pytest.approx(sizes[row["case"]], abs=0.05)


def test_host_load_reads_experts_and_hybrid_meshes() -> None:
    case = "moe-bfloat16-hybrid"
    result = result_of("host_load.py", "--size", "tiny", "--cases", case, "--ways", "ours", "from_pretrained")
    check_rows(result["cases"], {(case, "ours"), (case, "from_pretrained")})
    assert result["ok"][case]["same_weights"]


def test_host_save_compares_all_ways_and_keeps_its_budget() -> None:
    cases = ("export-tied-plain", "save-tied-plain")
    result = result_of("host_save.py", "--quick", "--size", "tiny", "--cases", *cases)
    ways = ("ours", "rank0", "full", "dcp")
    check_rows(result["cases"], {(case, way) for case in cases for way in ways})
    assert result["ok"]["budget"]["high_water"]
    assert all(result["ok"][case]["peak"] for case in cases)


def test_device_weights_runs_every_part_on_a_cpu() -> None:
    result = result_of("device_weights.py", "--device", "cpu", "--size", "tiny", "--repeats", "1")
    parts = result["parts"]
    assert {"make", "load", "offload", "pinned", "optimizer", "reference", "save"} == set(parts)
    assert {name: part["error"] for name, part in parts.items() if "error" in part} == {}
    assert parts["offload"]["moments_intact"]
    assert parts["offload"]["arena_over_exact"] <= 1.2  # small storages: an alignment of 64 bytes counts
    assert parts["optimizer"]["synthetic_gradients"]["same_bits"]

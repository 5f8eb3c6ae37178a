"""Run folders for the tests of the report page, written by the classes that a run writes its own with."""

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plimsoll.jsonl import JsonlWriter, json_line
from plimsoll.memory.ledger import GIB, Ledger, LedgerRow
from tests.ledger_rows import ROW

RECIPE: dict[str, Any] = {
    "name": "small",
    "seed": 0,
    "model": {"path": "some/model", "config": None, "init": "pretrained"},
    "data": {"train": "task:reverse_string", "task": {"length": 6}},
    "algorithm": {"name": "dapo"},
    "train": {"steps": 12, "learning_rate": 1e-4},
}

PHASES = ("rollout", "logprob", "update", "sync")


def metrics_rows(num_steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with every kind of key; reward/part/ONLY is in odd steps, row 0 is an evaluation."""
    source = random.Random(seed)
    rows: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": source.random(), "eval/n": 64.0, "time/eval": 0.25}]
    for step in range(1, num_steps + 1):
        mean = source.random()
        row = {"step": step, "reward/mean": mean, "reward/min": mean - 1, "reward/max": mean + 1}
        row |= {"response/length_mean": 90 * source.random(), "response/length_max": 100.0}
        row |= {"response/truncated_share": source.random(), "actor/entropy": source.random(), "loss": -source.random()}
        row |= {"actor/kl_ref": source.random() / 3, "actor/approx_kl": source.random() / 7}
        row |= {"train/grad_norm": source.random(), "train/learning_rate": 1e-5 * step, "train/tokens": 4096.0}
        row |= {"actor/clipped_low": source.random(), "actor/clipped_high": 0.0}
        row |= {"mismatch/logprob_diff_mean": 1e-6, "mismatch/logprob_diff_max": 1e-4 * source.random()}
        row |= {"mismatch/kl": 1e-9 * source.random(), "mismatch/perplexity_ratio": 1 + 1e-8 * source.random()}
        row |= {"mismatch/weight_mean": 1.0, "mismatch/weight_max": 1.5, "something/else": source.random()}
        row |= {"advantage/no_signal_groups": 3.0, "rollout/groups": 32.0, "speed/tokens_per_second": 9e3 + step}
        row |= {"time/rollout": source.random(), "time/generate": 0.1, "time/update": 1 / 3, "time/sync": 0.001}
        if step % 2:
            row["reward/part/only"] = source.random()
        if step % 5 == 0:
            row |= {"eval/accuracy": source.random(), "time/eval": 0.2}
        rows.append(row)
    return rows


def ledger_row(step: int, phase: str, rank: int, *, device: bool) -> LedgerRow:
    """A row with plausible numbers that all differ."""
    unit = GIB + 1000 * step + 10 * rank + len(phase)
    row = replace(
        ROW,
        step=step,
        phase=phase,
        rank=rank,
        device=f"cuda:{rank}" if device else "cpu",
        pid=100 + rank,
        host_anonymous=unit,
        host_anonymous_peak=unit + 77,
        host_growth=0,
        host_growth_peak=0,
        host_file=1000,
        host_shared=2000,
        host_pinned=3000 if device else None,
        host_available=64 * GIB,
        host_limit=128 * GIB,
        residents={
            "actor_parameters": 3_000_000,
            "kv_cache": 5_000_000 + step,
            "new_thing": 400_000,
            "moments": 6_000_000,
        },
        on_host=["moments"] if device else [],
        predicted={"actor_parameters": None, "kv_cache": 5_000_000, "new_thing": None, "moments": None},
        allocator="expandable" if device else "none",
        seconds=0.1 + 0.001 * step,
    )
    if not device:
        return row
    return replace(
        row,
        device_allocated=3 * unit,
        device_reserved=4 * unit,
        device_allocated_peak=5 * unit,
        device_reserved_peak=6 * unit,
        device_used=7 * unit,
        device_total=16 * GIB,
        device_non_torch=3 * unit,
        device_released=0,
        fragmentation=unit,
        unattributed=3 * unit - 8_400_000 - step,
    )


def sample_row(step: int, sample: int, **changes: Any) -> dict[str, Any]:
    """A row of rollouts/step_N.jsonl."""
    row = {"step": step, "group": f"0:{sample}", "sample": sample, "prompt": "12>", "response": f"2{step}"}
    row |= {"answer": "21", "reward": sample / 4, "score": sample / 4, "score_parts": {"format": 0.5}}
    row |= {"score_status": "ok", "score_detail": "", "prompt_length": 3, "response_length": 2 + sample}
    return row | {"finish_reason": "stop", "masked": False, "version": step - 1} | changes


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """The rows as a run writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = JsonlWriter(path)
    for row in rows:
        writer.write(row)
    writer.close()
    return path


def small_run(
    path: Path,
    *,
    num_steps: int = 12,
    ranks: int = 1,
    device: bool = False,
    responses: tuple[str, ...] = (),
    **recipe: Any,
) -> Path:
    """A whole run folder; `responses` are added to the last step's rollouts."""
    path.mkdir(parents=True)
    (path / "recipe.json").write_text(json.dumps(RECIPE | {"name": path.name} | recipe), encoding="utf-8")
    (path / "plan.json").write_text(json.dumps({"steps": num_steps, "device": "cpu"}), encoding="utf-8")
    write_lines(path / "metrics.jsonl", metrics_rows(num_steps, seed=len(path.name)))
    ledger = Ledger(path / "memory.jsonl")
    for step in range(num_steps + 1):
        for phase in PHASES if step else ("load", "eval"):
            for rank in range(ranks):
                ledger.write(ledger_row(step, phase, rank, device=device))
    ledger.close()
    for step in range(1, num_steps + 1):
        rows = [sample_row(step, sample) for sample in range(4)]
        if step == num_steps:
            rows += [sample_row(step, 4 + at, response=text) for at, text in enumerate(responses)]
        write_lines(path / "rollouts" / f"step_{step:06d}.jsonl", rows)
    return path


def torn(row: Mapping[str, Any]) -> bytes:
    """The first half of a row, as a killed process leaves it."""
    line = json_line(row)
    return line[: len(line) // 2]

"""`plimsoll plan`: a recipe in, the plan out. No torch, no weights, no data."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from plimsoll.config.checks import check_plan
from plimsoll.config.files import is_supervised
from plimsoll.config.load import load_recipe
from plimsoll.memory.plan.capacity import Objective, assumptions, job_of, machine
from plimsoll.memory.plan.choose import plan, plan_without_advice
from plimsoll.memory.plan.curve import kv_curve
from plimsoll.memory.plan.show import show

REFUSED = 2
"""Exit code of a plan that does not fit."""


def run(path: Path, overrides: Sequence[str], *, sft: bool, as_json: bool, curve: bool) -> int:
    """Print the plan, on one line as JSON or as text; returns the exit code. RefusedError: it cannot be planned."""
    recipe = load_recipe(path, overrides)
    objective: Objective = "supervised" if sft or is_supervised(path) else "policy"
    for note in check_plan(recipe, objective):
        print(f"plimsoll: {note}", file=sys.stderr)
    have = machine(recipe)
    job = job_of(recipe, objective)
    found = plan(job, have)
    found = found.model_copy(update={"notes": (*assumptions(job, have), *found.notes)})
    points = kv_curve(job, lambda changed: plan_without_advice(changed, have)) if curve else ()
    if as_json:
        line: dict[str, JsonValue] = dict(found.as_json())
        if curve:
            line["curve"] = [
                {"kv_bytes": p.kv_bytes, "moved_bytes_per_step": p.moved_bytes_per_step, "fits": p.fits} for p in points
            ]
        print(json.dumps(line, allow_nan=False), flush=True)
    else:
        print(show(found, job, have, points), flush=True)
    return 0 if found.fits else REFUSED

"""`plimsoll plan --from-verl SCRIPT`: what verl's way holds, the same job as a recipe, and our plan of it."""

import json
from collections.abc import Sequence
from pathlib import Path

from plimsoll.migrate.comparison import compare
from plimsoll.migrate.show import show_comparison


def run(script: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Print the comparison; 0: our plan fits, 2: it does not. RefusedError: a script that cannot be read, a model that
    is not known, a device of unknown size."""
    found = compare(script, overrides)
    if as_json:
        print(json.dumps(found.as_json(), allow_nan=False), flush=True)
    else:
        print(show_comparison(found), flush=True)
    return 0 if found.plan.fits else 2

"""Write what `plimsoll plan` prints today into the pages that show it: `python tools/refresh_plan_examples.py`."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.plan_examples import PAGES, refreshed  # noqa: E402

if __name__ == "__main__":
    os.chdir(ROOT)
    for page in PAGES:
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page)

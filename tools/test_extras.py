"""Each extra alone in a fresh virtual environment: install it, run its tests and those of the errors without others.

`python tools/test_extras.py [NAME …] [-- PIP_OPTION …]` (or `make test-extras`). Needs about 1.5 GB of disk at a time.
"""

import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.extras import EXTRAS  # noqa: E402

WITHOUT = "tests/e2e/test_extras.py"


def check(extra: str, pip_options: list[str]) -> tuple[str, str, float]:
    """(result of the extra's tests, of the errors without others, seconds)."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"plimsoll-{extra}-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        install = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check", *pip_options]
        subprocess.run(
            [*install, "-c", "constraints.txt", f".[{extra}]", "pytest", "pytest-timeout"], cwd=ROOT, check=True
        )
        own = run_tests(python, "--extra", extra)
        without = run_tests(python, WITHOUT)
    return own, without, time.monotonic() - start


def run_tests(python: str, *arguments: str) -> str:
    """The last line of pytest; begins with FAILED where it failed or where there was nothing to run."""
    command = [python, "-m", "pytest", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not re.search(r"\d+ passed", last):
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        return f"FAILED: {last}"
    return last


def main() -> int:
    """The table on stdout; 1 when anything failed."""
    names, _, options = " ".join(sys.argv[1:]).partition("--")
    rows = {extra: check(extra, options.split()) for extra in names.split() or EXTRAS}
    print("| extra | its tests | errors without the others | seconds |\n|---|---|---|---|")
    for extra, (own, without, seconds) in rows.items():
        print(f"| {extra} | {own} | {without} | {seconds:.0f} |")
    return int(any("FAILED" in own + without for own, without, _ in rows.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Each extra alone in a fresh virtual environment: install it, run its tests and those of the errors without others.

`python tools/test_extras.py [NAME …] [-- PIP_OPTION …]` (or `make test-extras`). Needs about 1.5 GB of disk at a time.
"""

import re
import shutil
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
SOURCE = ("pyproject.toml", "README.md", "LICENSE", "src")
"""What is installed from, in a copy: a build here would take up, and leave behind, a build/ folder."""


def check(extra: str, pip_options: list[str]) -> tuple[str, str, float]:
    """(result of the extra's tests, of the errors without others, seconds)."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"plimsoll-{extra}-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        project = copy_source(Path(folder) / "project")
        install = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check", *pip_options]
        wanted = ["-c", "constraints.txt", f"{project}[{extra}]", "pytest", "pytest-timeout"]
        if subprocess.run([*install, *wanted], cwd=ROOT, check=False).returncode:
            own = without = "FAILED to install"
        else:
            own, without = run_tests(python, "--extra", extra), run_tests(python, WITHOUT)
    return own, without, time.monotonic() - start


def copy_source(folder: Path) -> Path:
    """The folder, with what pip builds from."""
    folder.mkdir()
    for name in SOURCE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)
    return folder


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
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    names, options = sys.argv[1:at] or list(EXTRAS), sys.argv[at + 1 :]
    if unknown := sorted(set(names) - set(EXTRAS)):
        sys.exit(f"no such extra: {', '.join(unknown)}; there are {', '.join(EXTRAS)}")
    rows = {extra: check(extra, options) for extra in names}
    print("| extra | its tests | errors without the others | seconds |\n|---|---|---|---|")
    for extra, (own, without, seconds) in rows.items():
        print(f"| {extra} | {own} | {without} | {seconds:.0f} |")
    return int(any("FAILED" in own + without for own, without, _ in rows.values()))


if __name__ == "__main__":
    sys.exit(main())

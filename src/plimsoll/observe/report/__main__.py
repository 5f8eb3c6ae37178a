"""`python -m plimsoll.observe.report RUN [--ended]`: the page of one run, written at low priority beside the run."""

import os
import sys
from pathlib import Path

from plimsoll.errors import PlimsollError
from plimsoll.observe.report.page import write_report


def main() -> int:
    """Write RUN/report.html; an error is one line on stderr."""
    os.nice(10)
    run, *flags = sys.argv[1:]
    try:
        write_report([Path(run)], Path(run) / "report.html", ended="--ended" in flags)
    except PlimsollError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

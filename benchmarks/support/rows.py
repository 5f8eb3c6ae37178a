"""The rows of the benchmarks that compare ways on several ranks: their options, and a line for people."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.models import SIZES


def add_options(parser: argparse.ArgumentParser, ways: Iterable[str], example: str) -> None:
    """What to measure. `example`: name of a case."""
    parser.add_argument("--quick", action="store_true", help="fewer cases, 0.1 B parameters")
    parser.add_argument("--size", choices=SIZES, help="default: full, or quick with --quick")
    parser.add_argument("--cases", nargs="*", help=f"names such as {example}; default: all")
    parser.add_argument("--ways", nargs="*", choices=list(ways), default=list(ways))
    parser.add_argument("--folder", type=Path, help="keep the models there and use those that are there")


def show_head(moved: str) -> None:
    """Titles of the table for people, in MiB of each rank. `moved`: what `show`'s last key is called."""
    print(
        f"{'case':24} {'way':16} {'final':>22} {'peak over':>22} {'steady over':>18} {moved:>20}  seconds",
        file=sys.stderr,
    )


def show(entry: dict[str, Any], moved: str) -> None:
    """One line of the table for people. `moved`: the key of the bytes that went to or came from files."""

    def spread(key: str) -> str:
        return "/".join(f"{value:.0f}" for value in entry[key])

    print(
        f"{entry['case']:24} {entry['way']:16} {spread('final_mib'):>22} {spread('peak_over_final_mib'):>22} "
        f"{spread('steady_over_final_mib'):>18} {spread(moved):>20} {entry['seconds']:8.2f}",
        file=sys.stderr,
    )

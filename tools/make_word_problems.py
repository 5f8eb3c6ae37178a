"""Writes recipes/data/word_problems*.jsonl: short arithmetic word problems with their answers, the same for each seed.

python tools/make_word_problems.py [FOLDER]
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

SEED = 0
NUM_TRAIN, NUM_EVAL = 64, 16

NAMES = ("Ada", "Ben", "Chloe", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jon")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps", "stickers")


def add(name: str, things: str, draw: random.Random) -> tuple[str, int]:
    """Two-digit numbers at most, so that a small model is right now and then."""
    have, more = draw.randint(2, 40), draw.randint(2, 40)
    return f"{name} has {have} {things} and gets {more} more. How many {things} does {name} have now?", have + more


def take(name: str, things: str, draw: random.Random) -> tuple[str, int]:
    have = draw.randint(10, 60)
    given = draw.randint(2, have - 1)
    return f"{name} has {have} {things} and gives {given} away. How many {things} are left?", have - given


def multiply(name: str, things: str, draw: random.Random) -> tuple[str, int]:
    boxes, each = draw.randint(2, 9), draw.randint(2, 9)
    return f"{name} has {boxes} boxes with {each} {things} in each. How many {things} are there?", boxes * each


def share(name: str, things: str, draw: random.Random) -> tuple[str, int]:
    friends, each = draw.randint(2, 9), draw.randint(2, 9)
    return f"{name} shares {friends * each} {things} among {friends} friends. How many does each friend get?", each


KINDS = (add, take, multiply, share)


def problems(draw: random.Random) -> Iterator[dict[str, str]]:
    """Endless rows {prompt, answer, kind}, each prompt once; the kinds take turns."""
    seen: set[str] = set()
    while True:
        for kind in KINDS:
            prompt, answer = kind(draw.choice(NAMES), draw.choice(THINGS), draw)
            if prompt not in seen:
                seen.add(prompt)
                yield {"prompt": prompt, "answer": str(answer), "kind": kind.__name__}


def main(folder: Path) -> None:
    """Train and eval rows come from one stream, so that no problem is in both."""
    rows = problems(random.Random(SEED))
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("word_problems.jsonl", NUM_TRAIN), ("word_problems_eval.jsonl", NUM_EVAL)):
        lines = [json.dumps(next(rows)) + "\n" for _ in range(count)]
        (folder / name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "recipes" / "data")

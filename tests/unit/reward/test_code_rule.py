import json
import time
from typing import Any

import psutil
import pytest

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import RecipeError
from plimsoll.reward.code import check_options, code, find_program
from plimsoll.reward.pool import ScoringPool
from tests.unit.reward.requests import requests_for

DOUBLE = {"inputs": ["2\n", "21\n", "0\n"], "outputs": ["4\n", "42", "0 \n\n"]}
ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def score(program: str, answer: object, **options: Any) -> float:
    return code("what?", fenced(program), answer, **({"time_limit": 1.0} | options))


def test_standard_input_and_output_in_each_form_of_the_tests() -> None:
    pairs = [{"input": i, "output": o} for i, o in zip(DOUBLE["inputs"], DOUBLE["outputs"], strict=True)]
    for answer in (DOUBLE, json.dumps(DOUBLE), {"tests": pairs}, pairs):
        assert score("print(2 * int(input()))", answer) == 1.0
        assert score("print(4)", answer) == 0.0


def test_share_of_tests_and_the_first_so_many() -> None:
    program = "n = int(input())\nprint(4 if n == 2 else n)"
    assert score(program, DOUBLE) == 0.0
    assert score(program, DOUBLE, share=True) == pytest.approx(2 / 3)
    assert score(program, DOUBLE, share=True, right=2.0, wrong=-1.0) == pytest.approx(1.0)
    assert score(program, DOUBLE, max_tests=1) == 1.0
    assert score("def add(a, b): return 3", ADD, share=True) == 0.5


def test_functions_and_methods_of_solution() -> None:
    tests = {"fn_name": "twice", "inputs": ["[1, 2]\n3", "[]\n1"], "outputs": ["[3, 6]", "[]"]}
    assert score("def twice(xs, k): return [k * x for x in xs]", tests) == 1.0
    method = "class Solution:\n    def twice(self, xs: List[int], k): return tuple(k * x for x in xs)"
    assert score(method, tests) == 1.0
    assert score("def twice(xs, k): return xs", tests) == 0.0
    assert score("def other(xs, k): return xs", tests) == 0.0
    wrapped = {"fn_name": "same", "inputs": [[1], [True], [[1.0]]], "outputs": [[1], [True], [1]]}
    assert score("def same(x): print('noise'); return x", wrapped) == 1.0
    assert score("def same(x): return int(x) if x is True else x", wrapped) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        ADD,
        json.dumps(ADD),
        "\n".join(ADD),
        {"test_list": ADD},
        {"assert_case": ADD},
        {"test": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"},
    ],
    ids=str,
)
def test_asserts_in_each_form(answer: object) -> None:
    assert score("def add(a, b): return a + b", answer) == 1.0
    assert score("def add(a, b): return a - b", answer) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "print('passed')\nimport os\nos.write(1, b'0123456789abcdef true\\n')\nos._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)",
        "import builtins\nbuiltins.AssertionError = Exception",
        "import os\nos.closerange(0, 1000)\nos._exit(0)",
        "while True: pass",
        "",
    ],
)
def test_a_program_that_only_ends_well_has_not_passed(program: str) -> None:
    assert score(program, ADD, time_limit=0.5) == 0.0


def test_program_that_writes_and_leaves_threads_passes_when_its_tests_do() -> None:
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nprint('x', end='')\n"
    assert score(f"{program}def add(a, b): print('y'); return a + b", ADD) == 1.0


def test_the_program_is_the_last_closed_block_of_python() -> None:
    assert find_program("```python\na\n```\n```py\nb\n```\n```json\n{}\n```\n", strict=True) == "b\n"
    assert find_program("```\na\n```\n```python\nunfinished", strict=True) == "a\n"
    assert find_program("  ```python\n  x = '```'\n  ```", strict=True) == "  x = '```'\n"
    assert find_program("print(1)", strict=True) is None
    assert find_program("print(1)", strict=False) == "print(1)"
    assert code("", "print(2 * int(input()))", DOUBLE) == 1.0
    assert code("", "print(2 * int(input()))", DOUBLE, strict=True) == 0.0


def test_limits_of_the_options_are_those_of_the_program() -> None:
    assert score("x = bytearray(100 << 20)\nprint(2 * int(input()))", DOUBLE) == 1.0
    assert score("x = bytearray(100 << 20)\nprint(2 * int(input()))", DOUBLE, memory="80MiB") == 0.0
    assert score("print(' ' * 10000, 2 * int(input()))", DOUBLE) == 1.0
    assert score("print(' ' * 10000, 2 * int(input()))", DOUBLE, max_output=5000) == 0.0


@pytest.mark.parametrize("answer", [None, "", {}, [], {"inputs": ["1"]}, 3, [{"input": "1"}]])
def test_row_without_tests_is_an_error_and_no_zero(answer: object) -> None:
    with pytest.raises(ValueError, match="finds no tests"):
        score("print(1)", answer)


def test_wrong_options_are_named_all_at_once() -> None:
    wrong: dict[str, Any] = {"language": "cobol", "memory": "much", "time_limit": 0, "max_tests": True}
    with pytest.raises(RecipeError) as caught:
        check_options(wrong)
    assert [cause.split(":")[0].rpartition(".")[2] for cause in caught.value.causes] == [
        "language",
        "memory",
        "time_limit",
        "max_tests",
    ]
    with pytest.raises(RecipeError, match="memory: 1MiB is too little for Python"):
        check_options({"memory": "1MiB"})
    check_options({"memory": "1GiB", "time_limit": 2, "max_tests": None})


def test_in_the_pool() -> None:
    config = RewardConfig(function="code", options={"time_limit": 0.5}, workers=1)
    programs = [fenced("print(2 * int(input()))"), fenced("while True: pass"), "no program"]
    with ScoringPool(config) as pool:
        scores = pool.score(requests_for(programs, answer=DOUBLE))
    assert [score.value for score in scores] == [1.0, 0.0, 0.0]


def test_program_goes_with_the_worker_that_reward_timeout_kills() -> None:
    source = "import os, time\nos.fork()\nos.setsid()\ntime.sleep(600)"
    config = RewardConfig(function="code", options={"time_limit": 60}, workers=1, timeout=1.0, max_error_share=1.0)
    with ScoringPool(config) as pool:
        (score,) = pool.score(requests_for([fenced(source)], answer=DOUBLE))
    assert score.status == "timeout"
    deadline = time.monotonic() + 5.0
    while any("program.py" in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline
        time.sleep(0.02)

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import RewardError
from plimsoll.reward.pool import ScoringPool
from plimsoll.types import Score
from tests.processes import children_left
from tests.unit.reward.requests import requests_for, write_function

MakePool = Callable[..., ScoringPool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    """Pools of a function given by its source; closed after the test, and then no child may be left."""
    pools: list[ScoringPool] = []

    def make(body: str, **settings: Any) -> ScoringPool:
        config = RewardConfig(function=write_function(tmp_path, body), **settings)
        pools.append(ScoringPool(config).__enter__())
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
        pool.close()  # twice is once
    assert children_left() == []


def values(scores: list[Score]) -> list[float | None]:
    return [score.value for score in scores]


def statuses(scores: list[Score]) -> list[str]:
    return [score.status for score in scores]


def running(pid: int) -> bool:
    """False also for a zombie: an orphan's parent is init, and not every container has one that reaps."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_pid(path: Path) -> int:
    wait_until(lambda: path.is_file() and bool(path.read_text()))
    return int(path.read_text())


def test_hanging_responses_cost_themselves_only_and_leave_nothing_behind(tmp_path: Path) -> None:
    body = f"""
        import os, pathlib, subprocess
        def score(prompt, response, answer):
            if response == "child":
                # in a session of its own: not reached by a signal to the worker's group
                child = subprocess.Popen(["sleep", "600"], start_new_session=True)
                pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
            while response in ("loop", "child"):
                pass
            return float(response == answer)
    """
    config = RewardConfig(function=write_function(tmp_path, body), workers=2, timeout=1.0, max_error_share=0.5)
    with ScoringPool(config) as pool:
        begin = time.monotonic()
        scores = pool.score(requests_for(["1", "0", "loop", "1", "0", "child", "1", "1"]))
        assert time.monotonic() - begin < 8.0
        assert values(scores) == [1.0, 0.0, None, 1.0, 0.0, None, 1.0, 1.0]
        assert [i for i, status in enumerate(statuses(scores)) if status == "timeout"] == [2, 5]
        assert "reward.timeout = 1 s" in scores[2].detail
        assert not running(read_pid(tmp_path / "child"))
        # The two workers that took over are what is there, and a second batch needs no time-out.
        begin = time.monotonic()
        assert values(pool.score(requests_for(["1"] * 64))) == [1.0] * 64
        assert time.monotonic() - begin < 8.0
        assert sum("reward.worker" in " ".join(p.cmdline()) for p in psutil.Process().children()) == 2
        assert all(p.status() != psutil.STATUS_ZOMBIE for p in psutil.Process().children(recursive=True))
    assert children_left() == []


def test_function_that_always_raises_stops_with_its_traceback_and_not_with_zeros(make_pool: MakePool) -> None:
    pool = make_pool("def score(prompt, response, answer):\n    return {}['gold']", max_error_share=0.1)
    with pytest.raises(RewardError, match=r"failed for \d+ of 40 .*reward.max_error_share = 0.1") as caught:
        pool.score(requests_for(["1"] * 40))
    assert "KeyError: 'gold'" in str(caught.value)
    assert "line 2, in score" in str(caught.value)


def test_share_of_errors_at_the_limit_is_allowed(make_pool: MakePool) -> None:
    body = "def score(prompt, response, answer): return 1.0 / int(response)"
    pool = make_pool(body, max_error_share=0.5, failed_score=-1.0)
    scores = pool.score(requests_for(["1", "0", "2", "0"]))
    assert values(scores) == [1.0, -1.0, 0.5, -1.0]
    assert statuses(scores) == ["ok", "error", "ok", "error"]
    with pytest.raises(RewardError, match="failed for 3 of 4"):
        pool.score(requests_for(["1", "0", "0", "0"]))
    assert values(pool.score(requests_for(["1"]))) == [1.0]  # usable after an error


def test_one_failure_among_a_few_is_borne_unless_none_is_to_be(make_pool: MakePool) -> None:
    body = "def score(prompt, response, answer): return 1.0 / int(response)"
    few = requests_for(["1", "0", "1"])
    assert statuses(make_pool(body, max_error_share=0.1).score(few)) == ["ok", "error", "ok"]
    with pytest.raises(RewardError, match="failed for 1 of 3"):
        make_pool(body, max_error_share=0.0).score(few)


def test_function_with_a_signal_time_out_works_and_its_forgotten_alarm_hits_nobody(make_pool: MakePool) -> None:
    body = """
        import signal, time
        def too_slow(*_):
            raise TimeoutError("too slow")
        def score(prompt, response, answer):
            if response != "patient":
                signal.signal(signal.SIGALRM, too_slow)
                signal.setitimer(signal.ITIMER_REAL, 0.2)
            if response in ("slow", "patient"):
                time.sleep(0.5)
            return 1.0
    """
    pool = make_pool(body, workers=1, max_error_share=1.0)
    scores = pool.score(requests_for(["1", "slow", "1", "patient"]))
    assert values(scores) == [1.0, None, 1.0, 1.0]
    assert "TimeoutError: too slow" in scores[1].detail


def test_wrong_number_of_values_stops_at_once(make_pool: MakePool) -> None:
    pool = make_pool("def score(prompts, completions, **columns): return [1.0]", max_error_share=1.0)
    with pytest.raises(RewardError, match=r"rewards\.py:score: expected 3 rewards, got 1"):
        pool.score(requests_for(["a", "b", "c"]))


def test_trl_function_is_called_with_the_samples_of_one_prompt_and_loses_only_the_hanging_one(
    make_pool: MakePool,
) -> None:
    body = """
        def score(completions, **columns):
            texts = [completion[0]["content"] for completion in completions]
            while "loop" in texts:
                pass
            return [float(len(texts)) for _ in texts]
    """
    pool = make_pool(body, timeout=0.5, max_error_share=0.5)
    scores = pool.score(requests_for(["a", "b", "c", "d", "a", "loop", "c", "d"]))
    assert values(scores) == [4.0, 4.0, 4.0, 4.0, 1.0, None, 1.0, 1.0]
    assert scores[5].status == "timeout"


@pytest.mark.parametrize(
    ("death", "how"),
    [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV")],
)
def test_worker_that_dies_costs_one_response(make_pool: MakePool, death: str, how: str) -> None:
    body = f"""
        import os, signal
        def score(prompt, response, answer):
            if response == "die":
                if os.fork() == 0:  # holds the worker's pipe open: the end of the worker must be seen all the same
                    import time; time.sleep(60)
                {death}
            return float(response)
    """
    pool = make_pool(body, max_error_share=0.5)
    scores = pool.score(requests_for([str(i) if i != 4 else "die" for i in range(24)]))
    # Three requests a chunk: the one before in the same chunk is answered already, the one after is given to another.
    assert values(scores) == [float(i) if i != 4 else None for i in range(24)]
    assert (scores[4].status, how in scores[4].detail) == ("error", True)


def test_idle_worker_that_was_killed_is_replaced_at_no_cost(make_pool: MakePool) -> None:
    pool = make_pool("def score(prompt, response, answer): return 1.0", workers=1, max_error_share=0.0)
    pool.score(requests_for(["1"]))
    (worker,) = (p for p in psutil.Process().children() if "reward.worker" in " ".join(p.cmdline()))
    worker.kill()
    wait_until(lambda: not running(worker.pid))
    assert values(pool.score(requests_for(["1"] * 4))) == [1.0] * 4


def test_order_is_that_of_the_requests_however_long_each_takes(make_pool: MakePool) -> None:
    body = """
        import time
        def score(prompt, response, answer):
            time.sleep(0.01 * (int(response) % 3))
            return float(response)
    """
    pool = make_pool(body, workers=3)
    requests = list(reversed(requests_for([str(i) for i in range(30)])))
    scores = pool.score(requests)
    assert [score.sample_id for score in scores] == [request.sample_id for request in requests]
    assert values(scores) == [float(i) for i in reversed(range(30))]
    assert pool.score(requests) == scores


def test_none_is_not_scored_and_no_error(make_pool: MakePool) -> None:
    pool = make_pool("def score(prompt, response, answer): return None", max_error_share=0.0, failed_score=0.0)
    (score,) = pool.score(requests_for(["1"]))
    assert (score.value, score.status) == (None, "unscored")
    assert pool.score([]) == []


def test_function_that_cannot_be_loaded_is_an_error_of_the_run(make_pool: MakePool) -> None:
    pool = make_pool("import no_such_package")
    with pytest.raises(RewardError, match="No module named 'no_such_package'"):
        pool.score(requests_for(["1"]))


def test_close_from_another_thread_ends_a_running_call(make_pool: MakePool) -> None:
    pool = make_pool("def score(prompt, response, answer):\n    while True: pass", timeout=60.0)
    timer = threading.Timer(0.5, pool.close)
    timer.start()
    with pytest.raises(RewardError, match="have been closed"):
        pool.score(requests_for(["1"] * 4))
    timer.join()
    assert children_left() == []


DRIVER = """
import sys
from plimsoll.config.reward import RewardConfig
from plimsoll.reward.pool import ScoringPool
from tests.unit.reward.requests import requests_for

with ScoringPool(RewardConfig(function=sys.argv[1], workers=1, timeout=60.0)) as pool:
    print(pool.score(requests_for(["1"]))[0].value)
"""
# No main guard, on purpose: workers must not run the driver's main module again.


def test_what_a_function_prints_does_not_reach_the_drivers_stdout(tmp_path: Path) -> None:
    body = """
        import os, sys
        print("at import")
        def score(prompt, response, answer):
            print("in the call"); os.system("echo from a child")
            return 1.0
    """
    command = [sys.executable, "-c", DRIVER, write_function(tmp_path, body)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "1.0\n"
    assert sorted(done.stderr.splitlines()) == ["at import", "from a child", "in the call"]


@pytest.mark.parametrize(
    "hang",
    [
        "while True: pass",
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",  # keeps the interpreter's lock
    ],
)
def test_killing_the_driver_leaves_no_worker_and_no_child_of_one(tmp_path: Path, hang: str) -> None:
    body = f"""
        import os, pathlib, subprocess
        def score(prompt, response, answer):
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
            pathlib.Path({str(tmp_path / "worker")!r}).write_text(str(os.getpid()))
            {hang}
    """
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, write_function(tmp_path, body)])
    child, worker = read_pid(tmp_path / "child"), read_pid(tmp_path / "worker")
    family = [p.pid for p in psutil.Process(driver.pid).children(recursive=True)]
    assert {child, worker} < set(family)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not any(running(pid) for pid in family))


def test_workers_ignore_the_signals_that_are_meant_for_the_driver(make_pool: MakePool) -> None:
    body = """
        import time
        def score(prompt, response, answer):
            time.sleep(0.2)
            return 1.0
    """
    pool = make_pool(body, workers=1, max_error_share=0.0)
    pool.score(requests_for(["1"]))

    def send() -> None:
        for process in children_left():
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGUSR1)

    timer = threading.Timer(0.1, send)
    timer.start()
    assert values(pool.score(requests_for(["1", "1"]))) == [1.0, 1.0]
    timer.join()


def test_a_child_that_comes_back_from_a_fork_answers_nothing(make_pool: MakePool) -> None:
    body = """
        import os
        def score(prompt, response, answer):
            return -1.0 if os.fork() == 0 else float(response)
    """
    pool = make_pool(body, workers=1)
    assert values(pool.score(requests_for(["1", "2", "3"]))) == [1.0, 2.0, 3.0]

"""Agreement between ranks while files are written. One pair of processes for every case."""

import time
from datetime import timedelta
from typing import Any

import pytest

from plimsoll.errors import CheckpointError, RefusedError
from plimsoll.weights.control import ControlGroup
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)


def refuse() -> None:
    raise RefusedError(["first cause", "second cause"])


def fail() -> None:
    raise OSError(28, "No space left on device")


def caught(control: ControlGroup, work: Any) -> tuple[str, str, tuple[str, ...]]:
    try:
        control.together(work)
    except Exception as error:
        causes = error.causes if isinstance(error, RefusedError) else ()
        return type(error).__name__, str(error), causes
    return "", "", ()


def agree(rank: int, ranks: int) -> dict[str, Any]:
    control = ControlGroup()
    found: dict[str, Any] = {"gathered": control.gather(rank * 10), "result": control.together(lambda: rank + 1)}
    found["refused"] = caught(control, refuse if rank == 1 else (lambda: None))
    found["failed"] = caught(control, fail if rank == 0 else (lambda: None))
    found["both"] = caught(control, fail if rank == 1 else refuse)
    if rank == 0:
        time.sleep(4)  # twice the time-out of the training group
    control.barrier()
    found["after"] = control.together(lambda: "still in step")
    late = ControlGroup()
    found["all come"] = late.all_come(timedelta(seconds=60))
    if rank == 0:
        start = time.monotonic()
        found["not all come"] = late.all_come(timedelta(seconds=1))
        found["waited"] = time.monotonic() - start
    control.barrier()
    control.close()
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(agree, 2, tmp_path_factory.mktemp("control"), group_timeout=timedelta(seconds=2))


def test_every_rank_gets_all_values_and_its_own_result(pair: list[dict[str, Any]]) -> None:
    assert [found["gathered"] for found in pair] == [[0, 10], [0, 10]]
    assert [found["result"] for found in pair] == [1, 2]


def test_a_refusal_on_one_rank_is_the_same_refusal_on_all(pair: list[dict[str, Any]]) -> None:
    expected = ("RefusedError", "first cause\nsecond cause", ("first cause", "second cause"))
    assert [found["refused"] for found in pair] == [expected, expected]


def test_another_error_is_itself_where_it_happened_and_a_checkpoint_error_elsewhere(pair: list[dict[str, Any]]) -> None:
    first, second = (found["failed"] for found in pair)
    assert first[0] == "OSError"
    assert second[0] == CheckpointError.__name__
    assert second[1].startswith("rank 0 failed: OSError")
    assert "No space left on device" in second[1]


def test_when_several_ranks_fail_all_hear_of_the_lowest(pair: list[dict[str, Any]]) -> None:
    assert [found["both"][0] for found in pair] == ["RefusedError", "RefusedError"]


def test_a_rank_may_be_late_by_more_than_the_training_groups_timeout(pair: list[dict[str, Any]]) -> None:
    assert [found["after"] for found in pair] == ["still in step"] * 2


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_was_said(pair: list[dict[str, Any]]) -> None:
    assert [found["all come"] for found in pair] == [True, True]
    assert not pair[0]["not all come"]
    assert 0.9 < pair[0]["waited"] < 30


def test_one_rank_needs_no_group() -> None:
    control = ControlGroup()
    control.barrier()
    assert control.all_come(timedelta(0))
    assert control.gather("alone") == ["alone"]
    assert control.together(lambda: 7) == 7
    with pytest.raises(OSError, match="No space"):
        control.together(fail)
    control.close()

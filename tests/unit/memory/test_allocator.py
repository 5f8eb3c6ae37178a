"""The allocator's variables are decided per role, under both names, with the user's other options kept."""

import re
import subprocess
import sys

import pytest
import torch

from plimsoll.errors import RefusedError
from plimsoll.memory.allocator import (
    AllocatorError,
    AllocatorPolicy,
    FakeAllocator,
    TorchAllocator,
    allocator_mode,
    environment,
    inherited_options,
    parse_options,
)


def test_trainer_gets_expandable_segments_under_both_names() -> None:
    assert environment("trainer", {}) == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_trainer_keeps_other_options_from_either_name(name: str) -> None:
    found = environment("trainer", {name: "max_split_size_mb:128"})
    assert found == {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True",
    }


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_what_a_refusal_advises_is_followed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A platform may have no expandable segments: the error says with which variable to start instead."""
    with pytest.raises(AllocatorError) as error:
        policy(FakeAllocator(obeys=False))
    advised = re.search(r"start with PYTORCH_ALLOC_CONF=(\S+)\.", str(error.value))
    assert advised is not None
    found = environment("trainer", {name: advised[1]})
    assert found == dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:False")
    for key, value in found.items():
        monkeypatch.setenv(key, value)
    ours = AllocatorPolicy(FakeAllocator(obeys=False))
    ours.start()
    assert ours.mode() == "plain"


def test_trainer_merges_two_names_and_the_current_one_wins() -> None:
    env = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,backend:native",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
    }
    assert environment("trainer", env)["PYTORCH_ALLOC_CONF"] == (
        "max_split_size_mb:64,backend:native,expandable_segments:True"
    )


def test_rollout_switches_it_off_under_the_old_name_and_keeps_the_rest() -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"}
    assert environment("rollout", env) == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:False"}


def test_rollout_switches_it_off_under_the_current_name_alone() -> None:
    assert environment("rollout", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}) == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:False"
    }


def test_rollout_leaves_an_environment_without_the_option_alone() -> None:
    assert environment("rollout", {}) == {}
    assert environment("rollout", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}) == {}


def test_a_rollout_process_started_by_a_trainer_ends_up_without_it() -> None:
    trainer = environment("trainer", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"})
    rollout = trainer | environment("rollout", trainer)
    assert all("expandable_segments:True" not in value for value in rollout.values())
    assert all("max_split_size_mb:128" in value for value in rollout.values())


def test_the_given_mapping_is_left_as_it_is() -> None:
    env = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    environment("rollout", env)
    environment("trainer", env)
    assert env == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_commas_inside_brackets_do_not_separate_options() -> None:
    text = "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:True"
    assert parse_options(text) == {
        "roundup_power2_divisions": "[256:1,512:2,>:4]",
        "expandable_segments": "True",
    }
    assert environment("rollout", {"PYTORCH_ALLOC_CONF": text})["PYTORCH_ALLOC_CONF"] == (
        "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:False"
    )


def test_without_a_cuda_device_there_is_no_mode() -> None:
    assert allocator_mode(None) == "none"


def test_the_module_imports_no_torch() -> None:
    code = (
        "import sys, plimsoll.memory.allocator, plimsoll.memory.phases, plimsoll.memory.host, plimsoll.memory.ledger, "
        "plimsoll.observe.run_folder, plimsoll.observe.metrics, plimsoll.observe.rollouts, plimsoll.observe.console\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


OPTIONS = {"max_split_size_mb": "128"}


def policy(backend: FakeAllocator, *, expandable: bool = True) -> AllocatorPolicy:
    started = AllocatorPolicy(backend, expandable=expandable, options=OPTIONS)
    started.start()
    return started


def test_every_switch_carries_the_other_options() -> None:
    """torch takes what a call leaves out back to its default."""
    backend = FakeAllocator()
    with policy(backend).plain_segments():
        pass
    assert len(backend.history) == 4
    assert all(parse_options(text)["max_split_size_mb"] == "128" for text in backend.history)


@pytest.mark.parametrize("expandable", [True, False])
def test_plain_segments_inside_and_what_was_found_after(*, expandable: bool) -> None:
    backend = FakeAllocator()
    ours = policy(backend, expandable=expandable)
    outside = "expandable" if expandable else "plain"
    assert ours.mode() == outside
    with pytest.raises(ValueError, match="no"), ours.plain_segments():  # noqa: PT012
        assert (ours.mode(), backend.expandable) == ("plain", False)
        raise ValueError("no")
    assert (ours.mode(), backend.expandable) == (outside, expandable)


def test_plain_segments_nest() -> None:
    backend = FakeAllocator()
    ours = policy(backend)
    with ours.guard_engine():
        with ours.plain_segments():
            pass
        assert backend.expandable is False
    assert backend.expandable is True


@pytest.mark.parametrize("expandable", [True, False])
def test_an_engine_that_sets_the_mode_by_itself_is_put_right(
    caplog: pytest.LogCaptureFixture, *, expandable: bool
) -> None:
    backend = FakeAllocator()
    ours = policy(backend, expandable=expandable)
    with caplog.at_level("INFO", "plimsoll.memory"):
        for _ in range(2):
            with ours.guard_engine():
                assert backend.expandable is False
                backend.set_options("expandable_segments:False")
                backend.set_options(f"expandable_segments:{not expandable}")
    assert backend.expandable is expandable
    assert parse_options(backend.text)["max_split_size_mb"] == "128"
    (line,) = caplog.messages  # once
    assert f"expandable_segments:{not expandable}" in line


def test_an_engine_that_fails_is_put_right_too() -> None:
    backend = FakeAllocator()
    ours = policy(backend)
    with pytest.raises(ValueError, match="no"), ours.guard_engine():
        raise ValueError("no")
    assert backend.expandable is True


def test_an_engine_that_drops_other_options_is_put_right() -> None:
    backend = FakeAllocator()
    with policy(backend).guard_engine():
        backend.set_options("max_split_size_mb:20")
    assert parse_options(backend.text) == {"max_split_size_mb": "128", "expandable_segments": "True"}


def test_a_setter_that_does_nothing_is_found_out() -> None:
    with pytest.raises(AllocatorError, match="did not") as caught:
        policy(FakeAllocator(obeys=False))
    assert isinstance(caught.value, RefusedError)


def test_a_buffer_to_share_never_comes_out_of_an_expandable_segment() -> None:
    backend = FakeAllocator()
    ours = policy(backend)
    backend.cached_expandable = 3  # handed out first, in any mode
    buffer = ours.plain_buffer(lambda: backend.allocate(64))
    assert backend.lies_in_expandable(buffer) is False
    assert backend.cached_expandable == 0
    assert backend.expandable is True


def test_on_a_cpu_run_nothing_is_switched() -> None:
    ours = AllocatorPolicy(None)
    ours.start()
    with ours.plain_segments(), ours.guard_engine():
        assert ours.mode() == "none"
    assert ours.plain_buffer(lambda: torch.empty(3)).shape == (3,)


def test_other_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    assert inherited_options() == {"max_split_size_mb": "64"}


def test_a_torch_without_the_setter_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings")
    with pytest.raises(AllocatorError, match=re.escape(torch.__version__)):
        TorchAllocator().set_options("expandable_segments:True")


def test_the_older_setter_serves_where_the_current_one_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", said.append)
    TorchAllocator().set_options("expandable_segments:True")
    assert said == ["expandable_segments:True"]


def test_torchs_own_setter_and_getter_agree() -> None:
    """They work without a GPU; the process's settings are put back."""
    backend = TorchAllocator()
    before = backend.options()
    if before is None:
        pytest.skip("this torch has no getter")
    backend.set_options("max_split_size_mb:128,expandable_segments:False")
    assert backend.options() == "max_split_size_mb:128,expandable_segments:False"
    backend.set_options(before)


def segments(*found: tuple[bool, tuple[int, int]]) -> list[dict[str, object]]:
    return [{"device": 0, "is_expandable": expandable, "segment_pool_id": pool} for expandable, pool in found]


@pytest.mark.parametrize(
    ("found", "mode"),
    [
        (segments((True, (0, 0)), (True, (0, 0))), "expandable"),
        (segments((False, (0, 0))), "plain"),
        (segments((True, (0, 0)), (False, (0, 0))), "mixed"),
        (segments((True, (0, 0)), (False, (7, 0))), "expandable"),  # an engine's pool, a CUDA graph's
    ],
)
def test_the_mode_is_that_of_the_segments(
    monkeypatch: pytest.MonkeyPatch, found: list[dict[str, object]], mode: str
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: found)
    assert allocator_mode(0) == mode

"""The allocator's variables are decided per role, under both names, with the user's other options kept."""

import subprocess
import sys

import pytest

from plimsoll.memory.allocator import allocator_mode, environment, parse_options


def test_trainer_gets_expandable_segments_under_both_names() -> None:
    assert environment("trainer", {}) == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_trainer_keeps_other_options_from_either_name(name: str) -> None:
    found = environment("trainer", {name: "max_split_size_mb:128,expandable_segments:False"})
    assert found == {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True",
    }


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

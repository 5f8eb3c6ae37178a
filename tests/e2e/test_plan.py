"""`plimsoll plan` as its users call it: every shipped recipe, the JSON that others rely on, advice that is true."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli import main
from plimsoll.memory.plan import capacity

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
REPORT_A = "recipes/qwen3_next_80b_4x8xa800.yaml"

PHASE: dict[str, type] = {
    "slot": str,
    "phase": str,
    "device_bytes": int,
    "capacity_bytes": int,
    "headroom_bytes": int,
    "residents": dict,
    "workspace_bytes": int,
}
REFUSAL: dict[str, type] = {"slot": str, "phase": str, "rank": int, "need_bytes": int, "have_bytes": int}

CHILD = """
import sys
from plimsoll.cli import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "transformers", "safetensors", "tokenizers") if name in sys.modules]
sys.exit(9 if heavy else code)
"""


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name files relative to the project, and a GPU that is here would bound what they say."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(capacity, "find_gpus", lambda: None)


class Planner:
    """The command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def json(self, recipe: Path | str, *overrides: str) -> dict[str, Any]:
        """The one line of stdout; the exit code must say the same."""
        code = main(["plan", str(recipe), "--json", *overrides])
        out, self.err = self._capsys.readouterr()
        assert code in (0, 2), self.err
        lines = out.splitlines()
        assert len(lines) == 1, self.err
        found: dict[str, Any] = json.loads(lines[0])
        assert (code == 0) is found["fits"]
        return found

    def text(self, *arguments: str) -> tuple[int, str]:
        """Exit code and stdout."""
        code = main(["plan", *arguments])
        out, self.err = self._capsys.readouterr()
        return code, out


@pytest.fixture
def planner(capsys: pytest.CaptureFixture[str]) -> Planner:
    return Planner(capsys)


def check_shape(found: dict[str, Any]) -> None:
    """The contract, and that the numbers of a row belong together."""
    assert isinstance(found["fits"], bool)
    for row in found["phases"]:
        assert {key: type(row[key]) for key in PHASE} == PHASE
        assert row["device_bytes"] == sum(row["residents"].values()) + row["workspace_bytes"]
        assert row["headroom_bytes"] == row["capacity_bytes"] - row["device_bytes"]
        assert sum(row["workspace"].values()) == row["workspace_bytes"]
    for key in ("node_peak_bytes", "rank_peak_bytes", "file_cache_bytes"):
        assert all(isinstance(value, int) for value in found["host"][key])
    assert isinstance(found["moved_bytes_per_step"], int)
    assert isinstance(found["wire_bytes_per_step"], int)
    for refusal in found["refusals"]:
        assert {key: type(refusal[key]) for key in REFUSAL} == REFUSAL
        assert refusal["need_bytes"] > refusal["have_bytes"]
    for entry in found["advice"]:
        assert all("=" in setting and "." in setting for setting in entry["set"])
        assert entry["frees_bytes"] > 0
    assert found["fits"] == (not found["refusals"])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_planned_in_under_two_seconds(recipe: Path, planner: Planner) -> None:
    start = time.perf_counter()
    found = planner.json(recipe)
    assert time.perf_counter() - start < 2
    check_shape(found)
    assert found["fits"], found["refusals"]
    names = [row["phase"] for row in found["phases"]]
    assert ("rollout" in names) is ("sft" not in recipe.stem)
    code, text = planner.text(str(recipe))
    assert code == 0
    assert "It fits" in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_the_command_imports_nothing_heavy_and_takes_under_two_seconds() -> None:
    seconds: list[float] = []
    for _ in range(3):  # the best of three: others use the machine too
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", CHILD, "plan", REPORT_A, "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""},
        )
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["fits"]
        if seconds[-1] < 2:
            break
    assert min(seconds) < 2


def test_report_a_fits_with_a_streamed_optimizer_only_and_its_nodes_are_equal(planner: Planner) -> None:
    found = planner.json(REPORT_A)
    assert found["choices"]["optimizer_state"] == "streamed"
    nodes, ranks = found["host"]["node_peak_bytes"], found["host"]["rank_peak_bytes"]
    assert (len(nodes), len(set(nodes))) == (4, 1)
    assert (len(ranks), len(set(ranks))) == (32, 1)
    refused = planner.json(REPORT_A, "train.optimizer_state=device")
    assert not refused["fits"]
    assert any(row["phase"].startswith("update") for row in refused["refusals"])
    assert ["train.optimizer_state=streamed"] in [entry["set"] for entry in refused["advice"]]
    by_phase = {row["phase"]: row["residents"] for row in found["phases"]}
    groups = [name for name in by_phase["update/step"] if name.startswith("communicator/")]
    assert len(groups) == 3  # shard groups, their copies, and the engine's own


def overloaded(planner: Planner, recipe: str, overrides: Sequence[str], share: float) -> tuple[dict[str, Any], str]:
    """The first refusal with advice on the way down, and the capacity it is of."""
    highest = max(row["device_bytes"] for row in planner.json(recipe, *overrides)["phases"])
    for _ in range(30):
        capacity_set = f"memory.device_memory={highest}"
        found = planner.json(recipe, *overrides, capacity_set)
        if not found["fits"]:
            return found, capacity_set
        highest = int(highest * share)
    pytest.fail("never refused")


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        (REPORT_A, ()),
        ("recipes/qwen3_8b_8xh200.yaml", ("algorithm.kl_coefficient=0.1", "train.optimizer_state=device")),
        ("recipes/gsm8k_qwen2_5_1_5b.yaml", ("train.activation_checkpointing=none", "train.token_budget=65536")),
        ("recipes/gsm8k_qwen2_5_1_5b.yaml", ("rollout.kv_memory=40GiB",)),
        ("recipes/smollm2_chain_sum.yaml", ("memory.device_memory=8GiB",)),
        ("recipes/quickstart_sft.yaml", ("memory.device_memory=8GiB",)),
    ],
)
def test_every_entry_of_the_advice_makes_an_overloaded_recipe_fit(
    recipe: str, overrides: tuple[str, ...], planner: Planner
) -> None:
    found, capacity_set = overloaded(planner, recipe, overrides, 0.85)
    check_shape(found)
    for entry in found["advice"]:
        assert planner.json(recipe, *overrides, capacity_set, *entry["set"])["fits"], entry
    code, text = planner.text(recipe, *overrides, capacity_set)
    assert code == 2
    assert "It does not fit." in text
    if not found["advice"]:
        assert "Nothing helps" in text


def test_the_less_there_is_the_more_must_be_set_until_nothing_helps(planner: Planner) -> None:
    recipe = "recipes/qwen3_8b_8xh200.yaml"
    overrides = ("train.optimizer_state=device", "train.activation_checkpointing=none")
    most_set: list[int] = []
    for gib in (100, 60, 32, 24, 16):
        capacity_set = f"memory.device_memory={gib}GiB"
        found = planner.json(recipe, *overrides, capacity_set)
        check_shape(found)
        for entry in found["advice"]:
            assert planner.json(recipe, *overrides, capacity_set, *entry["set"])["fits"], entry
        most_set.append(max((len(entry["set"]) for entry in found["advice"]), default=0))
    assert most_set[0] == 1
    assert max(most_set) >= 3
    assert most_set[-1] == 0


def test_there_is_advice_where_a_setting_was_chosen_badly(planner: Planner) -> None:
    found = planner.json(
        "recipes/gsm8k_qwen2_5_1_5b.yaml",
        *("memory.device_memory=20GiB", "rollout.kv_memory=19GiB", "memory.host_memory=400GiB"),
    )
    (entry,) = (entry for entry in found["advice"] if entry["set"][0].startswith("rollout.kv_memory="))
    assert len(entry["set"]) == 1


def test_where_nothing_can_help_the_advice_is_empty_and_the_message_says_so(planner: Planner) -> None:
    arguments = ("recipes/qwen3_32b_8xh200.yaml", "memory.device_memory=2GiB")
    found = planner.json(*arguments)
    assert (found["fits"], found["advice"]) == (False, [])
    code, text = planner.text(*arguments)
    assert code == 2
    assert "Nothing helps" in text


def test_a_node_with_too_little_memory_is_refused_with_both_numbers_and_the_largest_part(planner: Planner) -> None:
    arguments = ("recipes/gsm8k_qwen2_5_1_5b.yaml", "train.optimizer_state=streamed", "memory.host_memory=1GiB")
    found = planner.json(*arguments)
    (refusal,) = (refusal for refusal in found["refusals"] if refusal["phase"] == "host")
    assert refusal["have_bytes"] == 2**30
    assert refusal["need_bytes"] > 2 * 2**30
    assert refusal["largest"] == "optimizer_state"
    code, text = planner.text(*arguments)
    assert code == 2
    assert "and has 1.00 GiB" in text
    assert "the largest part is optimizer_state" in text


def test_without_a_gpu_or_a_capacity_a_rank_has_its_share_of_the_node(planner: Planner) -> None:
    one = planner.json("recipes/quickstart.yaml", "memory.host_memory=4GiB")
    four = planner.json("recipes/quickstart.yaml", "memory.host_memory=4GiB", "cluster.ranks=4")
    assert {row["capacity_bytes"] for row in one["phases"]} == {4 * 2**30}
    assert {row["capacity_bytes"] for row in four["phases"]} == {2**30}


def test_the_curve_is_a_table_or_a_key_of_the_json(planner: Planner) -> None:
    curve: list[dict[str, Any]] = planner.json("recipes/qwen3_8b_8xh200.yaml", "--curve")["curve"]
    assert len(curve) == 8
    assert [point["kv_bytes"] for point in curve] == sorted({point["kv_bytes"] for point in curve})
    assert set(curve[0]) == {"kv_bytes", "moved_bytes_per_step", "fits"}
    code, text = planner.text("recipes/qwen3_8b_8xh200.yaml", "--curve")
    assert code == 0
    assert "KV cache against what is moved for it" in text


def test_supervised_recipes_are_known_by_their_name_or_by_the_option(tmp_path: Path, planner: Planner) -> None:
    copy = tmp_path / "warmup.yaml"
    copy.write_bytes((ROOT / "recipes" / "quickstart_sft.yaml").read_bytes())
    assert "rollout" in [row["phase"] for row in planner.json(copy)["phases"]]
    assert "rollout" not in [row["phase"] for row in planner.json(copy, "--sft")["phases"]]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("train.lerning_rate=1",), "train.learning_rate"),
        (("data.prompts_per_step=512", "cluster.ranks=6"), "510 or 516"),
        (("cluster.ranks=32", "parallel.shard=5"), "`parallel.shard=5` does not divide"),
        (("model.path=nowhere", "model.config=null"), "model.config"),
    ],
)
def test_a_recipe_that_is_wrong_is_refused_as_by_train(overrides: tuple[str, ...], said: str, planner: Planner) -> None:
    code, out = planner.text("recipes/quickstart.yaml", "--json", *overrides)
    assert (code, out) == (2, "")
    assert said in planner.err


def test_a_recipe_or_a_script_must_be_named(planner: Planner) -> None:
    code, _ = planner.text()
    assert code == 2
    assert "--from-verl" in planner.err

"""The whole comparison: JSON and text, models found and not found, exit codes."""

import json
import sys
import time
from pathlib import Path
from subprocess import run as run_process

import pytest

from plimsoll.config.planned import MemoryPlan
from plimsoll.errors import RecipeError, RefusedError
from plimsoll.migrate.command import run
from plimsoll.migrate.comparison import compare

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[3]
REPORT = SCRIPTS / "dapo_qwen3_next_80b_4x8.sh"
MACHINE = ("memory.device_memory=79GiB", "memory.host_memory=960GiB")


def as_json(capsys: pytest.CaptureFixture[str], script: Path, *overrides: str) -> dict:  # pyright: ignore[reportMissingTypeArgument]
    """The printed object, with the exit code as `code`."""
    code = run(script, [*MACHINE, *overrides], as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    return {**json.loads(line), "code": code}


def test_the_report_s_job(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, REPORT)
    phases = {item["phase"]: item for item in found["verl"]["phases"]}
    nodes = phases["load reference"]["host"]["node_bytes"]
    assert nodes[0] == nodes[2]
    assert nodes[1] == nodes[3]
    assert nodes[0] - nodes[1] == pytest.approx(320e9, rel=0.01)  # 80 billion parameters in fp32
    built = found["verl"]["host"]["node_load_peak_bytes"]
    assert [node - built[1] for node in built] == [nodes[0], 0, nodes[0], 0]
    assert len(found["verl"]["host"]["rank_peak_bytes"]) == 32
    plan = MemoryPlan.model_validate(found["plan"])
    assert len(set(plan.host.node_peak_bytes)) == 1
    assert len(plan.host.node_peak_bytes) == 4
    assert found["code"] == (0 if plan.fits else 2)
    assert found["recipe"]["parallel"]["shard"] == 16
    assert found["recipe"]["memory"] == {"device_memory": "79GiB", "host_memory": "960GiB"}
    assert all(set(item) == {"key", "value", "reason"} for item in found["not_converted"])


def test_the_text_says_which_nodes_hold_more_and_is_at_most_120_columns_wide(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for script in sorted(SCRIPTS.glob("*.sh")):
        run(script, MACHINE, as_json=False)
        text = capsys.readouterr().out
        assert max(len(line) for line in text.splitlines()) <= 120
        if script == REPORT:
            assert "load reference: nodes 0, 2 hold 319 GB" in text
            assert "more than nodes 1, 3" in text


def test_our_own_settings_verl_s_and_variables_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("NNODES=2", "train.learning_rate=1e-5", "actor_rollout_ref.actor.fsdp_config.fsdp_size=8")
    found = as_json(capsys, REPORT, *overrides)
    assert found["recipe"]["cluster"]["ranks"] == 16
    assert found["recipe"]["parallel"]["shard"] == 8
    assert found["recipe"]["train"]["learning_rate"] == 1e-5
    nodes = next(item for item in found["verl"]["phases"] if item["phase"] == "load reference")["host"]["node_bytes"]
    assert nodes[0] == nodes[1]  # each node is a group of its own


def test_unknown_keys_of_a_recipe_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"train\.lerning_rate"):
        compare(REPORT, [*MACHINE, "train.lerning_rate=1"])


def small_script(folder: Path, model: str) -> Path:
    """A launch of a model by that name."""
    path = folder / "run.sh"
    launch = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
    rest = "actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.n_gpus_per_node=1"
    path.write_text(f"{launch} {rest} actor_rollout_ref.model.path={model}\n", encoding="utf-8")
    return path


def test_the_config_is_looked_for_beside_the_script_and_by_the_model_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = ROOT / "recipes" / "models" / "Qwen2.5-1.5B-Instruct"
    found = compare(small_script(tmp_path, "Qwen/Qwen2.5-1.5B-Instruct"), MACHINE)
    assert found.recipe.model.config == str(shipped)
    own = tmp_path / "recipes" / "models" / "Mine"
    own.mkdir(parents=True)
    (own / "config.json").write_bytes((shipped / "config.json").read_bytes())
    assert compare(small_script(tmp_path, "/far/away/mine"), MACHINE).recipe.model.config == "recipes/models/Mine"
    assert compare(small_script(tmp_path, str(own)), MACHINE).recipe.model.config == str(own)


def test_a_model_that_is_nowhere_is_refused_and_can_be_named(tmp_path: Path) -> None:
    script = small_script(tmp_path, "some/unheard-of")
    with pytest.raises(RefusedError, match=r"model\.config=PATH"):
        compare(script, MACHINE)
    config = ROOT / "recipes" / "models" / "Qwen3-8B"
    found = compare(script, [*MACHINE, f"model.config={config}"])
    assert found.job.actor.sizes.num_parameters == pytest.approx(8.19e9, rel=0.01)
    with pytest.raises(RefusedError, match=r"only a running shell knows"):
        compare(small_script(tmp_path, "$MODEL"), MACHINE)


def test_it_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from plimsoll.migrate.command import run; "
        f"run(Path({str(REPORT)!r}), {list(MACHINE)!r}, as_json=True); "
        "sys.exit(3 if {'torch', 'transformers'} & set(sys.modules) else 0)"
    )
    start = time.monotonic()
    done = run_process([sys.executable, "-c", code], capture_output=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()
    assert time.monotonic() - start < 20  # two seconds of a free machine

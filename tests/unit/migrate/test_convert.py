"""verl's settings as a recipe: every value where it belongs, and everything else named with its reason."""

from pathlib import Path
from typing import Any

import pytest

from plimsoll.config.checks import check_plan
from plimsoll.config.load import load
from plimsoll.errors import RefusedError
from plimsoll.migrate.convert import convert
from plimsoll.migrate.converted import Converted
from plimsoll.migrate.script import read_script
from plimsoll.migrate.settings import read_settings
from plimsoll.migrate.verl_job import read_job, strategy_of
from plimsoll.migrate.yaml import recipe_yaml
from plimsoll.model.sizes import read_sizes

SCRIPTS = Path(__file__).parent / "scripts"
CONFIG = Path(__file__).parents[3] / "recipes" / "models" / "Qwen2.5-1.5B-Instruct"


def converted(script: Path) -> Converted:
    """The recipe of a script."""
    launch = read_script(script, {})
    return convert(read_settings(launch), module=launch.module, config=CONFIG, name=script.stem)


def of(tmp_path: Path, *overrides: str) -> Converted:
    """The recipe of a plain list of overrides, with the few that every launch has."""
    usual = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "data.train_files=train.parquet")
    path = tmp_path / "overrides.txt"
    path.write_text("\n".join((*usual, *overrides)), encoding="utf-8")
    return converted(path)


def value(made: Converted, key: str) -> Any:
    """A key of the recipe."""
    found: Any = made.recipe
    for part in key.split("."):
        found = found[part]
    return found


def loads(made: Converted, tmp_path: Path) -> None:
    """The recipe's file loads to what was converted, and a plan can be made of it."""
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_yaml(made.recipe), encoding="utf-8")
    recipe = load(path).recipe
    dumped = recipe.model_dump(mode="json")
    for section, keys in made.recipe.items():
        for key, expected in keys.items() if isinstance(keys, dict) else ():
            found = dumped[section][key]
            assert found == expected or set(expected.items()) <= set(found.items()), f"{section}.{key}"
    check_plan(recipe, "policy")


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.stem)
def test_every_script_becomes_a_recipe_that_can_be_planned(path: Path, tmp_path: Path) -> None:
    made = converted(path)
    loads(made, tmp_path)
    assert all(item.reason for item in made.left.values())


def test_the_script_of_the_report() -> None:
    made = converted(SCRIPTS / "dapo_qwen3_next_80b_4x8.sh")
    expected = {
        "name": "DAPO-Qwen3-Next-80B",
        "data.prompts_per_step": 512,
        "data.overlong": "truncate_left",
        "rollout.engine": "vllm",
        "rollout.tensor_parallel": 8,
        "rollout.max_response_tokens": 8192,
        "rollout.eval": {"samples": 32, "temperature": 1.0, "top_p": 0.7},
        "algorithm.name": "dapo",
        "algorithm.clip_high": 0.28,
        "algorithm.dual_clip": 10.0,
        "algorithm.kl_coefficient": 0.001,
        "algorithm.kl_in": "loss",
        "algorithm.kl_estimator": "k3",
        "algorithm.dynamic_sampling": True,
        "algorithm.dynamic_max_rounds": 10,
        "algorithm.overlong_buffer": 4096,
        "train.mini_batches_per_step": 16,
        "train.token_budget": 20480,  # 5120 on each of the 4 GPUs that share a sequence
        "train.warmup_steps": 10,
        "train.eval_at_ends": False,
        "parallel.shard": 16,
        "parallel.context": 4,
        "cluster": {"backend": "ray", "ranks": 32, "ranks_per_node": 8},
        "checkpoint": {"every": 5, "keep": None},
        "observe": {"wandb": "online", "wandb_project": "DAPO"},
    }
    assert {key: value(made, key) for key in expected} == expected
    left = {item.key for item in made.left.values()}
    assert {"data.gen_batch_size", "actor_rollout_ref.rollout.gpu_memory_utilization"} <= left
    assert not any("overlong" in key or "kl_loss" in key for key in left)


def test_grpo_with_static_micro_batches() -> None:
    made = converted(SCRIPTS / "grpo_gsm8k_qwen2_5_1_5b.sh")
    assert value(made, "train.token_budget") == 40 * (512 + 1024)
    assert value(made, "algorithm.name") == "grpo"
    assert value(made, "algorithm.aggregation") == "sequence_mean"
    assert value(made, "name") == "qwen2.5_1.5b-function-rm"
    assert value(made, "rollout.cuda_graphs") is False  # the branch of the default engine was taken
    assert value(made, "observe") == {"tensorboard": True}
    assert "one file" in made.left["data.train_files"].reason


def test_ppo_names_its_critic() -> None:
    made = converted(SCRIPTS / "ppo_qwen3_8b.sh")
    assert "critic is not in this version" in made.left["algorithm.adv_estimator"].reason
    assert {"critic.optim.lr", "critic.fsdp.param_offload"} <= made.left.keys()
    samples, prompts = value(made, "rollout.samples_per_prompt"), value(made, "data.prompts_per_step")
    assert (samples, prompts) == (2, 512)  # groups of two, 1024 responses as before
    assert value(made, "name") == "qwen3_8b_ppo"  # what only a shell knows is left out of the name


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"], "algorithm.aggregation", "sequence_sum"),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.02"], "algorithm.kl_in", "reward"),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.02"], "algorithm.kl_coefficient", 0.02),
        (["algorithm.use_kl_in_reward=True"], "algorithm.kl_estimator", "k1"),
        (["actor_rollout_ref.actor.kl_loss_coef=0.5"], "algorithm.kl_coefficient", 0.0),  # use_kl_loss is off
        (["actor_rollout_ref.actor.clip_ratio=0.3"], "algorithm.clip_high", 0.3),
        (["actor_rollout_ref.rollout.top_k=20"], "rollout.top_k", 20),
        (["algorithm.rollout_correction.rollout_is=token"], "algorithm.importance_correction", "token"),
        (["algorithm.norm_adv_by_std_in_grpo=False"], "algorithm.normalize_std", False),
        (["trainer.total_training_steps=7"], "train.steps", 7),
        (["actor_rollout_ref.actor.grad_clip=0.5"], "train.max_grad_norm", 0.5),
        (["actor_rollout_ref.model.enable_gradient_checkpointing=False"], "train.activation_checkpointing", "none"),
        (["actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"], "model.dtype", "bfloat16"),
        (["trainer.n_gpus_per_node=1"], "cluster.backend", "inline"),
        (["custom_reward_function.path=r.py", "custom_reward_function.name=f"], "reward.function", "r.py:f"),
        (["data.filter_overlong_prompts=True", "data.truncation=left"], "data.overlong", "drop"),
        (
            ["actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.optim.lr=3e-6"],
            "train.learning_rate",
            3e-6,
        ),
        (["actor_rollout_ref.actor.fsdp_config.fsdp_size=2", "trainer.n_gpus_per_node=8"], "parallel.shard", 2),
    ],
)
def test_values(tmp_path: Path, overrides: list[str], key: str, expected: Any) -> None:
    assert value(of(tmp_path, *overrides), key) == expected


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["actor_rollout_ref.rollout.name=hf"], "actor_rollout_ref.rollout.name", "vllm was taken"),
        (["actor_rollout_ref.model.lora_rank=32"], "actor_rollout_ref.model.lora_rank", "LoRA is not in this version"),
        (["algorithm.adv_estimator=rloo"], "algorithm.adv_estimator", "not in this version"),
        (["trainer.test_freq=5"], "trainer.test_freq", "no held-out rows"),
        (["actor_rollout_ref.actor.novel_key=1"], "actor_rollout_ref.actor.novel_key", "no counterpart"),
        (
            ["data.train_batch_size=10", "actor_rollout_ref.actor.ppo_mini_batch_size=4"],
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "one more of them",
        ),
        (
            ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=kl"],
            "actor_rollout_ref.actor.kl_loss_type",
            "k2",
        ),
        (["actor_rollout_ref.actor.optim.lr=$LR"], "actor_rollout_ref.actor.optim.lr", "only when the script runs"),
        (["data.max_prompt_length='${data.x}'"], "data.max_prompt_length", "`${data.x}`"),
    ],
)
def test_what_is_left_out_is_named(tmp_path: Path, overrides: list[str], key: str, words: str) -> None:
    made = of(tmp_path, *overrides)
    assert words in made.left[key].reason
    loads(made, tmp_path)


def test_every_setting_of_a_script_is_converted_or_named(tmp_path: Path) -> None:
    made = of(tmp_path, "a.b=1", "actor_rollout_ref.nccl_timeout=100", "trainer.balance_batch=True")
    accounted = made.settings.read | made.left.keys()
    assert made.settings.arguments.keys() <= accounted


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.train_batch_size=many"], "`data.train_batch_size=many`, line 4 is not valid: it takes a number"),
        (["trainer.val_before_train=perhaps"], "it takes true or false"),
        (["actor_rollout_ref.actor.fsdp_config.model_dtype=int8"], "it takes fp32 or"),
        (["actor_rollout_ref.actor.strategy=megatron"], "trains with `megatron`"),
        (["model_engine=veomni"], "trains with `veomni`"),
        (["actor_rollout_ref.actor.fsdp_config.fsdp_size=3"], "does not divide the 8 ranks"),
        (["trainer.nnodes=0"], "must be at least 1"),
    ],
)
def test_values_that_are_none_are_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    path = tmp_path / "overrides.txt"
    path.write_text("python3 -m verl.trainer.main_ppo \\\n\\\n\\\n" + " ".join(overrides), encoding="utf-8")
    settings = read_settings(read_script(path, {}))
    sizes = read_sizes(CONFIG)

    def everything() -> None:
        strategy_of(settings)
        read_job(settings, sizes, sizes)
        convert(settings, module=None, config=CONFIG, name="x")

    with pytest.raises(RefusedError) as caught:
        everything()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text", ["null", "79GiB", "1e-6", "true", "a: b", "a #b", "x.py:f", "~/m", "Qwen/Qwen3-8B", "é"]
)
def test_text_stays_text_in_yaml(tmp_path: Path, text: str) -> None:
    made = of(tmp_path)
    made.put("model.path", text)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_yaml(made.recipe), encoding="utf-8")
    assert load(path).recipe.model.path == text

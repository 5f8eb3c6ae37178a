"""verl's settings → a recipe of ours. Where the two differ in meaning docs/coming-from.md says how."""

import re
from pathlib import Path

from plimsoll.config.aliases import KNOWN_ELSEWHERE
from plimsoll.migrate.convert_update import convert_algorithm, convert_train
from plimsoll.migrate.converted import Converted, NotConverted
from plimsoll.migrate.reasons import BY_PREFIX, DEFAULT
from plimsoll.migrate.settings import ACTOR, MODEL, ROLLOUT, Settings, why_unresolved

ENGINES = ("vllm", "sglang")


def convert(settings: Settings, *, module: str | None, config: Path, name: str) -> Converted:
    """The recipe and everything that is not in it. `config`: folder or file of the model's config.json. `name`: of the
    run, where the script gives none."""
    made = Converted(settings=settings)
    _name(made, name)
    _model(made, config)
    _data(made)
    _rollout(made)
    _reward(made)
    convert_algorithm(made, module)
    convert_train(made)
    _cluster(made)
    _watching(made)
    made.leave_all(BY_PREFIX)
    for argument in settings.unresolved.values():
        made.left[argument.key] = NotConverted(
            key=argument.key, value=argument.value.text, reason=why_unresolved(argument)
        )
    for key, argument in settings.arguments.items():
        if key not in settings.read and key not in made.left:
            ours = KNOWN_ELSEWHERE.get(key.rpartition(".")[2])
            reason = f"not read at this place; `{ours}` is the nearest key" if ours else DEFAULT
            made.left[key] = NotConverted(key=argument.key, value=argument.value.text, reason=reason)
    return made


def _name(made: Converted, fallback: str) -> None:
    given = made.settings.text("trainer.experiment_name", fallback)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", given).strip("-._") or re.sub(r"[^A-Za-z0-9]+", "-", fallback).strip("-")
    made.put("name", name or "run")
    if made.settings.given("data.seed"):
        made.put("seed", made.settings.whole("data.seed", 0))


def _model(made: Converted, config: Path) -> None:
    settings = made.settings
    path = settings.text(f"{MODEL}.path")
    if path:
        made.put("model.path", path)
    made.put("model.config", str(config))
    dtype = settings.itemsize(f"{ACTOR}.fsdp_config.model_dtype", "fp32")
    made.put("model.dtype", "float32" if dtype == 4 else "bfloat16")
    if path and not Path(path).is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        made.leave(f"{MODEL}.path", "a name at a hub: nothing is downloaded; put the folder there or name yours")
    settings.raw(f"{MODEL}.use_remove_padding")
    if not settings.flag(f"{MODEL}.use_remove_padding", default=True):
        made.leave(f"{MODEL}.use_remove_padding", "rows are packed wherever the model can; `model.packing` decides")


def _data(made: Converted) -> None:
    settings = made.settings
    for key, ours in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
        files = settings.items(key)
        if files:
            made.put(ours, files[0])
        elif ours == "data.train":
            made.put(ours, "train.parquet")
            made.leave(
                key, "the script names no file that can be known here: `train.parquet` stands for it", always=True
            )
        if len(files) > 1:
            made.leave(key, f"one file here: the first of {len(files)} was taken; join them")
    made.put("data.prompts_per_step", settings.whole("data.train_batch_size", 1024))
    made.put("data.max_prompt_tokens", settings.whole("data.max_prompt_length", 512))
    truncation = settings.text("data.truncation", "error")
    if settings.flag("data.filter_overlong_prompts"):
        made.put("data.overlong", "drop")
    elif truncation == "left":
        made.put("data.overlong", "truncate_left")
    elif truncation == "error":
        made.put("data.overlong", "error")
    else:
        made.leave("data.truncation", "prompts are cut on the left or not at all; `data.overlong` drops them here")
    prompt_key = settings.text("data.prompt_key", "prompt")
    if prompt_key != "prompt":
        made.put("data.prompt_key", prompt_key)
    if not settings.flag("data.shuffle", default=True):
        made.put("data.shuffle", False)
    rows = settings.whole("data.val_max_samples", -1)
    if rows > 0:
        made.put("data.max_eval_rows", rows)


def _rollout(made: Converted) -> None:
    settings = made.settings
    engine = settings.text(f"{ROLLOUT}.name", "vllm")
    if engine not in ENGINES:
        made.leave(f"{ROLLOUT}.name", "the engines are vllm, sglang and our own; vllm was taken")
        engine = "vllm"
    made.put("rollout.engine", engine)
    parallel = settings.whole(f"{ROLLOUT}.tensor_model_parallel_size", 2)
    made.put("rollout.tensor_parallel", parallel)
    if settings.flag(f"{ROLLOUT}.enforce_eager"):
        made.put("rollout.cuda_graphs", False)
    made.put("rollout.samples_per_prompt", settings.whole(f"{ROLLOUT}.n", 1))
    made.put("rollout.temperature", settings.number(f"{ROLLOUT}.temperature", 1.0))
    top_p, top_k = settings.number(f"{ROLLOUT}.top_p", 1.0), settings.whole(f"{ROLLOUT}.top_k", -1)
    if top_p < 1:
        made.put("rollout.top_p", top_p)
    if top_k > 0:
        made.put("rollout.top_k", top_k)
    made.put("rollout.max_response_tokens", settings.whole("data.max_response_length", 512))
    if settings.given(f"{ROLLOUT}.max_num_batched_tokens"):
        made.put("rollout.prefill_tokens", settings.whole(f"{ROLLOUT}.max_num_batched_tokens", 8192))
    if settings.items("data.val_files"):
        _evaluation(made)


def _evaluation(made: Converted) -> None:
    settings, prefix = made.settings, f"{ROLLOUT}.val_kwargs"
    samples = settings.whole(f"{prefix}.n", 1)
    temperature = settings.number(f"{prefix}.temperature", 0.0)
    if not settings.flag(f"{prefix}.do_sample"):
        temperature = 0.0
    if samples > 1 and temperature == 0:
        made.leave(f"{prefix}.n", "greedy samples are all the same: one is taken")
        samples = 1
    made.put("rollout.eval.samples", samples)
    made.put("rollout.eval.temperature", temperature)
    top_p, top_k = settings.number(f"{prefix}.top_p", 1.0), settings.whole(f"{prefix}.top_k", -1)
    if top_p < 1:
        made.put("rollout.eval.top_p", top_p)
    if top_k > 0:
        made.put("rollout.eval.top_k", top_k)


def _reward(made: Converted) -> None:
    path = made.settings.raw("reward.custom_reward_function.path")
    function = made.settings.text("reward.custom_reward_function.name", "compute_score")
    made.put("reward.function", f"{path}:{function}" if path else "by_source")
    if made.settings.flag("reward.reward_model.enable"):
        reason = "no reward model in the process in this version: the rule `http` asks one outside"
        made.leave("reward.reward_model.enable", reason)


def _cluster(made: Converted) -> None:
    settings = made.settings
    nodes, per_node = settings.whole("trainer.nnodes", 1), settings.whole("trainer.n_gpus_per_node", 8)
    ranks = nodes * per_node
    made.put("cluster.backend", "ray" if nodes > 1 else "local" if ranks > 1 else "inline")
    made.put("cluster.ranks", ranks)
    made.put("cluster.ranks_per_node", per_node)
    shard = settings.whole(f"{ACTOR}.fsdp_config.fsdp_size", -1)
    if 0 < shard < ranks:
        made.put("parallel.shard", shard)
    context = settings.whole(f"{ACTOR}.ulysses_sequence_parallel_size", 1)
    if context > 1:
        made.put("parallel.context", context)


def _watching(made: Converted) -> None:
    settings = made.settings
    every, test = settings.whole("trainer.save_freq", -1), settings.whole("trainer.test_freq", -1)
    if every > 0:
        made.put("checkpoint.every", every)
    keep = settings.raw("trainer.max_actor_ckpt_to_keep")
    made.put("checkpoint.keep", None if keep is None else settings.whole("trainer.max_actor_ckpt_to_keep", 1))
    has_rows = "eval" in made.recipe["data"]
    if test > 0 and has_rows:
        made.put("train.eval_every", test)
    elif test > 0:
        made.leave("trainer.test_freq", "there are no held-out rows, `data.val_files`")
    if not settings.flag("trainer.val_before_train", default=True):
        made.put("train.eval_at_ends", False)
    loggers = settings.items("trainer.logger") or ["console", "wandb"]
    others = [name for name in loggers if name not in ("console", "wandb", "tensorboard")]
    if "wandb" in loggers:
        made.put("observe.wandb", "online")
        made.put("observe.wandb_project", settings.text("trainer.project_name", "verl_examples"))
    else:
        made.leave("trainer.project_name", "a project is a thing of wandb, which is not among the loggers")
    if "tensorboard" in loggers:
        made.put("observe.tensorboard", True)
    if others:
        made.leave("trainer.logger", f"no {', '.join(others)} here; console, tensorboard and wandb there are")

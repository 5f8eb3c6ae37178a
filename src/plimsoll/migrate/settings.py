"""verl's settings, as far as they matter here: what a launch sets, over verl's defaults (its config tree of 2026)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from plimsoll.errors import RefusedError
from plimsoll.migrate.script import Argument, Launch

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"

RENAMED = {
    # An older place of a setting → where it is now. The last place that a launch sets wins.
    f"{ACTOR}.fsdp_config.strategy": f"{ACTOR}.strategy",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    "critic.model.fsdp_config.param_offload": "critic.fsdp.param_offload",
    "critic.model.fsdp_config.optimizer_offload": "critic.fsdp.optimizer_offload",
    "critic.model.fsdp_config.fsdp_size": "critic.fsdp.fsdp_size",
    "critic.model.fsdp_config.model_dtype": "critic.fsdp.model_dtype",
    f"{ACTOR}.optim.clip_grad": f"{ACTOR}.grad_clip",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.overlong_buffer.enable": "reward.reward_kwargs.overlong_buffer_cfg.enable",
    "reward_model.overlong_buffer.len": "reward.reward_kwargs.overlong_buffer_cfg.len",
    "reward_model.overlong_buffer.penalty_factor": "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor",
    "reward_model.overlong_buffer.log": "reward.reward_kwargs.overlong_buffer_cfg.log",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": "reward.reward_kwargs.overlong_buffer_cfg.enable",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": "reward.reward_kwargs.overlong_buffer_cfg.len",
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": (
        "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor"
    ),
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": "reward.reward_kwargs.overlong_buffer_cfg.log",
    "reward_model.reward_kwargs.max_resp_len": "reward.reward_kwargs.max_resp_len",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
}

DTYPES = {"fp32": 4, "float32": 4, "float": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2}
_SENTENCE = "is known only when the script runs; write its value in the script, or give the variable, NAME=VALUE"


@dataclass(slots=True, kw_only=True)
class Settings:
    """Values by key. Which keys were asked for is kept: the rest has no counterpart."""

    arguments: dict[str, Argument]
    """Under the name that a key has now; only those with a known value."""
    unresolved: dict[str, Argument]
    read: set[str] = field(default_factory=set[str])

    def raw(self, key: str) -> str | None:
        """As written; None: the launch does not set it, or to nothing."""
        self.read.add(key)
        found = self.arguments.get(key)
        text = None if found is None or found.removed else found.value.text.strip().strip("'\"")
        return None if text is None or text.lower() in ("null", "none", "") else text

    def given(self, key: str) -> bool:
        """Whether the launch sets it, to whatever."""
        return key in self.arguments

    def text(self, key: str, default: str = "") -> str:
        """Text."""
        return self.raw(key) or default

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or False."""
        raw = self.raw(key)
        if raw is None:
            return default
        if raw.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise self.refuse(key, raw, "true or false")
        return raw.lower() in ("true", "1", "yes")

    def whole(self, key: str, default: int) -> int:
        """A whole number."""
        value = self.number(key, default)
        if value != int(value):
            raise self.refuse(key, self.text(key), "a whole number")
        return int(value)

    def number(self, key: str, default: float) -> float:
        """A number."""
        raw = self.raw(key)
        try:
            return default if raw is None else float(raw.replace("_", ""))
        except ValueError:
            raise self.refuse(key, raw or "", "a number") from None

    def items(self, key: str) -> list[str]:
        """A list, or one text as a list of one."""
        raw = self.raw(key)
        if raw is None:
            return []
        try:
            found: Any = YAML(typ="safe", pure=True).load(raw)  # pyright: ignore[reportUnknownMemberType]
        except YAMLError:
            found = raw
        return [str(item) for item in found] if isinstance(found, list) else [str(found)]  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]

    def itemsize(self, key: str, default: str) -> int:
        """Bytes of an element of the dtype."""
        name = self.text(key, default)
        if name not in DTYPES:
            raise self.refuse(key, name, " or ".join(DTYPES))
        return DTYPES[name]

    def refuse(self, key: str, value: str, takes: str) -> RefusedError:
        """The value is not one."""
        found = self.arguments.get(key)
        where = f", line {found.line}" if found else ""
        return RefusedError(f"`{key}={value}`{where} is not valid: it takes {takes}; mend it in the script")


def read_settings(launch: Launch) -> Settings:
    """The arguments under today's names; of a key that is set twice the last one counts, as hydra has it."""
    known: dict[str, Argument] = {}
    unresolved: dict[str, Argument] = {}
    for argument in launch.arguments:
        key = RENAMED.get(argument.key, argument.key)
        known.pop(key, None)
        unresolved.pop(key, None)
        (unresolved if argument.value.unknown or "${" in argument.value.text else known)[key] = argument
    name = unresolved.pop("trainer.experiment_name", None)
    if name is not None:  # a date in the name of a run is not worth a question
        known["trainer.experiment_name"] = _without_unknown(name)
    return Settings(arguments=known, unresolved=unresolved)


def why_unresolved(argument: Argument) -> str:
    """A sentence for the reader."""
    parts = argument.value.unknown or re.findall(r"\$\{[^}]*\}", argument.value.text)
    return f"{' and '.join(f'`{part}`' for part in dict.fromkeys(parts))} {_SENTENCE}"


def _without_unknown(argument: Argument) -> Argument:
    text = argument.value.text
    parts: Sequence[str] = argument.value.unknown or re.findall(r"\$\{[^}]*\}", text)
    for part in parts:
        text = text.replace(part, "")
    value = type(argument.value)(text=text.strip("-_. "))
    return Argument(key=argument.key, value=value, line=argument.line)

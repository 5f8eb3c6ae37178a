"""Rules between the keys of `reward`, and between them and evaluation. What a function is, is not looked at here."""

import re
from collections.abc import Iterable, Iterator

from plimsoll.config.recipe import Recipe
from plimsoll.config.reward import RewardConfig

BY_SOURCE = "by_source"

_PART_NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""No slash: a further number of a part is logged as NAME/KEY, and must not have the name of another part."""


def reward_causes(recipe: Recipe) -> Iterator[str]:
    """What is wrong, one cause each."""
    reward = recipe.reward
    if reward.parts:
        yield from _parts(reward)
    by_source = BY_SOURCE in (part.function for part in reward.parts.values())
    by_source |= not reward.parts and reward.function == BY_SOURCE
    if reward.sources and not by_source:
        yield (
            f"`reward.sources` is read by `{BY_SOURCE}` only: set `reward.function={BY_SOURCE}`, or the `function` of "
            "one of `reward.parts`, or `reward.sources={}`"
        )
    yield from _options(reward)
    named = recipe.rollout.eval.correct_part
    if named is not None and reward.parts and named.partition("/")[0] not in reward.parts:
        yield (
            f"`rollout.eval.correct_part={named}` is not one of `reward.parts` ({_names(reward.parts)}); name one of "
            "them, or set `rollout.eval.correct_part=null` for the reward itself"
        )


def _parts(reward: RewardConfig) -> Iterator[str]:
    default = RewardConfig.model_fields["function"].default
    if reward.function != default:
        yield (
            f"`reward.function={reward.function}` is not read, because `reward.parts` is set: make it one of the "
            f"parts, or set `reward.function={default}`, its default"
        )
    if reward.options:
        yield (
            "`reward.options` is not read, because `reward.parts` is set: each part has `options` of its own; "
            "set `reward.options={}`"
        )
    for name in reward.parts:
        if not _PART_NAME.fullmatch(name):
            yield f"`reward.parts`: {name!r} cannot be a name; it takes letters, digits, `.`, `_` and `-`"
    if not any(part.weight for part in reward.parts.values()):
        yield (
            "`reward.parts`: every weight is 0, so every reward would be 0 and nothing is learnt; set one "
            f"(`reward.parts.{next(iter(reward.parts))}.weight=1`)"
        )


def _options(reward: RewardConfig) -> Iterator[str]:
    """`by_source` is a choice between functions: options belong to one of these."""
    rules = {"reward": reward, **{f"reward.parts.{name}": part for name, part in reward.parts.items()}}
    for section, rule in rules.items():
        if rule.function == BY_SOURCE and rule.options:
            yield (
                f"`{section}.options` is not read by `{BY_SOURCE}`: give a function its options in `reward.sources`, "
                f"and set `{section}.options={{}}`"
            )
    for source, rule in reward.sources.items():
        if rule.function == BY_SOURCE:
            yield f"`reward.sources.{source}.function={BY_SOURCE}` leads back to `reward.sources`; name another one"
        if "*" in source[:-1]:
            yield f"`reward.sources`: in {source!r} a `*` stands for itself; only one at the end stands for anything"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)

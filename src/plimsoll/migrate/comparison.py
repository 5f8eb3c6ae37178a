"""One script, read three ways: what verl's way holds, the recipe, our plan."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll.config.checks import check_plan
from plimsoll.config.load import load
from plimsoll.config.planned import MemoryPlan
from plimsoll.config.recipe import Recipe
from plimsoll.config.schema import leaves
from plimsoll.config.source import parse_overrides
from plimsoll.errors import RecipeError
from plimsoll.memory.plan.capacity import assumptions, job_of, machine
from plimsoll.memory.plan.choose import plan
from plimsoll.memory.plan.job import Job, Machine
from plimsoll.migrate.convert import convert
from plimsoll.migrate.converted import Converted
from plimsoll.migrate.expand import Text
from plimsoll.migrate.holdings import HostPhase, host_phases, node_peaks, rank_peaks
from plimsoll.migrate.locate import find_config
from plimsoll.migrate.on_device import DevicePhase, device_phases
from plimsoll.migrate.script import Argument, Launch, read_script
from plimsoll.migrate.settings import ACTOR, MODEL, REF, Settings, read_settings
from plimsoll.migrate.verl_job import VerlJob, has_reference, read_job, strategy_of
from plimsoll.migrate.yaml import recipe_yaml
from plimsoll.model.sizes import read_sizes

THEIR_SECTIONS = ("actor_rollout_ref", "critic", "trainer", "reward_model", "custom_reward_function")
"""Overrides of these sections are verl's and are laid over the script."""

SAVED_AS = "recipe.yaml"


@dataclass(slots=True, kw_only=True, frozen=True)
class Comparison:
    """Everything that is shown."""

    script: Path
    module: str | None
    job: VerlJob
    host: tuple[HostPhase, ...]
    device: tuple[DevicePhase, ...]
    converted: Converted
    recipe: Recipe
    ours: Job
    machine: Machine
    plan: MemoryPlan
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """One object: `verl`, `recipe`, `not_converted`, `plan`, `notes`."""
        return {
            "verl": _verl_json(self),
            "recipe": self.converted.recipe,
            "not_converted": [
                {"key": item.key, "value": item.value, "reason": item.reason} for item in self.converted.left.values()
            ],
            "plan": self.plan.as_json(),
            "notes": list(self.notes),
        }


def compare(script: Path, overrides: Sequence[str]) -> Comparison:
    """`overrides`: keys of a recipe, keys of verl (`trainer.nnodes=2`), and variables of the script (`NAME=VALUE`)."""
    given = _Given.sorted(overrides)
    launch = read_script(script, given.variables)
    settings = read_settings(
        Launch(module=launch.module, arguments=launch.arguments + given.theirs, notes=launch.notes)
    )
    strategy_of(settings)  # another trainer than FSDP is refused before anything else is asked
    named = given.recipe.get("model.path") or settings.raw(f"{MODEL}.path")
    config = find_config(named, script, given.recipe.get("model.config"), key=f"{MODEL}.path")
    sizes = read_sizes(config)
    critic = settings.raw("critic.model.path")
    same = critic is None or critic == settings.raw(f"{MODEL}.path") or "model.config" in given.recipe
    critic_sizes = sizes if same else read_sizes(find_config(critic, script, None, key="critic.model.path"))
    job = read_job(settings, sizes, critic_sizes)
    converted = convert(settings, module=launch.module, config=config, name=script.stem)
    recipe, notes = _load(converted, given.ours)
    check_plan(recipe, "policy")
    capacities = machine(recipe, device="cuda")
    ours = job_of(recipe, "policy")
    planned = plan(ours, capacities)
    return Comparison(
        script=script,
        module=launch.module,
        job=job,
        host=host_phases(job),
        device=device_phases(job, capacities.device_bytes),
        converted=converted,
        recipe=recipe,
        ours=ours,
        machine=capacities,
        plan=planned.model_copy(update={"notes": (*assumptions(ours, capacities), *planned.notes)}),
        notes=(*launch.notes, *notes, *_notes(settings, job)),
    )


@dataclass(slots=True, kw_only=True, frozen=True)
class _Given:
    """What stands behind the script on the command line, by what it is meant for."""

    ours: tuple[str, ...]
    theirs: tuple[Argument, ...]
    variables: dict[str, str]
    recipe: Mapping[str, str]
    """`ours` by key."""

    @staticmethod
    def sorted(overrides: Sequence[str]) -> "_Given":
        ours: list[str] = []
        theirs: list[Argument] = []
        variables: dict[str, str] = {}
        for override in overrides:
            key, equals, value = override.partition("=")
            if equals and key.isidentifier() and key not in leaves():
                variables[key] = value
            elif equals and key.split(".")[0] in THEIR_SECTIONS:
                theirs.append(Argument(key=key, value=Text(text=value), line=0))
            else:
                ours.append(override)
        by_key = {key: value for key, _, value in (override.partition("=") for override in ours)}
        return _Given(ours=tuple(ours), theirs=tuple(theirs), variables=variables, recipe=by_key)


def _load(converted: Converted, overrides: Sequence[str]) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe as `plimsoll train` would read it, overrides laid over; they go into what is shown, too."""
    settings, causes = parse_overrides(overrides)
    if causes:
        raise RecipeError(causes)
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as folder:
        path = Path(folder) / SAVED_AS
        path.write_text(recipe_yaml(converted.recipe), encoding="utf-8")
        loaded = load(path, overrides)
    for setting in settings:
        converted.put(".".join(setting.path), setting.value)
    return loaded.recipe, loaded.notes


def _notes(settings: Settings, job: VerlJob) -> list[str]:
    notes: list[str] = []
    reference = job.reference
    if reference is not None and not settings.given(f"{REF}.fsdp_config.fsdp_size") and reference.shard < job.ranks:
        notes.append(f"the reference is taken to be sharded like the actor, over {reference.shard} ranks")
    if has_reference(settings) and settings.number(f"{ACTOR}.kl_loss_coef", 0.001) == 0:
        notes.append("verl builds a reference for `use_kl_loss` with a coefficient of 0 too; the recipe reads none")
    if job.lora:
        notes.append("LoRA is counted in verl's sleeping engine alone; the other figures are of a full fine-tune")
    return notes


def _verl_json(found: Comparison) -> dict[str, Any]:
    per_node, host = found.job.ranks_per_node, found.host
    steps = next(phase for phase in host if phase.name == "steps")
    loading = tuple(phase for phase in host if phase.loading)

    def on_host(phase: HostPhase) -> dict[str, Any]:
        return {
            "node_bytes": list(phase.node_bytes(per_node)),
            "rank_bytes": list(phase.rank_bytes),
            "first_rank": dict(phase.ranks[0]),
            "transient_bytes": phase.transient_bytes,
        }

    phases: list[dict[str, Any]] = [
        {"phase": phase.name, "host": on_host(phase)}
        for phase in host
        if phase.loading or phase.name == "build rollout"
    ]
    for row in found.device:
        phases.append(
            {
                "phase": row.name,
                "host": on_host(steps),
                "device_bytes": row.device_bytes,
                "capacity_bytes": found.machine.device_bytes,
                "residents": dict(row.residents),
                "workspace": dict(row.workspace),
            }
        )
    phases += [{"phase": phase.name, "host": on_host(phase)} for phase in host if phase.name == "save"]
    return {
        "host": {
            "node_peak_bytes": list(node_peaks(host, per_node)),
            "rank_peak_bytes": list(rank_peaks(host)),
            "node_load_peak_bytes": list(node_peaks(loading, per_node)),
            "rank_load_peak_bytes": list(rank_peaks(loading)),
        },
        "phases": phases,
    }

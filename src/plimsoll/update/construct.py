"""How the trainer's models come to be: weights → packed policy → sharding."""

import logging

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from plimsoll.config.derived import RunPlan
from plimsoll.config.recipe import Recipe
from plimsoll.errors import RefusedError
from plimsoll.model.build import DTYPES, build_random, load_pretrained, model_folder, read_config
from plimsoll.model.policy import PackedPolicy
from plimsoll.model.probe import ProbeReport, probe
from plimsoll.model.spec import model_spec
from plimsoll.parallel.apply import apply

logger = logging.getLogger(__name__)


def build_policy(recipe: Recipe, plan: RunPlan, mesh: DeviceMesh) -> PackedPolicy:
    """The policy in the master dtype, sharded."""
    lm = _language_model(recipe, recipe.model.path, DTYPES[recipe.model.dtype], torch.device(plan.device))
    policy = _wrap(lm, recipe, plan)
    apply(
        policy,
        mesh,
        compute_dtype=DTYPES[plan.compute_dtype],
        activation_checkpointing=plan.activation_checkpointing,
        compile_layers=recipe.train.compile,
    )
    return policy


def build_reference(recipe: Recipe, plan: RunPlan, mesh: DeviceMesh) -> PackedPolicy:
    """The frozen reference in the compute dtype, sharded. For a policy from random weights: those first weights."""
    source = recipe.model.reference or recipe.model.path
    dtype = DTYPES[plan.compute_dtype]
    lm = _language_model(recipe, source, dtype, torch.device(plan.device), random=recipe.model.reference is None)
    lm.requires_grad_(False)
    policy = _wrap(lm, recipe, plan)
    apply(
        policy,
        mesh,
        compute_dtype=dtype,
        activation_checkpointing="none",
        compile_layers=recipe.train.compile,
        trained=False,
    )
    return policy


def probe_policy(policy: PackedPolicy, recipe: Recipe, plan: RunPlan, temperature: float) -> ProbeReport:
    """Ask the probe's questions; it may change the policy's packing."""
    return probe(
        policy,
        requested=recipe.model.packing,
        vocab=int(policy.lm.config.vocab_size),
        dtype=DTYPES[plan.compute_dtype],
        device=torch.device(plan.device),
        temperature=temperature,
    )


def own_tensors(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers by the name that transformers saves, once each: a tied head is left out."""
    seen: set[int] = set()
    own: dict[str, Tensor] = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            own[name] = tensor
    return own


def own_parameters(lm: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The trainable ones of `own_tensors`."""
    return {name: t for name, t in own_tensors(lm).items() if isinstance(t, nn.Parameter) and t.requires_grad}


def _language_model(
    recipe: Recipe, path: str | None, dtype: torch.dtype, device: torch.device, *, random: bool = True
) -> PreTrainedModel:
    """`random`: `model.init: random` applies to this model too."""
    model = recipe.model
    if random and model.init == "random":
        source = model.config or model.path
        if source is None:
            raise RefusedError("model.init=random needs model.config (or model.path) for the shape of the model")
        return build_random(read_config(source), dtype, device, recipe.seed)
    if path is None:
        raise RefusedError("model.path is not set and model.init is 'pretrained'; set model.path or model.init=random")
    return load_pretrained(model_folder(path), dtype, device)


def _wrap(lm: PreTrainedModel, recipe: Recipe, plan: RunPlan) -> PackedPolicy:
    if plan.packing == "packed" and plan.device == "cpu":
        raise RefusedError(
            f"model.packing={recipe.model.packing}: packed rows need torch's variable-length kernel, which has no CPU "
            "version; set model.packing=padded (or auto)"
        )
    if plan.packing == "packed" and plan.compute_dtype != "bfloat16":
        raise RefusedError(
            f"model.packing={recipe.model.packing}: the variable-length kernel takes 16-bit numbers, and "
            f"model.compute_dtype is {plan.compute_dtype}; set model.packing=padded or model.compute_dtype=bfloat16"
        )
    return PackedPolicy(lm, model_spec(lm), packing=plan.packing, chunk=plan.logprob_chunk)
